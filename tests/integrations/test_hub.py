"""Publishing: what arrives on the Hub, what stays, what is refused, and what is said when the Hub fails."""

import json
import logging
import re
import shutil
import time

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils import get_session

from optimum_prune import Pruner, PruningConfig, RecoveryConfig
from optimum_prune.errors import CheckpointError, InvalidConfig, PublishError
from optimum_prune.integrations import hub as publishing
from optimum_prune.integrations.hub import Destination, check_directory, prepare, upload
from optimum_prune.integrations.signature import is_ours
from tests.integrations.hub_server import Fault, contents, elsewhere, loopback
from tests.models import llama, source, tokens
from tests.processes import answer
from tests.words import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub

CUT = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)
TO = Destination("me/it")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a compact checkpoint, with a report of data that lies in a folder of this machine."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "secret").mkdir()
    (folder / "secret" / "text.txt").write_text("w3 w4 w5 w6 w7 w8\n" * 200)
    llama().save_pretrained(folder / "dense")
    tokenizer().save_pretrained(folder / "dense")
    pruner = Pruner.from_pretrained(folder / "dense")
    calibration = {"source": str(folder / "secret" / "text.txt"), "num_samples": 4, "seq_len": 16}
    pruner.prune(PruningConfig(sparsity=0.3, round_to=1, calibration=calibration))  # pyright: ignore[reportArgumentType]
    pruner.evaluate(calibration["source"], num_samples=2, seq_len=16, latency=False)
    pruner.save_pretrained(folder / "it")
    return folder / "it"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with loopback(tmp_path, monkeypatch) as hub:
        yield hub


# What arrives


def test_round_trip(tmp_path, monkeypatch):
    model = llama(hidden_size=256, intermediate_size=512)  # 6 MB
    pruner = Pruner(model, tokenizer())
    pruner.evaluate(source(model), latency=False)
    pruner.prune(CUT)
    pruner.evaluate(source(model), latency=False)
    with loopback(tmp_path, monkeypatch) as hub:
        assert pruner.push_to_hub("me/compact", max_shard_size="2MB") == f"{hub.url}/me/compact"
        files = hub.repositories["me/compact"].files()
        assert sum(name.endswith(".safetensors") for name in files) > 1
        assert b"KL" in files["README.md"]  # pyright: ignore[reportOperatorIssue]
        found = answer(
            elsewhere(hub) + "import json\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            "import optimum_prune\n"
            "from tests.models import tokens\n"
            "model = AutoModelForCausalLM.from_pretrained('me/compact')\n"
            "words = AutoTokenizer.from_pretrained('me/compact')\n"
            "pruner = optimum_prune.Pruner.from_pretrained('me/compact')\n"
            "config = optimum_prune.PruningConfig.from_pretrained('me/compact')\n"
            "print(json.dumps([model(tokens()).logits.tolist(), words('w3 w95').input_ids, str(pruner.report),\n"
            "    {name: value.kl for name, value in pruner.evaluations.items()}, config.to_dict()]))"
        )
    logits, words, report, kl, config = found
    with torch.no_grad():
        assert torch.equal(torch.tensor(logits), model(tokens()).logits)
    assert words == [3, 95]
    assert report == str(pruner.report)
    assert kl == {"dense": None, "pruned": pruner.evaluations["pruned"].kl}
    assert config == CUT.to_dict()


def test_every_file_arrives(saved, hub):
    assert upload(saved, prepare(TO)) == f"{hub.url}/me/it"
    files = hub.repositories["me/it"].files()
    assert files.keys() == {".gitattributes", *contents(saved)}
    for name, content in contents(saved).items():
        sent = files[name]
        assert name == "pruning_report.json" or (sent if isinstance(sent, bytes) else sent.read_bytes()) == content
    assert hub.repositories["me/it"].messages == ["initial commit", "Upload a model pruned by optimum_prune"]


def test_nothing_published_names_a_path_of_this_machine(saved, hub):
    assert str(saved.parent).encode() in contents(saved)["pruning_report.json"]
    upload(saved, prepare(TO))
    files = hub.repositories["me/it"].files()
    for name, content in files.items():
        assert str(saved.parent).encode() not in (content if isinstance(content, bytes) else content.read_bytes()), name
    report = json.loads(files["pruning_report.json"])  # pyright: ignore[reportArgumentType]
    assert report["config"]["calibration"]["source"] == "text.txt"
    again = Pruner.from_pretrained("me/it")
    assert again.report is not None and again.evaluations.keys() == {"dense", "pruned"}


