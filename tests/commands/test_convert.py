"""`optimum-cli prune convert`: another layout, the same numbers, a report that stays and a card that is true."""

import json
from dataclasses import replace

import pytest
import torch

from optimum_prune import Pruner, PruningConfig
from tests.models import inputs, llama
from tests.outputs import load
from tests.processes import complaint
from tests.reports import DENSE, PRUNED
from tests.words import tokenizer

ERROR = "optimum-cli prune convert: error: "
UNEVEN = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1, compensation="none")
SIX_HEADS = PruningConfig(
    scorer="magnitude", sparsity=0.25, allocation="uniform", units=["kv_group"], compensation="none"
)


def logits(model):
    with torch.no_grad():
        return model(**inputs(model)).logits


def saved(folder, config, layout):
    """Prune a small Llama, say that it was measured, and save it; return the pruner."""
    pruner = Pruner(llama(), tokenizer())
    report = pruner.prune(config)
    pruner.evaluations = {"dense": DENSE, "pruned": replace(PRUNED, parameters=report.parameters_after)}
    assert pruner.save_pretrained(folder, layout, card_data={"license": "apache-2.0"}) == layout
    return pruner


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the folders of an uneven model by layout, and the model."""
    root = tmp_path_factory.mktemp("pruned")
    pruner = saved(root / "compact", UNEVEN, "compact")
    pruner.save_pretrained(root / "padded", "padded", card_data={"license": "apache-2.0"})
    return root, pruner.model


@pytest.fixture
def convert(call_cli, tmp_path):
    def call(folder, *arguments, to="it"):
        return call_cli("convert", folder, "--output", tmp_path / to, *arguments)

    return call


def same(folder, other, *names):
    return [name for name in names if (folder / name).read_bytes() != (other / name).read_bytes()] == []


@pytest.mark.parametrize(
    ("before", "flags", "after"),
    [
        ("compact", "--layout padded", "padded"),
        ("padded", "--layout padded", "padded"),
        ("compact", "--layout compact", "compact"),
        ("compact", "", "compact"),
        ("padded", "", "compact"),
        ("padded", "--layout compact", "compact"),
    ],
)
def test_there_and_back(before, flags, after, source, convert, tmp_path):
    root, model = source
    code, shown, _ = convert(root / before, *flags.split())
    assert code == 0 and shown.endswith(f"Saved to {tmp_path / 'it'} ({after})\n")
    everything = ("model.safetensors", "config.json", "pruning_report.json", "tokenizer.json", "README.md")
    assert same(tmp_path / "it", root / after, *everything)
    assert (logits(load(tmp_path / "it")[0]) - logits(model)).abs().max() < 1e-5


def test_card_is_true_of_its_layout(source):
    root, model = source
    cards = {layout: (root / layout / "README.md").read_text() for layout in ("compact", "padded")}
    wide = load(root / "padded")[0].num_parameters()
    parameters = f"{model.num_parameters():,} are left"
    assert parameters in cards["compact"] and "padded" not in cards["compact"]
    assert "import optimum_prune" in cards["compact"]
    assert f"{parameters}, and padded with zeros to {wide:,}" in " ".join(cards["padded"].split())
    assert "Plain transformers, nothing else" in cards["padded"] and "import optimum_prune" not in cards["padded"]
    assert "the numbers above were measured without it" in cards["padded"]
    assert all("license: apache-2.0" in card for card in cards.values())


def test_class_switch(convert, tmp_path):
    pruner = saved(tmp_path / "six", SIX_HEADS, "compact")
    message = complaint(convert(tmp_path / "six", "--layout", "stock"), ERROR)
    assert "class_switch=True (it is saved as MistralForCausalLM" in message
    assert not (tmp_path / "it").exists()
    code, shown, _ = convert(tmp_path / "six", "--layout", "stock", "--class-switch")
    assert code == 0 and shown.endswith("(stock)\n")
    loaded = load(tmp_path / "it")[0]
    assert type(loaded).__name__ == "MistralForCausalLM"
    assert torch.equal(logits(loaded), logits(pruner.model))
    assert same(tmp_path / "it", tmp_path / "six", "pruning_report.json")
    assert Pruner.from_pretrained(tmp_path / "it").report is not None


def test_stored_packed(convert, tmp_path):
    masked = PruningConfig(pattern="unstructured", scorer="magnitude", sparsity=0.8)
    pruner = saved(tmp_path / "masked", masked, "stock")
    for storage in ("packed", "dense"):
        assert convert(tmp_path / "masked", "--storage", storage, to=storage)[0] == 0
        assert torch.equal(logits(load(tmp_path / storage)[0]), logits(pruner.model))
    assert "its weights are packed" in (tmp_path / "packed" / "README.md").read_text().lower()
    assert same(tmp_path / "dense", tmp_path / "masked", "model.safetensors", "README.md")


def test_a_model_without_a_report_is_converted_too(source, convert, tmp_path):
    root, model = source
    load(root / "padded")[0].save_pretrained(tmp_path / "bare")
    assert convert(tmp_path / "bare", "--layout", "compact")[0] == 0
    assert json.loads((tmp_path / "it" / "config.json").read_text())["pruning_config"]["layout"] == "compact"
    assert torch.equal(logits(load(tmp_path / "it")[0]), logits(model))


# Mistakes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--layout stock", "layout='stock' is not possible: layers differ in "),
        ("--layout stok", "argument --layout: invalid choice: 'stok'"),
        ("--layout padded --storage packed", "layout='padded' does not go with storage='packed'"),
        ("--layouts padded", "unrecognized arguments: --layouts padded. Did you mean --layout?"),
    ],
)
def test_mistakes(flags, message, source, convert, tmp_path):
    assert message in complaint(convert(source[0] / "compact", *flags.split()), ERROR)
    assert not any(tmp_path.iterdir())


def test_folders_that_will_not_do(source, convert, tmp_path, loads_nothing):
    root, _ = source
    llama().save_pretrained(tmp_path / "dense")
    assert "holds no pruned model (its config.json has no pruning_config)" in complaint(
        convert(tmp_path / "dense"), ERROR
    )
    assert "no_such" in complaint(convert(tmp_path / "no_such"), ERROR)
    assert "is the model's own folder" in complaint(convert(root / "compact", to=root / "compact"), ERROR)
    assert not (tmp_path / "it").exists()
