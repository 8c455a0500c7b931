"""Pruned with biases of their own: saved, loaded in a new process, and pruned again."""
# pyright: reportArgumentType=false, reportOptionalIterable=false

import json

import pytest
import torch
from safetensors.torch import load_file

from optimum_prune import InductionConfig, PruningConfig
from optimum_prune.binding import named_linears
from optimum_prune.errors import InvalidConfig
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.pipeline import prune
from optimum_prune.scaling import Passes
from tests.biased import biased
from tests.models import VARIANTS, inputs, mistral
from tests.outputs import load, outputs
from tests.processes import answer
from tests.shallow import drop
from tests.zeroed import excluded, for_model

LAYOUTS = {
    "llama-gqa": "stock",
    "llava": "stock",
    "opt": "stock",
    "mistral": "compact",
    "qwen2": "compact",
    "qwen3": "compact",
    "t5-gated": "compact",
}
RELOAD = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tests.models import inputs
from tests.outputs import load

complaints = {}
for folder in map(Path, sys.argv[1:]):
    if (folder.parent / "plugin").exists():
        import optimum_prune
    model, found = load(folder, dtype="auto")
    complaints[folder.name] = sorted(map(str, found))
    with torch.no_grad():
        save_file({"logits": model(**inputs(model)).logits}, folder.with_suffix(".safetensors"))
assert ("optimum_prune" in sys.modules) == (Path(sys.argv[1]).parent / "plugin").exists()
print(json.dumps(complaints))
"""


def pruned(name: str):
    """Prune a variant, with consent to biases; every loss is lower than the one before, so that all are kept."""
    model = VARIANTS[name](enable_bias=False) if name == "opt" else VARIANTS[name]()
    losses = iter(range(10**6, 0, -1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "loss", lambda _: float(next(losses)))
        config = PruningConfig(
            "2:4",
            "wanda",
            induction=InductionConfig(epochs=1, allow_bias=True),
            calibration=for_model(model, 4),
            exclude=excluded(model, 4),
        )
        report = prune(model, config)
    assert all(row["created"] for row in report.induction)
    return model


@torch.no_grad()
def logits(model):
    return model(**inputs(model)).logits


@pytest.fixture(scope="module")
def models():
    return {name: pruned(name) for name in LAYOUTS}


@pytest.fixture(scope="module", params=["stock", "compact"])
def reloaded(request, models, tmp_path_factory):
    """Save all models of a layout, and load them in a new process; stock ones without the package."""
    root = tmp_path_factory.mktemp(request.param)
    names = [name for name, layout in LAYOUTS.items() if layout == request.param]
    for name in names:
        assert save_checkpoint(models[name], root / name) == request.param
    if request.param == "compact":
        (root / "plugin").touch()
    return root, names, answer(RELOAD, *(root / name for name in names))


def test_computes_the_same_in_a_new_process(reloaded, models):
    root, names, complaints = reloaded
    assert complaints == {name: [] for name in names}
    for name in names:
        assert torch.equal(load_file(root / f"{name}.safetensors")["logits"], logits(models[name])), name


def test_biases_are_not_idle(models):
    """With the created ones at zero, other logits: else the test above would show nothing."""
    for name in ("mistral", "llama-gqa"):
        before = logits(models[name])
        linears = named_linears(models[name])
        kept = {linear: linear.bias.detach().clone() for linear in linears.values()}
        with torch.no_grad():
            for linear in kept:
                linear.bias.zero_()
            assert not torch.allclose(logits(models[name]), before, atol=1e-3)
            for linear, bias in kept.items():
                linear.bias.copy_(bias)


@pytest.mark.parametrize("name", ["mistral", "t5-gated", "llama-gqa"])
def test_saved_again_by_transformers_alone_it_is_the_same(name, models, tmp_path):
    save_checkpoint(models[name], tmp_path / "one")
    again, _ = load(tmp_path / "one")
    again.save_pretrained(tmp_path / "two")
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    one, two = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("name", ["mistral", "t5-gated"])
def test_packed(name, models, tmp_path):
    save_checkpoint(models[name], tmp_path, storage="packed")
    again, complaints = load(tmp_path)
    assert not complaints
    assert torch.equal(logits(again), logits(models[name]))


@pytest.mark.parametrize("name", ["mistral", "t5-gated", "llama-gqa"])
def test_pruned_again(name, models, tmp_path):
    """Loaded, a block dropped, then units, then zeros: nothing of the biases is lost on the way."""
    save_checkpoint(models[name], tmp_path / "one")
    model, _ = load(tmp_path / "one")
    drop(model, [0, 2], "decoder.block" if name == "t5-gated" else None)
    prune(model, PruningConfig(scorer="magnitude", sparsity=0.3, round_to=4))
    config = PruningConfig("unstructured", "wanda", 0.7, calibration=for_model(model, 4), induction={"epochs": 1})
    report = prune(model, config)
    assert sum(row["created"] for row in report.induction) == 0
    assert all(len(linear.bias) == len(linear.weight) for linear in named_linears(model).values())
    save_checkpoint(model, tmp_path / "two")
    again, complaints = load(tmp_path / "two")
    assert not complaints
    assert all(torch.equal(tensor, outputs(model)[kind]) for kind, tensor in outputs(again).items())


def test_half_precision_comes_back(tmp_path):
    """In float16, T5 keeps `wo` in float32, and a bias has the dtype of its weight."""
    model = biased(VARIANTS["t5-gated"]())
    model.save_pretrained(tmp_path / "wide")
    half, _ = load(tmp_path / "wide", dtype=torch.float16)
    assert all(linear.bias.dtype == linear.weight.dtype for linear in named_linears(half).values())
    assert half.encoder.block[0].layer[1].DenseReluDense.wo.bias.dtype == torch.float32
    save_checkpoint(half, tmp_path / "half")
    again, _ = load(tmp_path / "half", dtype="auto")
    assert torch.equal(logits(again), logits(half))


@pytest.mark.parametrize("layout", ["stock", "padded"])
def test_refuses_layouts_that_would_lose_them(layout, tmp_path):
    with pytest.raises(InvalidConfig, match=r"model\.layers\.0\.\w+\.\w+_proj.*Use layout='compact'"):
        save_checkpoint(biased(mistral()), tmp_path / "it", layout=layout)
    assert not (tmp_path / "it").exists()
