"""Small files beside the weights of a source: which go along, which do not, and who is told."""

import logging
import os
import shutil

import pytest
from transformers import AutoModelForCausalLM

from optimum_prune import Pruner, PruningConfig, RecoveryConfig
from optimum_prune.integrations import beside, companions
from optimum_prune.integrations.beside import Origin, copy_beside
from tests.integrations.hub_server import Fault, contents, loopback
from tests.models import llama, t5, tokens
from tests.words import tokenizer

CUT = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)
GO = {
    "LICENSE": "of the dense model",
    "NOTICE": "notice",
    "USE_POLICY.md": "policy",
    "tokenizer.model": "sentencepiece",
    "added_tokens.json": "{}",
    "modules.json": "[]",
    "sentence_bert_config.json": "{}",
    "1_Pooling/config.json": "{}",
    "modeling_own.py": "raise SystemExit  # never executed",
    "assets/deep/figure.png": "png",
    "model of [mine]*.txt": "odd name",
}
STAY = {
    "onnx": ({"onnx/model.onnx": "onnx", "onnx/config.json": "{}"}, "weights"),
    "original": ({"original/params.json": "{}", "original/consolidated.00.pth": "pth"}, "weights"),
    "2_Dense": ({"2_Dense/config.json": "{}", "2_Dense/model.safetensors": "st"}, "weights"),
    "tf_model.h5": ({"tf_model.h5": "h5"}, "weights"),
}
SILENT = {
    "README.md": "# The dense model",
    "trainer_state.json": "{}",
    "training_args.bin": "pickle",
    "all_results.json": "{}",
    "runs/today/events.out.tfevents.1": "log",
    "checkpoint-3/model.safetensors": "st",
    "__pycache__/modeling_own.pyc": "pyc",
    "pruning_report.json": "{}",
    "pruning_pictures/of_long_ago.png": "png",
    "pytorch_model.bin": "bin",
    "model.fp16.safetensors": "st",
    "adapter/adapter_config.json": "{}",
    ".env": "SECRET=1",
    ".git/config": "git",
    "assets/.hidden": "hidden",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def fill(folder):
    """Write the dense model and all files beside it."""
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    write(folder, GO | SILENT)
    for files, _ in STAY.values():
        write(folder, files)
    return folder


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes longer than all else here."""
    monkeypatch.setattr(companions, "save_pictures", lambda folder, report, evaluations: [])


@pytest.fixture
def source(tmp_path):
    return fill(tmp_path / "source")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with loopback(tmp_path / "hub", monkeypatch) as hub:
        (tmp_path / "hub").mkdir(exist_ok=True)
        yield hub


def pruned(name):
    pruner = Pruner.from_pretrained(name)
    pruner.prune(CUT)
    return pruner


def check(folder, go=GO):
    """Check that just these files went along, and that the card names what stays."""
    found = contents(folder)
    everything = GO.keys() | SILENT.keys() | {name for files, _ in STAY.values() for name in files}
    own = {"README.md", "pruning_report.json"} | {name for name in found if name.startswith("pruning_pictures/")}
    assert (found.keys() & everything) - own == go.keys() - own
    assert {name: found[name].decode() for name in go} == dict(go)
    card = found["README.md"].decode()
    assert all(f"`{name}` ({reason})" in card for name, (_, reason) in STAY.items())


# From a folder


def test_small_files_go_along_and_others_are_named(source, tmp_path, caplog):
    pruner = pruned(source)
    with caplog.at_level(logging.WARNING, beside.__name__.rpartition(".")[0]):
        pruner.save_pretrained(tmp_path / "it")
    check(tmp_path / "it")
    (record,) = [record for record in caplog.messages if record.startswith("Not copied from")]
    assert all(f"{name} ({reason})" in record for name, (_, reason) in STAY.items())
    assert not any(name in record for name in SILENT)


def test_every_way_of_saving(source, tmp_path, hub):
    """Saved by hand, loaded by transformers, pruned while loading, recovered, pushed, and once more."""
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=CUT)
    Pruner(model, tokenizer()).save_pretrained(tmp_path / "at_load", "padded")
    check(tmp_path / "at_load")
    again = Pruner.from_pretrained(tmp_path / "at_load")
    again.recover(RecoveryConfig([[7] * (12 + i) for i in range(6)], max_steps=1, batch_size=2))
    assert again.push_to_hub("me/it").endswith("me/it")
    sent = hub.repositories["me/it"].files()
    assert {name: sent[name] for name in GO} == {name: text.encode() for name, text in GO.items()}
    Pruner.from_pretrained("me/it").save_pretrained(tmp_path / "once_more")
    found = contents(tmp_path / "once_more")
    assert {name: found[name].decode() for name in GO} == GO


def test_a_model_of_nowhere(tmp_path):
    pruner = Pruner(llama(), tokenizer())
    assert pruner._origin == Origin("")
    pruner.save_pretrained(tmp_path / "it")
    assert "LICENSE" not in contents(tmp_path / "it")


def test_what_the_save_writes_wins(source, tmp_path):
    pruner = Pruner.from_pretrained(source)
    pruner.model.generation_config.max_length = 77
    (source / "tokenizer_config.json").write_text('{"of": "source"}')
    pruner.save_pretrained(tmp_path / "it")
    assert "77" in (tmp_path / "it" / "generation_config.json").read_text()
    assert "of" not in (tmp_path / "it" / "tokenizer_config.json").read_text().split('"')


def test_tokenizer_that_does_not_load_goes_along_as_it_is(source, tmp_path):
    (source / "tokenizer.json").write_text("no json")
    pruner = Pruner.from_pretrained(source)
    assert pruner.tokenizer is None
    pruner.save_pretrained(tmp_path / "it")
    assert (tmp_path / "it" / "tokenizer.json").read_text() == "no json"


def test_what_the_output_folder_has_stays(source, tmp_path):
    mine = {"LICENSE": "mine", "assets/mine.png": "mine", "NOTICE": GO["NOTICE"], "1_Pooling": "a file of mine"}
    write(tmp_path / "it", mine)
    pruner = pruned(source)
    for _ in range(2):
        pruner.save_pretrained(tmp_path / "it")
        found = contents(tmp_path / "it")
        expected = GO | mine
        del expected["1_Pooling/config.json"]
        assert {name: found[name].decode() for name in expected} == expected
        card = found["README.md"].decode()
        for name in ("LICENSE", "1_Pooling/config.json"):
            assert f"`{name}` (the output folder has its own)" in card
        assert "`NOTICE`" not in card and "`assets" not in card


@pytest.mark.parametrize("name", ["source", "source/pruned", "source/deep/pruned"])
def test_output_in_the_source(name, source, tmp_path):
    """Nothing is copied into itself, however often it is saved."""
    write(source, {"deep/notes.txt": "beside the output"})
    before = contents(source)
    pruner = pruned(source)
    for _ in range(2):
        pruner.save_pretrained(tmp_path / name)
    found = contents(tmp_path / name)
    assert not any("pruned/" in path for path in found)
    assert all(found[path].decode() == text for path, text in GO.items())
    if name != "source":
        assert ("deep/notes.txt" in found) == (name == "source/pruned")
        assert contents(source).items() >= before.items()


def test_links(source, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    (source / "key.txt").symlink_to(tmp_path / "secret")
    (source / "up").symlink_to(tmp_path)
    (source / "docs").mkdir()
    (source / "docs" / "elsewhere").symlink_to(tmp_path / "elsewhere")
    (source / "docs" / "round").symlink_to(source)
    (source / "gone.txt").symlink_to(source / "nothing")
    (source / "COPYING").symlink_to("LICENSE")
    os.mkfifo(source / "pipe")
    Pruner.from_pretrained(source).save_pretrained(tmp_path / "it")
    found = contents(tmp_path / "it")
    assert b"secret" not in found.values()
    assert found["COPYING"] == found["LICENSE"] and not (tmp_path / "it" / "COPYING").is_symlink()
    stay = copy_beside(Origin(str(source)), tmp_path, tmp_path / "other")
    assert {name for name, reason in stay.items() if reason == "a link"} == {"key.txt", "up", "docs"}


def test_snapshot_of_the_cache_is_links(source, tmp_path, hub):
    hub.create("me/source", contents(source))
    pruner = Pruner.from_pretrained("me/source")
    commit = pruner._origin.hub_kwargs["revision"]
    snapshot = tmp_path / "hub" / "cache" / "models--me--source" / "snapshots" / commit
    pruner.save_pretrained(tmp_path / "first")  # which fills the cache
    assert (snapshot / "LICENSE").is_symlink()
    Pruner.from_pretrained(snapshot).save_pretrained(tmp_path / "it")
    found = contents(tmp_path / "it")
    assert {name: found[name].decode() for name in GO} == GO


def test_limits(source, tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "LIMIT", 100)
    monkeypatch.setattr(beside, "MOST", 3)
    write(source, {"large.csv": "x" * 101, "small.csv": "x" * 100})
    write(source, {f"many/{i}": "" for i in range(4)} | {f"few/{i}": "" for i in range(3)})
    write(source, {f"large/{i}": "x" * 60 for i in range(2)})
    stay = copy_beside(Origin(str(source)), tmp_path / "new", tmp_path / "target")
    assert (
        stay.items()
        >= {"many": "more than 3 files", "large": "more than 0 MiB", "large.csv": "more than 0 MiB"}.items()
    )
    found = contents(tmp_path / "new")
    assert {"small.csv", "few/2"} <= found.keys() and not {"large.csv", "large/0", "many/0"} & found.keys()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")])
def test_unreadable_file_costs_no_save(error, source, tmp_path, monkeypatch):
    def copyfile(path, to):
        if path.name == "NOTICE":
            raise error
        return copy(path, to)

    copy = shutil.copyfile
    monkeypatch.setattr(beside.shutil, "copyfile", copyfile)
    pruned(source).save_pretrained(tmp_path / "it")
    card = (tmp_path / "it" / "README.md").read_text()
    assert f"`NOTICE` (it cannot be read ({error.strerror}))" in card and "NOTICE" not in contents(tmp_path / "it")


def test_encoder_decoder(tmp_path):
    t5().save_pretrained(tmp_path / "source")
    write(tmp_path / "source", {"spiece.model": "sentencepiece", "LICENSE": "mine"})
    pruned(tmp_path / "source").save_pretrained(tmp_path / "it")
    assert {"spiece.model", "LICENSE"} <= contents(tmp_path / "it").keys()


# From the Hub


def test_from_the_hub(source, tmp_path, hub):
    """Of the commit that was loaded, whatever was committed since; weights of other formats are not downloaded."""
    repository = hub.create("me/source", contents(source))
    pruner, commit = pruned("me/source"), repository.branches["main"]
    assert pruner.report is not None and pruner.report.base_revision == commit
    repository.commit("main", {**repository.files(), "LICENSE": b"changed since"}, "later")
    pruner.save_pretrained(tmp_path / "it")
    check(tmp_path / "it")
    asked = "\n".join(hub.log)
    assert "consolidated" not in asked and "model.onnx" not in asked and "tf_model" not in asked


def test_sub_folder_of_a_repository(source, tmp_path, hub):
    files = {f"small/{name}": content for name, content in contents(source).items()}
    hub.create("me/source", {**files, "LICENSE": b"of the repository"})
    pruner = Pruner.from_pretrained("me/source", subfolder="small")
    pruner.save_pretrained(tmp_path / "it")
    assert {name: content.decode() for name, content in contents(tmp_path / "it").items() if name in GO} == GO


def test_private_repository(source, tmp_path, hub, monkeypatch):
    hub.create("me/source", contents(source), private=True)
    monkeypatch.setenv("HF_TOKEN", "you")
    pruner = Pruner.from_pretrained("me/source", token="me")
    pruner.save_pretrained(tmp_path / "it")
    assert GO.keys() <= contents(tmp_path / "it").keys()


def test_without_a_network_what_is_cached_goes_along(source, tmp_path, hub, monkeypatch, caplog):
    hub.create("me/source", contents(source))
    pruner = Pruner.from_pretrained("me/source")
    from huggingface_hub import hf_hub_download

    hf_hub_download("me/source", "LICENSE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pruner.save_pretrained(tmp_path / "it")
    found = contents(tmp_path / "it")
    assert found["LICENSE"].decode() == GO["LICENSE"] and "NOTICE" not in found
    assert "The files of me/source cannot be listed" in caplog.text


@pytest.mark.parametrize("request_", ["GET /api/models/me/source", "(GET|HEAD) .*/resolve/.*/(LICENSE|NOTICE)"])
def test_a_hub_that_fails_costs_no_save(request_, source, tmp_path, hub):
    hub.create("me/source", contents(source))
    pruner = pruned("me/source")
    hub.faults.append(Fault(request_, 500))
    pruner.save_pretrained(tmp_path / "it")
    found = contents(tmp_path / "it")
    assert "LICENSE" not in found and "NOTICE" not in found
    if "resolve" in request_:
        assert "USE_POLICY.md" in found and b"`LICENSE` (LICENSE of me/source" in found["README.md"]


def test_path_of_long_ago_is_no_repository(source, tmp_path, hub, caplog):
    """A model that transformers loaded from a relative path, which is gone: one question, and no warning."""
    model = llama()
    for name in ("models/of/long/ago", "me/gone", str(tmp_path / "gone")):
        model.config.name_or_path = name
        assert copy_beside(Origin.of(model), tmp_path / "new", tmp_path / "it") == {}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nothing_runs_and_all_computes(source, tmp_path):
    """`modeling_own.py` would end the process that imports it."""
    pruner = pruned(source)
    pruner.save_pretrained(tmp_path / "it")
    again = Pruner.from_pretrained(tmp_path / "it")
    assert again.model(tokens()).logits.shape == pruner.model(tokens()).logits.shape