def test_adapter_comes_along(hub):
    pruner = Pruner(llama(), tokenizer())
    pruner.prune(CUT)
    alike = [[7] * (12 + i) for i in range(6)]  # what is learned of some helps with the others
    training = RecoveryConfig(alike, max_steps=4, batch_size=2, learning_rate=0.01, merge="none")
    assert pruner.recover(training).kept
    measured = pruner.evaluate(source(pruner.model), latency=False)
    pruner.push_to_hub("me/it")
    again = Pruner.from_pretrained("me/it")
    assert again.evaluations["recovered"] == measured
    assert again.evaluate(source(pruner.model), latency=False).perplexity == measured.perplexity


def test_hidden_files_stay_here(saved, hub, tmp_path):
    folder = tmp_path / "it"
    for name in ("config.json", ".env", ".git/config", "logs/.cache/x", "logs/loss.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    upload(folder, prepare(TO))
    assert hub.repositories["me/it"].files().keys() == {".gitattributes", "config.json", "logs/loss.txt"}


def test_older_checkpoint_goes_in_the_same_commit_and_what_is_the_users_stays(saved, hub):
    theirs = {"notes.md": b"mine", "adapter/model.safetensors": b"mine", "model_of_mine.safetensors": b"mine"}
    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "pytorch_model.bin": b""}
    old |= {"pruning_pictures/of_long_ago.png": b"old"}
    repository = hub.create("me/it", theirs | old)
    upload(saved, prepare(TO))
    assert repository.files().keys() == {".gitattributes", *theirs, *contents(saved)}
    assert len(repository.commits) == 2


def test_older_adapter_goes(saved, hub):
    repository = hub.create(
        "me/it", {"adapter/adapter_config.json": b"{}", "adapter/adapter_model.safetensors": b"old"}
    )
    upload(saved, prepare(TO))
    assert repository.files().keys() == {".gitattributes", *contents(saved)}


@pytest.mark.parametrize("edit", ["", "my words", None])
def test_older_card_goes_where_none_takes_its_place(edit, saved, hub, tmp_path):
    """One that somebody edited, or wrote, stays."""
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "config.json").write_text("{}")
    card = "my words" if edit is None else (saved / "README.md").read_text() + edit
    repository = hub.create("me/it", {"README.md": card.encode()})
    upload(tmp_path / "it", prepare(TO))
    assert ("README.md" in repository.files()) == (edit != "")


def test_edited_cards_on_the_hub_are_kept(saved, hub, caplog):
    hub.create("me/it", {"README.md": b"my words"})
    aside = ["README.before-pruning.md", "README.before-pruning-2.md"]
    for kept in ({aside[0]: b"my words"}, {aside[0]: b"my words", aside[1]: b"other words"}):
        for _ in range(2):  # what is kept already is not kept twice
            upload(saved, prepare(TO))
            files = hub.repositories["me/it"].files()
            assert files["README.md"] == (saved / "README.md").read_bytes()
            assert {name: files[name] for name in aside if name in files} == kept
        hub.repositories["me/it"].files()["README.md"] = b"other words"
        hub.repositories["me/it"].commit("main", dict(hub.repositories["me/it"].files()), "edited on the Hub")
    assert caplog.text.count("kept as README.before-pruning") == 2


def test_edited_card_of_this_machine_is_sent(saved, hub, tmp_path):
    """The Hub has the card as it was written: nothing is lost."""
    upload(saved, prepare(TO))
    shutil.copytree(saved, tmp_path / "it")
    (tmp_path / "it" / "README.md").write_text("my words")
    for _ in range(2):
        upload(tmp_path / "it", prepare(TO))
    files = hub.repositories["me/it"].files()
    assert files["README.md"] == b"my words" and "README.before-pruning.md" not in files


@pytest.mark.parametrize("edit", ["", "\nmy words\n"])
def test_metadata_of_the_card(edit, saved, hub, tmp_path, caplog):
    """It changes what is sent, not the folder; a card that nobody edited still is one."""
    shutil.copytree(saved, tmp_path / "it")
    (tmp_path / "it" / "README.md").write_text((saved / "README.md").read_text() + edit)
    before = contents(tmp_path / "it")
    for _ in range(2):
        upload(tmp_path / "it", prepare(Destination("me/it", base_model="org/dense", license="apache-2.0")))
    assert contents(tmp_path / "it") == before
    files = hub.repositories["me/it"].files()
    card = files["README.md"].decode()  # pyright: ignore[reportAttributeAccessIssue]
    data = ModelCard(card).data
    assert (data.get("base_model"), data.get("license")) == ("org/dense", "apache-2.0")
    assert edit in card and is_ours(card) == (edit == "")
    assert "README.before-pruning.md" not in files


