"""`optimum-cli prune push`, and `run --push-to-hub`: what arrives, and exit codes where it does not."""

import json
import re
import shlex

import pytest

from optimum_prune import Pruner, PruningConfig
from optimum_prune.integrations import hub as publishing
from tests.integrations.hub_server import Fault, contents, loopback
from tests.processes import complaint

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub

ERROR = "optimum-cli prune push: error: "
FAULTS = [401, 403, 404, 409, 413, 429, 500, "close", "hang"]


@pytest.fixture(scope="module")
def saved(dense):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(PruningConfig(scorer="magnitude", sparsity=0.3))
    pruner.save_pretrained(dense.with_name("saved"))
    return dense.with_name("saved")


@pytest.fixture
def hub(call_cli, tmp_path, monkeypatch):  # after `call_cli`, which is offline
    with loopback(tmp_path, monkeypatch) as hub:
        yield hub


# push


def test_push(saved, call_cli, hub):
    code, stdout, _ = call_cli("push", saved, "me/it", "--private", "--revision", "b", "--commit-message", "30 %")
    assert (code, stdout) == (0, f"Uploaded to {hub.url}/me/it/tree/b\n")
    repository = hub.repositories["me/it"]
    assert repository.private
    assert repository.messages == ["initial commit", "30 %"]
    assert "pruning_report.json" in repository.files("b")


def test_pull_request(saved, call_cli, hub):
    hub.create("you/it")
    code, stdout, _ = call_cli("push", saved, "you/it", "--create-pr")
    assert (code, stdout) == (0, f"Uploaded to {hub.url}/you/it/discussions/1\n")


@pytest.mark.parametrize("what", FAULTS)
def test_failing_upload(what, saved, call_cli, hub, monkeypatch):
    monkeypatch.setattr(publishing, "PATIENCE", 0.1)
    hub.faults.append(Fault("/commit/", what))
    before = contents(saved)
    code, stdout, stderr = call_cli("push", saved, "me/it", "--private", "--commit-message", "30 %")
    assert (code, stdout) == (1, "")
    line = stderr.splitlines()[-1]  # below the bars
    assert line.startswith(f"{ERROR}Uploading to me/it failed: ") and stderr.endswith(f"{line}\n")
    assert contents(saved) == before
    hub.faults.clear()
    again = re.search("To try again: `(.*)`$", line)
    assert again is not None and "--private" in again[1]
    assert call_cli(*shlex.split(again[1])[2:])[0] == 0
    assert hub.repositories["me/it"].messages == ["initial commit", "30 %"]


def test_refusal_comes_before_the_upload(saved, call_cli, hub):
    code, _, stderr = call_cli("push", saved, "you/it")
    assert code == 1
    assert stderr.startswith(f"{ERROR}Creating you/it failed: 403 Forbidden: You don't have the rights to write")
    assert not any("PUT" in request for request in hub.log)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("no/such/folder me/it", "no/such/folder is no folder; pass one that Pruner.save_pretrained wrote."),
        ("{saved} a/b/c", "'a/b/c' cannot be a repository's id; give user/name."),
        ("{saved} me/it --create-pr --revision b", "A pull request is made to main"),
        ("{saved}", "the following arguments are required: REPO_ID"),
        ("{saved} me/it --token x", "unrecognized arguments: --token x"),  # it would stay in the shell's history
    ],
)
def test_mistakes(arguments, message, saved, call_cli, hub):
    assert message in complaint(call_cli("push", *arguments.format(saved=saved).split()), ERROR)
    assert hub.log == []


# run --push-to-hub

RUN = ("--scorer", "magnitude", "--sparsity", 0.3)


def test_run(dense, call_cli, hub, tmp_path):
    output = tmp_path / "output"
    code, stdout, _ = call_cli("run", "--model", dense, "--output", output, *RUN, "--push-to-hub", "it", "--private")
    assert code == 0
    assert stdout.endswith(f"Saved to {output} (compact)\nUploaded to {hub.url}/me/it\n")
    repository = hub.repositories["me/it"]
    assert repository.private
    assert repository.files()["config.json"] == (output / "config.json").read_bytes()


def test_run_on_a_branch(dense, call_cli, hub, tmp_path):
    how = ("--push-to-hub", "me/it", "--hub-revision", "b", "--hub-commit-message", "30 %")
    assert call_cli("run", "--model", dense, "--output", tmp_path / "output", *RUN, *how)[0] == 0
    assert "config.json" in hub.repositories["me/it"].files("b")
    assert hub.repositories["me/it"].messages[-1] == "30 %"


def test_run_whose_upload_fails_is_not_lost(dense, call_cli, hub, tmp_path):
    hub.faults.append(Fault("/commit/", 500))
    output = tmp_path / "output"
    code, stdout, stderr = call_cli("run", "--model", dense, "--output", output, *RUN, "--push-to-hub", "me/it")
    assert code == 1
    assert stdout.endswith(f"Saved to {output} (compact)\n")
    assert stderr.endswith(
        f"The checkpoint is whole in {output}. To try again: `optimum-cli prune push {output} me/it`\n"
    )
    assert json.loads((output / "pruning_report.json").read_text())["config"]["sparsity"] == 0.3


@pytest.mark.parametrize(("fault", "code"), [(401, 1), ("hang", 1)])
def test_run_is_refused_before_the_model_is_loaded(
    fault, code, dense, loads_nothing, call_cli, hub, tmp_path, monkeypatch
):
    monkeypatch.setattr(publishing, "PATIENCE", 0.1)
    hub.faults.append(Fault("/api/repos/create|/preupload/", fault))
    found = call_cli("run", "--model", dense, "--output", tmp_path / "output", *RUN, "--push-to-hub", "me/it")
    assert found[0] == code and "optimum-cli prune run: error: Creating me/it failed: " in found[2]
    assert not (tmp_path / "output").exists()


def test_no_repository_is_made_for_a_run_that_cannot_be(dense, call_cli, hub, tmp_path):
    arguments = ("--model", dense, "--output", tmp_path / "output", "--push-to-hub", "me/it", "--sparsity", 0.3)
    assert call_cli("run", *arguments, "--include", "no.such.module")[0] == 2
    assert hub.repositories == {}


def test_flags_without_a_repository(dense, loads_nothing, call_cli, tmp_path):
    arguments = ("--model", dense, "--output", tmp_path / "output", *RUN, "--private", "--hub-create-pr")
    line = complaint(call_cli("run", *arguments), "optimum-cli prune run: error: ")
    assert line == "--private, --hub-create-pr has no meaning without --push-to-hub REPO_ID."
