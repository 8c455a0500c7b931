"""Reports and recipes of pruned checkpoints, from folders and from the Hub, without weights."""

import json
import re
import shutil

import pytest

from optimum_prune import Pruner, PruningConfig
from optimum_prune.calibration.sources import open_source
from optimum_prune.errors import CalibrationError, CheckpointError
from optimum_prune.fetching import fetch
from optimum_prune.integrations.reading import open_report
from tests.integrations.hub_server import Fault, contents, loopback
from tests.models import llama, source
from tests.words import tokenizer

UNREAD = ("safetensors", "tokenizer")


@pytest.fixture(scope="module")
def pruner():
    model = llama()
    pruner = Pruner(model, tokenizer())
    data = {"source": source(model), "num_samples": 4, "seq_len": 12}
    pruner.prune(PruningConfig(scorer="wanda", sparsity=0.3, calibration=data))  # pyright: ignore[reportArgumentType]
    pruner.evaluate(data["source"], latency=False)
    return pruner


@pytest.fixture(scope="module")
def saved(pruner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "it"
    pruner.save_pretrained(folder)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch, saved):
    """A Hub that has the checkpoint as `me/it`."""
    with loopback(tmp_path, monkeypatch) as hub:
        hub.create("me/it", contents(saved))
        yield hub


@pytest.fixture
def damaged(saved, tmp_path):
    """Return a function that copies the checkpoint, with a file changed or removed."""

    def change(name, content):
        folder = tmp_path / "damaged"
        shutil.copytree(saved, folder)
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
        return folder

    return change


# What is read


def test_folder(pruner, saved):
    report, evaluations = open_report(saved)
    assert report == pruner.report
    assert evaluations == pruner.evaluations


def test_repository(pruner, hub):
    report, evaluations = open_report("me/it")
    assert report == pruner.report
    assert evaluations == pruner.evaluations
    assert not [request for request in hub.log if any(name in request for name in UNREAD)]


def test_cached(pruner, hub, monkeypatch):
    open_report("me/it")
    hub.log.clear()
    assert open_report("me/it", local_files_only=True)[0] == pruner.report
    assert hub.log == []


def test_revision(pruner, hub):
    hub.repositories["me/it"].branches["old"] = hub.repositories["me/it"].branches["main"]
    hub.repositories["me/it"].commit("main", {"config.json": b"{}"}, "gone")
    assert open_report("me/it", revision="old")[0] == pruner.report
    with pytest.raises(CheckpointError, match="me/it was not pruned by optimum_prune"):
        open_report("me/it")


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_recipe(place, pruner, saved, hub):
    config = PruningConfig.from_pretrained(saved if place == "folder" else "me/it")
    assert config.to_dict() == pruner.report.config
    assert not [request for request in hub.log if any(name in request for name in (*UNREAD, "report"))]
    with pytest.raises(CalibrationError, match=r"set calibration\.source to the data again"):
        open_source(config.calibration)


def test_pruner_of_a_repository(pruner, hub):
    again = Pruner.from_pretrained("me/it")
    assert again.report == pruner.report
    assert again.evaluations == pruner.evaluations


def test_pruner_of_a_repository_without_a_report(hub):
    hub.faults.append(Fault("pruning_report", 500))
    again = Pruner.from_pretrained("me/it")
    assert again.is_pruned and again.report is None and again.evaluations == {}


# What is not there


def test_another_pruning(damaged, saved):
    config = json.loads((saved / "config.json").read_text())
    config["pruning_config"]["fingerprint"] = "sha256:0"
    folder = damaged("config.json", json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is of another pruning than its config\.json records\. Save the model"):
        open_report(folder)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", None, "has no config.json, which Pruner.save_pretrained writes."),
        ("config.json", "{", "config.json of "),
        ("config.json", "[]", "holds no JSON object."),
        (
            "config.json",
            "{}",
            "was not pruned by optimum_prune: its config.json has no 'pruning_config' with a recipe.",
        ),
        ("pruning_report.json", None, "has no pruning_report.json, which Pruner.save_pretrained writes."),
        ("pruning_report.json", "{", "pruning_report.json of "),
        ("pruning_report.json", "{}", "is damaged (KeyError: 'version')."),
        ("pruning_report.json", '{"version": 1}', "is damaged (TypeError: "),
    ],
)
def test_damaged(name, content, reason, damaged):
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        open_report(damaged(name, content))


def test_recipe_that_is_none(damaged):
    with pytest.raises(CheckpointError, match="has no 'pruning_config' with a recipe"):
        PruningConfig.from_pretrained(damaged("config.json", '{"pruning_config": {}}'))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "me/none",
            "config.json of me/none (no folder of that name is here) cannot be had from the Hub: 404 Not Found. ",
        ),
        ("a/b/c", "a/b/c is no folder here, and can be no Hub id (user/name)."),
        ("/no/such/folder", "/no/such/folder does not exist."),
        (__file__, "is a file; pass the folder that it is in."),
    ],
)
def test_nothing_of_that_name(name, reason, hub):
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        open_report(name)


def test_repository_without_a_report(hub):
    del hub.repositories["me/it"].files()["pruning_report.json"]
    with pytest.raises(
        CheckpointError, match=r"me/it has no pruning_report\.json, which Pruner\.save_pretrained writes"
    ):
        open_report("me/it")


def test_private_repository(hub, monkeypatch):
    hub.repositories["me/it"].private = True
    with pytest.raises(CheckpointError, match=r"needs a token with access: `hf auth login`, or HF_TOKEN"):
        open_report("me/it", token="you")
    open_report("me/it", token="me")


def test_hub_out_of_reach(hub, monkeypatch):
    reason = "config.json of me/it (no folder of that name is here) cannot be had from the Hub: "
    hub.faults.append(Fault("config.json", "close"))
    with pytest.raises(CheckpointError, match=re.escape(reason) + r"Server disconnected without sending a response\.$"):
        open_report("me/it")
    with pytest.raises(CheckpointError, match=re.escape(reason) + "Cannot find the requested files in the disk cache"):
        open_report("me/it", local_files_only=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=re.escape(reason) + ".*HF_HUB_OFFLINE"):
        open_report("me/it")


def test_subfolder(saved):
    assert fetch(saved.parent, "config.json", subfolder="it") == saved / "config.json"
    assert fetch(saved.parent, "config.json") is None