def test_metadata_is_refused_before_a_repository_is_made(hub):
    with pytest.raises(InvalidConfig, match="Did you mean 'mit'"):
        prepare(Destination("me/it", license="MIT"))
    pruner = Pruner(llama(), tokenizer())
    pruner.prune(CUT)
    with pytest.raises(InvalidConfig, match="base_model must be the id"):
        pruner.push_to_hub("me/it", base_model="/home/me/dense")
    assert hub.repositories == {}


def test_metadata_of_a_model_that_is_pushed(hub):
    pruner = Pruner(llama(), tokenizer())
    pruner.prune(CUT)
    pruner.push_to_hub("me/it", base_model="org/dense", license="mit")
    data = ModelCard(hub.repositories["me/it"].files()["README.md"].decode()).data  # pyright: ignore
    assert (data.get("base_model"), data.get("license")) == ("org/dense", "mit")


# Where to


def test_short_name_is_a_repository_of_ones_own(hub):
    assert prepare(Destination("it")).repo_id == "me/it"


@pytest.mark.parametrize("private", [None, False, True])
def test_private(private, hub):
    prepare(Destination("me/it", private=private))
    assert hub.repositories["me/it"].private == bool(private)


@pytest.mark.parametrize("private", [True, False])
def test_existing_repository_of_another_visibility(private, hub):
    hub.create("me/it", private=not private)
    wanted = "is public, which an upload does not change. Make it private" if private else "Make it public"
    with pytest.raises(InvalidConfig, match=wanted):
        prepare(Destination("me/it", private=private))
    prepare(Destination("me/it"))  # nothing was asked


def test_branch(saved, hub):
    hub.create("me/it")
    for _ in range(2):  # the branch is new, then it is there
        url = upload(saved, prepare(Destination("me/it", revision="pruned/30", commit_message="30 %")))
    assert url == f"{hub.url}/me/it/tree/pruned/30"  # pyright: ignore[reportPossiblyUnbound]
    repository = hub.repositories["me/it"]
    assert repository.files().keys() == {".gitattributes"}
    assert "config.json" in repository.files("pruned/30")
    assert repository.messages[1:] == ["30 %", "30 %"]


def test_pull_request_to_somebody_else(saved, hub):
    repository = hub.create("you/it", {"pytorch_model.bin": b"old"})
    url = upload(saved, prepare(Destination("you/it", create_pr=True)))
    assert url == f"{hub.url}/you/it/discussions/1"
    assert "pytorch_model.bin" in repository.files()
    assert repository.files("refs/pr/1").keys() == {".gitattributes", *contents(saved)}


# What is refused before anything is written


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        (Destination("a/b/c"), "'a/b/c' cannot be a repository's id; give user/name."),
        (Destination("me/it", revision="x", create_pr=True), "A pull request is made to main"),
    ],
)
def test_impossible_destinations(to, reason, hub):
    with pytest.raises(InvalidConfig, match=re.escape(reason)):
        prepare(to)
    assert hub.log == []


