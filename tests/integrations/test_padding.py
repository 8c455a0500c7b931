"""Zeros up to the widest layer: plain transformers loads them, and computes what the pruned model computes."""

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from optimum_prune.biases import add_
from optimum_prune.binding import bind
from optimum_prune.config import PruningConfig
from optimum_prune.errors import CheckpointError, InvalidConfig, UnsupportedModel
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.integrations.loading import load_skeleton
from optimum_prune.integrations.unpadding import unpad_
from optimum_prune.layouts.padding import pad
from optimum_prune.padded import is_padded
from optimum_prune.pipeline import prune
from optimum_prune.planning.planner import make_plan
from optimum_prune.sizes import describe_, measure
from optimum_prune.surgery import slice_
from tests.models import VARIANTS, every_model, inputs, llama, llava, mistral, opt, qwen3, t5
from tests.outputs import load
from tests.processes import answer
from tests.pruned import unevenly, uniformly
from tests.shallow import skip

OURS = {"quantization_config", "per_layer_config", "allow_global_per_layer_attribute_access"}
RELOAD = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tests.models import inputs
from tests.outputs import load

found = {}
for folder in map(Path, sys.argv[1:]):
    model, complaints = load(folder)
    with torch.no_grad():
        save_file({"logits": model(**inputs(model)).logits}, folder.with_suffix(".safetensors"))
    found[folder.name] = [sorted(complaints), type(model).__name__]
assert "optimum_prune" not in sys.modules
print(json.dumps(found))
"""


def narrow(model, units):
    """Cut uneven MLPs, and heads to at most so many units in every layer: the last layer keeps one less."""
    for group in bind(model):
        if group.unit == "kv_group":
            slice_(group, range(max(1, units - (group.layer == 2 and group.group.tied is None))))
        else:
            slice_(group, range(group.num_units - 5 - group.layer))
    describe_(model)
    return model


def cut_models() -> dict[str, Any]:
    models: dict[str, Any] = {name: unevenly(model) for name, model in every_model().items()}
    models |= {
        "llama-two-units": narrow(llama(), 2),
        "llama-skips": skip(skip(unevenly(llama()), "attention", 1), "mlp", 2),
        "gemma2-skips": skip(skip(unevenly(VARIANTS["gemma2"]()), "attention", 2), "mlp", 0),
        "qwen3-skips": skip(skip(qwen3(), "attention", 1), "mlp", 1),
        "llava-skips": skip(skip(unevenly(llava()), "attention", 1, path="model.language_model.layers"), "mlp", 2),
        "t5-two-units": narrow(t5(), 2),
    }
    for model in models.values():
        model.config.pruning_config = {"version": 1}
    return models


MODELS = cut_models()


def logits(model):
    with torch.no_grad():
        return model(**inputs(model)).logits


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Save all, load all in a process without the package."""
    root = tmp_path_factory.mktemp("padded")
    for name, model in MODELS.items():
        config, weights = model.config.to_json_string(use_diff=False), copy.deepcopy(model.state_dict())
        assert save_checkpoint(model, root / name, layout="padded") == "padded"
        assert model.config.to_json_string(use_diff=False) == config
        assert all(torch.equal(weights[key], tensor) for key, tensor in model.state_dict().items())
    return root, answer(RELOAD, *(root / name for name in MODELS))


@pytest.mark.parametrize("name", MODELS)
def test_plain_transformers_computes_the_same(padded, name):
    root, found = padded
    assert found[name] == [[], type(MODELS[name]).__name__]
    difference = load_file(root / f"{name}.safetensors")["logits"] - logits(MODELS[name])
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_config_is_plain_and_says_that_it_is_padded(padded, name):
    config = json.loads((padded[0] / name / "config.json").read_text())
    assert config["pruning_config"] == {"version": 1, "layout": "padded"}
    assert MODELS[name].config.pruning_config == {"version": 1}
    for part in (config, config.get("text_config", {})):
        assert not OURS & part.keys()


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_the_model_s_with_zeros_around(padded, name):
    wide, small = load(padded[0] / name)[0].state_dict(), MODELS[name].state_dict()
    for key, tensor in wide.items():
        corner = tuple(slice(0, size) for size in small[key].shape) if key in small else slice(0, 0)
        if key in small:
            assert torch.equal(tensor[corner], small[key])
        tensor = tensor.clone()
        tensor[corner] = 0
        assert not tensor.any()


