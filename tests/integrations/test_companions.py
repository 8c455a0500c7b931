"""What is written beside the weights: words that this package did not write are never lost."""

import logging

import pytest
from huggingface_hub import ModelCard

from optimum_prune import InvalidConfig, Pruner, PruningConfig, RecoveryConfig
from optimum_prune.integrations import companions
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.integrations.signature import is_ours
from tests.models import llama
from tests.words import tokenizer

CUT = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)
ASIDE = "README.before-pruning.md"


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(companions, "save_pictures", lambda folder, report, evaluations: [])


@pytest.fixture
def pruner():
    pruner = Pruner(llama(), tokenizer())
    pruner.prune(CUT)
    return pruner


def readmes(folder):
    return {path.name: path.read_bytes() for path in folder.glob("README*")}


def test_own_card_is_replaced(pruner, tmp_path, caplog):
    for _ in range(2):
        pruner.save_pretrained(tmp_path / "it")
        assert readmes(tmp_path / "it").keys() == {"README.md"}
    assert "README" not in caplog.text


@pytest.mark.parametrize("words", [b"# Notes of mine\n", b"", b"\xff\xfe no UTF-8", b"pruned with `optimum_prune`"])
def test_words_of_others_are_kept(words, pruner, tmp_path, caplog):
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "README.md").write_bytes(words)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pruner.save_pretrained(tmp_path / "it")
    found = readmes(tmp_path / "it")
    assert found.keys() == {"README.md", ASIDE} and found[ASIDE] == words
    assert is_ours(found["README.md"].decode())
    assert caplog.text.count(f"it is kept as {ASIDE}") == 1


def test_every_edit_is_kept(pruner, tmp_path):
    card = tmp_path / "it" / "README.md"
    edits = []
    for edit in ("first", "second"):
        pruner.save_pretrained(tmp_path / "it")
        card.write_text(f"{card.read_text()}\n{edit}\n")
        edits.append(card.read_bytes())
    pruner.save_pretrained(tmp_path / "it")
    found = readmes(tmp_path / "it")
    assert found.keys() == {"README.md", ASIDE, "README.before-pruning-2.md"}
    assert [found[ASIDE], found["README.before-pruning-2.md"]] == edits


def test_card_of_the_source_that_is_written_over(tmp_path):
    folder = tmp_path / "it"
    llama().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# The dense model\n")
    pruner = Pruner.from_pretrained(folder)
    pruner.prune(CUT)
    pruner.save_pretrained(folder)
    found = readmes(folder)
    assert found[ASIDE] == b"---\nlicense: mit\n---\n# The dense model\n"
    assert b"license: mit" in found["README.md"]


def test_what_was_kept_goes_along(pruner, tmp_path):
    """Converted or recovered, a checkpoint is saved from one folder into another."""
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "README.md").write_text("mine")
    pruner.save_pretrained(tmp_path / "it")
    Pruner.from_pretrained(tmp_path / "it").save_pretrained(tmp_path / "other", "padded")
    assert readmes(tmp_path / "other")[ASIDE] == b"mine"


def test_where_no_card_is_written_an_edited_one_stays(pruner, tmp_path):
    pruner.save_pretrained(tmp_path / "it")
    card = tmp_path / "it" / "README.md"
    card.write_text(f"{card.read_text()}\nmine\n")
    save_checkpoint(pruner.model, tmp_path / "it")
    assert "mine" in card.read_text()
    pruner.save_pretrained(tmp_path / "it")
    save_checkpoint(pruner.model, tmp_path / "it")
    assert readmes(tmp_path / "it").keys() == {ASIDE}  # a card of other weights went


def test_failing_save_leaves_the_words_where_they_are(pruner, tmp_path, monkeypatch):
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "README.md").write_text("mine")
    monkeypatch.setattr("optimum_prune.integrations.directories._swap", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pruner.save_pretrained(tmp_path / "it")
    assert readmes(tmp_path / "it") == {"README.md": b"mine"}


# Metadata of a model that lies in a folder


@pytest.fixture
def local(tmp_path):
    """Return a pruner of a model without a card."""
    llama().save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    pruner = Pruner.from_pretrained(tmp_path / "dense")
    pruner.prune(CUT)
    return pruner


def metadata(folder):
    data = ModelCard.load(folder / "README.md").data
    return data.get("base_model"), data.get("license")


def test_nothing_is_known_of_a_folder(local, tmp_path):
    local.save_pretrained(tmp_path / "it")
    assert metadata(tmp_path / "it") == (None, None)


def test_base_model_and_license_are_noted_for_good(local, tmp_path):
    """In card and report, and in those of all that is made of the checkpoint; even where a folder is pruned twice."""
    local.prune(CUT)
    local.save_pretrained(tmp_path / "it", base_model="org/dense", license="mit")
    again = Pruner.from_pretrained(tmp_path / "it")
    again.recover(RecoveryConfig([[7] * (12 + i) for i in range(6)], max_steps=1, batch_size=2))
    again.save_pretrained(tmp_path / "recovered", "padded")
    for folder in (tmp_path / "it", tmp_path / "recovered"):
        assert metadata(folder) == ("org/dense", "mit")
        card = (folder / "README.md").read_text()
        assert "# dense-magnitude30\n\n`org/dense`, pruned" in card and "--model org/dense " in card
        assert str(tmp_path) not in card
    record = again.model.config.pruning_config
    assert record["base_model"] == "org/dense" and record["previous"][0]["base_model"] == "org/dense"
    assert Pruner.from_pretrained(tmp_path / "recovered").report is not None  # it speaks of the same pruning


def test_what_is_given_counts_more_than_what_is_found(local, tmp_path):
    (tmp_path / "dense" / "README.md").write_text("---\nlicense: mit\nbase_model: org/parent\n---\n# Dense\n")
    local.save_pretrained(tmp_path / "found")
    assert metadata(tmp_path / "found") == ("org/parent", "mit")
    # org/parent is not what was pruned
    assert "A llama model, pruned" in (tmp_path / "found" / "README.md").read_text()
    assert "--model org/parent" not in (tmp_path / "found" / "README.md").read_text()
    Pruner.from_pretrained(tmp_path / "found").save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "README.md").read_bytes() == (tmp_path / "found" / "README.md").read_bytes()
    card_data = {"license": "gemma", "language": "en"}
    local.save_pretrained(tmp_path / "given", base_model="org/dense", license="other", card_data=card_data)
    assert metadata(tmp_path / "given") == ("org/dense", "other")


def test_refused_before_anything_is_written(local, tmp_path):
    for given in ({"license": "MIT"}, {"base_model": str(tmp_path)}):
        with pytest.raises(InvalidConfig):
            local.save_pretrained(tmp_path / "it", **given)
    with pytest.raises(InvalidConfig, match="license cannot be noted: without a report"):
        Pruner(llama(), tokenizer()).save_pretrained(tmp_path / "it", license="mit")
    assert not (tmp_path / "it").exists()
    assert local.report.base_model == str(tmp_path / "dense")