def test_no_token(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    with pytest.raises(InvalidConfig, match="log in by `hf auth login`, or set HF_TOKEN"):
        prepare(TO)
    prepare(Destination("me/it", token="me"))


@pytest.mark.parametrize("exists", [False, True])
def test_no_right_to_write(exists, hub):
    """A repository of somebody else is refused before hours of work, also where it can be read."""
    if exists:
        hub.create("you/it")
    with pytest.raises(PublishError, match=r"403 Forbidden: You don't have the rights to write to you/it\. The token"):
        prepare(Destination("you/it"))


def test_trying_writes_nothing(hub):
    prepare(TO)
    assert hub.repositories["me/it"].messages == ["initial commit"]


@pytest.mark.parametrize("folder", ["none", "empty"])
def test_no_checkpoint(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is no folder" if folder == "none" else "has no config.json"):
        check_directory(tmp_path / folder, TO)


def test_metadata_needs_a_card(saved, tmp_path, hub):
    (tmp_path / "it").mkdir()
    shutil.copy(saved / "config.json", tmp_path / "it")
    check_directory(tmp_path / "it", TO)
    with pytest.raises(CheckpointError, match=r"has no README\.md"):
        check_directory(tmp_path / "it", Destination("me/it", license="mit"))


# When the Hub fails

ANSWERS = {
    401: r"401 Unauthorized: no luck today\. Log in by `hf auth login`, or set HF_TOKEN to a token that is valid\.",
    402: r"402 Payment Required: no luck today\.",
    403: r"403 Forbidden: no luck today\. The token must have the right to write there: .* \(create_pr\)\.",
    404: r"404 Not Found: no luck today\. Check the name of the repository and the branch, and .* may see them\.",
    409: r"409 Conflict: no luck today\. Somebody else changes the repository at this moment; try again\.",
    413: r"413 [\w ]+: no luck today\. A file is larger than the server takes; save with a smaller max_shard_size\.",
    429: r"429 Too Many Requests: no luck today\. Wait some minutes, then try again\.",
    500: r"500 Internal Server Error: no luck today\. The Hub is in trouble \(https://.*\); try again later\.",
    "close": r"(Server disconnected without sending a response|.*Broken pipe|.*reset by peer)\. Check the network .*\.",
    "hang": r"(.* )?timed out\. Check the network .*\.",
}
STEPS = {"lists": "GET .*/tree/", "asks": "/preupload/", "large files": "PUT /storage", "commits": "/commit/"}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", ANSWERS)
def test_failing_upload_loses_nothing(what, step, saved, hub, monkeypatch):
    monkeypatch.setattr(publishing, "PATIENCE", 0.1)
    before = contents(saved)
    again = f"optimum-cli prune push {saved} me/it --commit-message '30 %'"
    to = prepare(Destination("me/it", commit_message="30 %"))
    hub.faults.append(Fault(STEPS[step], what))
    with pytest.raises(PublishError) as refusal:
        upload(saved, to)
    said = str(refusal.value)
    then = f" The checkpoint is whole in {saved}. To try again: `{again}`"
    assert re.fullmatch(f"Uploading to me/it failed: {ANSWERS[what]}{re.escape(then)}", said)
    assert "\n" not in said
    assert contents(saved) == before
    assert hub.repositories["me/it"].messages == ["initial commit"]
    assert publishing._limit not in get_session().event_hooks["request"]
    hub.faults.clear()
    upload(saved, to)


@pytest.mark.parametrize("what", [what for what in ANSWERS if what != 409])  # which means that it exists
def test_failing_preparation(what, hub, monkeypatch):
    monkeypatch.setattr(publishing, "PATIENCE", 0.1)
    hub.faults.append(Fault("/api/repos/create", what))
    with pytest.raises(PublishError, match=f"^Creating me/it failed: {ANSWERS[what]}$"):
        prepare(TO)


def test_nobody_there(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PublishError, match=r"Creating me/it failed: .*refused\. Check the network"):
        prepare(TO)


def test_what_was_saved_for_an_upload_that_fails_is_kept(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pruner = Pruner(llama(), tokenizer())
    pruner.prune(CUT)
    hub.faults.append(Fault("/commit/", 500))
    with pytest.raises(PublishError, match="The checkpoint is whole in ") as refusal:
        pruner.push_to_hub("me/it")
    found = re.search(r"whole in (\S+)\. To try", str(refusal.value))
    assert found is not None
    again = Pruner.from_pretrained(found[1])
    assert str(again.report) == str(pruner.report)
    hub.faults.clear()
    upload(found[1], prepare(TO))


@pytest.mark.parametrize("kept", [False, True])
def test_folder_of_a_push(kept, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pruner = Pruner(llama(), tokenizer())
    pruner.prune(CUT)
    with pytest.raises(InvalidConfig, match="layout='stock' is not possible"):
        pruner.push_to_hub("me/it", layout="stock")
    pruner.push_to_hub("me/it", directory=tmp_path / "it" if kept else None)
    assert (tmp_path / "it").exists() == kept
    assert not list(tmp_path.glob("optimum-prune-*"))


def test_interrupted(saved, hub, monkeypatch, caplog):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    to = prepare(TO)
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", interrupt)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        upload(saved, to)
    assert f"The checkpoint is whole in {saved}. To try again" in caplog.text


def test_a_hang_ends(saved, hub, monkeypatch):
    to = prepare(TO)
    monkeypatch.setattr(publishing, "PATIENCE", 0.3)
    hub.faults.append(Fault("/commit/", "hang"))
    start = time.monotonic()
    with pytest.raises(PublishError):
        upload(saved, to)
    assert 0.3 <= time.monotonic() - start < 5