def test_generation_is_the_same(padded):
    wide = load(padded[0] / "llama-gqa")[0]
    for cache in ({}, {"cache_implementation": "static"}):
        options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8} | cache
        ours, theirs = (model.generate(**inputs(model), **options) for model in (MODELS["llama-gqa"], wide))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("model", "units", "heads", "kv_heads"),
    [
        (llama, 4, 8, 4),
        (llama, 3, 8, 4),  # LlamaConfig refuses 6 heads of a hidden size of 32
        (llama, 2, 4, 2),
        (llama, 1, 2, 1),
        (partial(llama, num_key_value_heads=8), 3, 4, 4),  # the next that it takes, not all 8
        (mistral, 3, 6, 3),
        (qwen3, 2, 4, 2),
        (opt, 4, 8, None),  # OPT would give each of 4 heads twice the size
        (t5, 5, 5, None),
    ],
)
def test_heads_are_as_few_as_the_class_takes(model, units, heads, kv_heads):
    skeleton, _ = pad(narrow(model(), units))
    assert skeleton.config.num_attention_heads == heads
    assert getattr(skeleton.config, "num_key_value_heads", None) == kv_heads


def test_a_vision_tower_is_padded_too(padded):
    config = json.loads((padded[0] / "llava" / "config.json").read_text())
    assert config["vision_config"]["num_attention_heads"] == 4  # CLIP divides its width among them
    assert config["vision_config"]["intermediate_size"] == 39
    assert config["text_config"]["intermediate_size"] == 43


@pytest.mark.parametrize(("name", "layout"), [*((name, "auto") for name in MODELS), ("llama-gqa", "padded")])
def test_saving_again_writes_the_same_bytes(padded, name, layout, tmp_path):
    first, again = padded[0] / name, tmp_path / "it"
    assert save_checkpoint(load(first)[0], again, layout=layout) == "padded"
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, again)]
    for config in configs:  # of a model of several parts, transformers adds their dtype when it saves again
        for part in ("text_config", "vision_config"):
            config.get(part, {}).pop("dtype", None)
    assert configs[0] == configs[1]


def test_shards(tmp_path):
    model = unevenly(llama())
    save_checkpoint(model, tmp_path / "it", layout="padded", max_shard_size="6KB")
    assert len(list((tmp_path / "it").glob("model-*.safetensors"))) > 3
    again, complaints = load(tmp_path / "it")
    assert complaints == {}
    assert (logits(again) - logits(model)).abs().max() < 1e-5
    save_checkpoint(again, tmp_path / "again", max_shard_size="6KB")
    for file in (tmp_path / "it").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_bfloat16_stays(tmp_path):
    save_checkpoint(unevenly(llama()).bfloat16(), tmp_path / "it", layout="padded")
    assert json.loads((tmp_path / "it" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "it" / "model.safetensors").values()} == {torch.bfloat16}


def test_generation_config_goes_along(tmp_path):
    model: Any = unevenly(llama())
    model.generation_config.max_new_tokens = 17
    save_checkpoint(model, tmp_path / "it", layout="padded")
    assert load(tmp_path / "it")[0].generation_config.max_new_tokens == 17


def test_weights_that_are_passed_are_what_is_padded(tmp_path):
    """As by savers that gather a model's weights from several devices."""
    model, other = unevenly(llama()), unevenly(llama(seed=1))
    save_checkpoint(model, tmp_path / "it", layout="padded", state_dict=other.state_dict())
    assert (logits(load(tmp_path / "it")[0]) - logits(other)).abs().max() < 1e-5


def test_equal_layers_need_no_padding(tmp_path):
    assert save_checkpoint(uniformly(llama()), tmp_path / "it", layout="padded") == "stock"


