"""Without a network: one request, a clear sentence, and whatever is in the cache."""

import logging
import socket
import threading
from collections.abc import Iterator

import datasets
import pytest
import torch
from datasets import Dataset, config

from optimum_prune import Pruner, fetching
from optimum_prune.calibration.sources import open_source
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import CalibrationError, CheckpointError
from optimum_prune.fetching import fetch, reachable, unreachable
from optimum_prune.integrations.loading import load_skeleton
from tests.integrations.hub_server import contents, loopback
from tests.models import llama
from tests.words import tokenizer


class Silent:
    """A server that takes requests and counts them; it closes the connections, or never answers."""

    def __init__(self, hangs: bool):
        self.hangs, self.requests, self.open = hangs, [], []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        try:
            while True:
                connection, _ = self.socket.accept()
                self.requests.append(connection.recv(1 << 16).decode().partition("\r\n")[0])
                if self.hangs:
                    self.open.append(connection)
                else:
                    connection.close()
        except OSError:  # the end of the test
            return

    @property
    def attempts(self) -> int:
        """Requests, but for one that huggingface_hub sends once in a process, for its user agent."""
        return sum("agent-harnesses" not in request for request in self.requests)


@pytest.fixture(params=[False, True], ids=["closes", "hangs"])
def silent(request, monkeypatch, tmp_path) -> Iterator[Silent]:
    """Turn this process to a Hub that does not answer, with an empty cache."""
    server = Silent(request.param)
    turn(server.url, monkeypatch, tmp_path)
    yield server
    server.socket.close()
    for connection in server.open:
        connection.close()


def turn(url: str, monkeypatch: pytest.MonkeyPatch, folder) -> None:
    settings = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": False,
    }
    for name, value in settings.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
    monkeypatch.setattr(config, "HF_ENDPOINT", url)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(folder / "datasets"))
    monkeypatch.setattr(fetching, "PROBE_TIMEOUT", 0.2)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits to try again"))


ASKED = {
    "dataset": (lambda: open_source(CalibrationConfig("org/data")), CalibrationError, "split 'train'"),
    "configuration": (lambda: open_source(CalibrationConfig("org/data:one")), CalibrationError, "split 'train'"),
    "model": (lambda: Pruner.from_pretrained("org/model"), CheckpointError, "org/model cannot be loaded"),
    "skeleton": (lambda: load_skeleton("org/model"), CheckpointError, "org/model cannot be loaded"),
    "config": (lambda: PruningConfig.from_pretrained("org/model"), CheckpointError, "config.json of org/model"),
}


@pytest.mark.parametrize(("ask", "error", "what"), ASKED.values(), ids=ASKED)
def test_one_request_tells_that_there_is_no_network(silent, ask, error, what):
    with pytest.raises(error, match=rf"{what}.*{silent.url} does not answer: .*") as caught:
        ask()
    assert silent.attempts == 1
    assert "\n" not in str(caught.value) and "OfflineMode" not in str(caught.value)
    assert config.HF_HUB_OFFLINE is False


def test_the_answer_is_kept_for_a_while(silent, monkeypatch):
    assert unreachable(ask=False) is None and silent.attempts == 0
    assert unreachable() == unreachable() == unreachable(ask=False) is not None
    assert silent.attempts == 1
    monkeypatch.setattr(fetching, "PROBE_AGAIN", 0)
    assert unreachable() is not None and silent.attempts == 2


def test_what_needs_no_hub_asks_none(silent, tmp_path, monkeypatch):
    assert reachable(tmp_path) == {} and reachable("/no/such/folder") == {}
    assert reachable("org/model", local_files_only=True) == {"local_files_only": True}
    with pytest.raises(CalibrationError, match="does not exist"):
        open_source(CalibrationConfig("no/such.txt"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert unreachable() is None
    with pytest.raises(CheckpointError, match="cannot be had from the Hub"):
        fetch("org/model", "config.json")
    assert silent.attempts == 0


def test_a_cached_model_is_loaded_without_a_network(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "optimum_prune")
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    with monkeypatch.context() as patch, loopback(tmp_path, patch) as hub:
        hub.create("org/model", contents(tmp_path / "model"))
        online = Pruner.from_pretrained("org/model")
        assert sum(request == "HEAD /" for request in hub.log) == 1, "a Hub that answers is not asked again"
    server = Silent(hangs=False)
    turn(server.url, monkeypatch, tmp_path)
    offline = Pruner.from_pretrained("org/model")
    assert server.attempts == 1 and "The Hub cannot be reached" in caplog.text
    assert offline.tokenizer is not None and online.tokenizer is not None
    assert offline.tokenizer.get_vocab() == online.tokenizer.get_vocab()
    for name, weight in online.model.state_dict().items():
        assert torch.equal(weight, offline.model.state_dict()[name])
    assert fetch("org/model", "config.json") is not None and server.attempts == 1
    server.socket.close()


def test_a_cached_dataset_is_read_without_a_network(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    Dataset.from_dict({"text": ["the fox"]}).to_parquet(tmp_path / "data" / "train.parquet")
    datasets.load_dataset(str(tmp_path / "data"), cache_dir=str(tmp_path / "datasets"))
    (tmp_path / "datasets" / "data").rename(tmp_path / "datasets" / "org___data")  # as of the Hub's org/data
    server = Silent(hangs=False)
    turn(server.url, monkeypatch, tmp_path)
    source = open_source(CalibrationConfig("org/data"))
    assert (source.kind, list(source.items)) == ("texts", ["the fox"])
    assert server.attempts == 1
    with pytest.raises(CalibrationError, match="dataset 'org/data', split 'nosuch'"):
        open_source(CalibrationConfig("org/data", split="nosuch"))
    server.socket.close()
