"""Metadata of cards: what is inherited, what a user may give."""

import http.server
import logging
import re
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest

from optimum_prune.errors import InvalidConfig
from optimum_prune.integrations import metadata
from optimum_prune.integrations.metadata import LICENSES, derived_from, given_metadata, inherited_metadata


class TestInheritance:
    CARD = """\
---
license: other
license_name: their-license
license_link: LICENSE
language:
- en
datasets:
- org/pretraining
tags:
- theirs
model-index: broken
---
# Theirs
"""

    @pytest.fixture
    def hub(self, monkeypatch):
        """A server that has the card of one model, and counts requests."""
        requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append(self.path)
                found = self.path == "/some-org/some-model/README.md"
                self.send_response(200 if found else 404)
                self.end_headers()
                self.wfile.write(TestInheritance.CARD.encode() if found else b"")

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(metadata, "hf_hub_url", lambda name, file: f"{url}/{name}/{file}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield requests
        server.shutdown()
        server.server_close()

    def test_of_a_local_directory(self, tmp_path):
        (tmp_path / "README.md").write_text(self.CARD)
        assert inherited_metadata(tmp_path) == {
            "license": "other",
            "license_name": "their-license",
            "language": ["en"],
            "datasets": ["org/pretraining"],
        }

    def test_of_the_hub(self, hub):
        found = inherited_metadata("some-org/some-model")
        assert found["license"] == "other"
        assert re.fullmatch(r"http://.*/some-org/some-model/LICENSE", found["license_link"])
        assert hub == ["/some-org/some-model/README.md"]

    def test_of_the_cache(self, hub, tmp_path, monkeypatch):
        cached = tmp_path / "README.md"
        cached.write_text("---\nlicense: mit\n---\n")
        monkeypatch.setattr(metadata, "try_to_load_from_cache", lambda name, file: str(cached))
        assert inherited_metadata("some-org/some-model") == {"license": "mit"}
        assert hub == []

    def test_offline(self, hub, monkeypatch, caplog):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with caplog.at_level(logging.INFO, logger=metadata.__name__):
            assert inherited_metadata("some-org/some-model") == {}
        assert "offline mode is enabled" in caplog.text
        assert hub == []

    def test_of_a_model_without_a_card(self, hub, caplog):
        with caplog.at_level(logging.INFO, logger=metadata.__name__):
            assert inherited_metadata("some-org/other-model") == {}
        assert "some-org/other-model: " in caplog.text

    def test_a_hub_out_of_reach_is_given_up_at_once(self, monkeypatch, caplog):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(metadata, "hf_hub_url", lambda name, file: "http://127.0.0.1:9/README.md")
        start = time.monotonic()
        assert inherited_metadata("some-org/some-model") == {}
        assert time.monotonic() - start < 2 * metadata.TIMEOUT
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    @pytest.mark.parametrize(
        "content", ["", "no metadata", "---\n[1, 2]\n---\n", "---\na: [\n---\n", "---\nlicense:\n---\n"]
    )
    def test_of_a_card_that_says_nothing(self, tmp_path: Path, content):
        (tmp_path / "README.md").write_text(content)
        assert inherited_metadata(tmp_path) == {}

    def test_of_nothing(self, tmp_path: Path):
        assert inherited_metadata(None) == {}
        assert inherited_metadata(tmp_path) == {}
        assert inherited_metadata(tmp_path / "gone") == {}

    def test_a_link_to_a_file_that_goes_along_stays(self, tmp_path, hub):
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "README.md").write_text(self.CARD)
        (tmp_path / "new").mkdir()
        for there in (False, True):
            for name in (tmp_path / "source", "some-org/some-model"):
                link = inherited_metadata(name, beside=tmp_path / "new").get("license_link")
                assert (link == "LICENSE") == there
            (tmp_path / "new" / "LICENSE").write_text("terms")

    def test_task(self, tmp_path):
        (tmp_path / "README.md").write_text("---\npipeline_tag: sentence-similarity\n---\n")
        assert inherited_metadata(tmp_path) == {"pipeline_tag": "sentence-similarity"}


class TestDerivedFrom:
    def test_as_the_card_says(self, tmp_path):
        (tmp_path / "config.json").write_text('{"_name_or_path": "some-org/other"}')
        for named in ("org/dense", ["org/one", "org/two"]):
            (tmp_path / "README.md").write_text(f"---\nbase_model: {named}\n---\n")
            assert derived_from(tmp_path) == named

    def test_as_the_config_says_of_a_model_that_is_on_the_hub(self, tmp_path, monkeypatch):
        """A path of somebody's machine may look like an id."""
        cards = {"some-org/some-model": "---\nlicense: mit\n---\n"}
        read = metadata._read_card
        monkeypatch.setattr(metadata, "_read_card", lambda name: cards[name] if "org/" in name else read(name))
        for name, found in (("some-org/some-model", "some-org/some-model"), ("my-org/run-3", None), ("/home/x", None)):
            (tmp_path / "config.json").write_text(f'{{"_name_or_path": "{name}"}}')
            assert derived_from(tmp_path) == found

    @pytest.mark.parametrize("config", [None, "{}", "[]", "no json", '{"_name_or_path": 3}', '{"_name_or_path": ""}'])
    def test_of_nothing(self, config, tmp_path):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        assert derived_from(tmp_path) is None and derived_from(None) is None


class TestGiven:
    def test_what_is_given(self):
        assert given_metadata(None, None) == {}
        assert given_metadata("org/dense-1.5", "apache-2.0") == {"base_model": "org/dense-1.5", "license": "apache-2.0"}
        assert all(given_metadata(None, name) == {"license": name} for name in LICENSES)

    @pytest.mark.parametrize("name", ["", "dense", "/home/me/dense", "~/dense", "./dense", "a/b/c", "org/ dense", 5])
    def test_no_id_of_the_hub(self, name):
        with pytest.raises(InvalidConfig, match=r"base_model must be the id of a model on the Hub, as in 'user/name'"):
            given_metadata(name, None)

    @pytest.mark.parametrize(
        ("name", "suggested"),
        [("MIT", "mit"), ("apache2.0", "apache-2.0"), ("gpl3", "gpl"), ("", None), (["gpl", 5], None)],
    )
    def test_no_license_of_the_hub(self, name, suggested):
        with pytest.raises(InvalidConfig, match="Unknown license") as caught:
            given_metadata(None, name)
        assert (f"Did you mean {suggested!r}?" in str(caught.value)) == (suggested is not None)
        assert "https://huggingface.co/docs/hub/repositories-licenses" in str(caught.value)