def test_training_keeps_padding_zero(padded):
    model = load(padded[0] / "llama-gqa")[0].train()
    ids = inputs(model)["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = logits(model)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert not torch.equal(logits(model), before)
    unpad_(model)
    assert measure(model) == measure(MODELS["llama-gqa"])


# The way back


@pytest.mark.parametrize("name", MODELS)
def test_unpadding_gives_the_model_back(padded, name):
    model, small = load(padded[0] / name)[0], MODELS[name]
    assert is_padded(model)
    unpad_(model)
    assert measure(model) == measure(small)
    weights = small.state_dict()
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert model.config.pruning_config["layout"] == "compact" and not is_padded(model)


@torch.no_grad()
def test_tied_blocks_are_cut_alike(tmp_path):
    """The last head of one block is zero, as padding is; the others of the stack use theirs."""
    model = unevenly(t5())
    head = bind(model)[0]
    for linear in head.readers:
        linear.weight[:, -head.unit_size :] = 0
    save_checkpoint(model, tmp_path / "it", layout="padded")
    again = load(tmp_path / "it")[0]
    again.config.pruning_config = {"layout": "padded"}
    unpad_(again)
    assert measure(again) == measure(model)


@torch.no_grad()
def test_padding_that_was_filled_is_none(padded, tmp_path):
    model = load(padded[0] / "llama-gqa")[0]
    for group in bind(model):
        for linear in group.readers:
            linear.weight[0] += 1
    assert not is_padded(model)
    assert save_checkpoint(model, tmp_path / "it") == "stock"
    assert json.loads((tmp_path / "it" / "config.json").read_text())["pruning_config"]["layout"] == "stock"


@torch.no_grad()
def test_zeros_of_a_model_that_was_not_padded_stay():
    model = llama()
    group = bind(model)[1]
    for linear in group.linears:
        linear.weight.zero_()
    unpad_(model)
    assert measure(model) == measure(llama())


# Refusals


def test_packed_is_refused(padded, tmp_path):
    with pytest.raises(InvalidConfig, match=r"'padded' does not go with storage='packed': .*layout='compact'"):
        save_checkpoint(unevenly(llama()), tmp_path / "it", layout="padded", storage="packed")
    with pytest.raises(InvalidConfig, match=r"cannot be packed too: .*Pruner.unpad\(\)"):
        save_checkpoint(load(padded[0] / "llama-gqa")[0], tmp_path / "it", storage="packed")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("pattern", ["structured", "unstructured"])
def test_padding_is_not_pruned(padded, pattern, tmp_path):
    """It would go first, and be reported as removed."""
    model, config = load(padded[0] / "llama-gqa")[0], PruningConfig(pattern, "magnitude", 0.5)
    weights = copy.deepcopy(model.state_dict())
    for run in (prune, make_plan):
        with pytest.raises(UnsupportedModel, match=r"is padded with units of zeros.*Pruner\.unpad\(\)"):
            run(model, config)
    assert all(torch.equal(weights[key], tensor) for key, tensor in model.state_dict().items())
    skeleton = load_skeleton(padded[0] / "llama-gqa")
    assert "The checkpoint is padded" in str(
        make_plan(skeleton, PruningConfig(scorer="magnitude", sparsity=0.5), skeleton=True)
    )
    unpad_(model)
    assert prune(model, config).parameters_before == MODELS["llama-gqa"].num_parameters()


def test_weights_that_are_elsewhere_are_refused(tmp_path):
    model = unevenly(llama())
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match=r"model.layers.1.*not in memory.*layout='compact'"):
        save_checkpoint(model, tmp_path / "it", layout="padded")
    assert not any(tmp_path.iterdir())


def test_what_no_plain_config_has_room_for_is_refused(tmp_path):
    model: Any = unevenly(t5())
    add_(model.encoder.block[1].layer[1].DenseReluDense.wi)
    reason = r"no plain config of T5For.* has room .*encoder.block.1.*wi.bias would be missing.*'compact'"
    with pytest.raises(InvalidConfig, match=reason):
        save_checkpoint(model, tmp_path / "it", layout="padded")
    assert not any(tmp_path.iterdir())


def test_a_tensor_that_gets_lost_is_found_when_saving(tmp_path, monkeypatch):
    monkeypatch.setattr("optimum_prune.layouts.forms.pad", lambda *given: lose(*pad(*given)))

    def lose(skeleton, weights):
        del weights["model.layers.1.mlp.up_proj.weight"]
        return skeleton, weights

    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight is \[43, 32\].*absent"):
        save_checkpoint(unevenly(llama()), tmp_path / "it", layout="padded")
    assert not any(tmp_path.iterdir())


def test_a_padded_checkpoint_needs_no_class_of_ours(padded):
    model = AutoModelForCausalLM.from_pretrained(padded[0] / "llama-gqa")
    assert not hasattr(model.config, "quantization_config")
