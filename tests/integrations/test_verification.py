"""Saving is made to write what the model is not: in every layout, it fails then and there and names the tensor."""

import json
import re
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimum_prune.binding import bind
from optimum_prune.errors import CheckpointError
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.surgery import slice_
from tests.models import llama
from tests.outputs import load
from tests.pruned import holes, unevenly, uniformly

UP, GATE, BIAS = (f"model.layers.1.mlp.{name}" for name in ("up_proj.weight", "gate_proj.weight", "up_proj.bias"))
TIED = partial(llama, tie_word_embeddings=True)


def six_heads(model):
    for group in bind(model):
        if group.unit == "kv_group":
            slice_(group, [0, 2, 3])
    return model


LAYOUTS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "stock": (uniformly, {}, 40),
    "stock, class switched": (six_heads, {"class_switch": True}, 48),
    "stock, packed": (lambda model: holes(uniformly(model), sparsity=0.9), {"storage": "packed"}, 40),
    "compact": (unevenly, {}, 39),
    "compact, packed": (lambda model: holes(unevenly(model), sparsity=0.9), {"storage": "packed"}, 39),
    "compact, sharded": (unevenly, {"max_shard_size": "6KB"}, 39),
    "padded": (unevenly, {"layout": "padded"}, 43),
    "padded, sharded": (unevenly, {"layout": "padded", "max_shard_size": "6KB"}, 43),
}
"""What is written -> how a model is cut, how it is saved, and the MLP width of block 1."""


def rewrite_weights(folder, change):
    (file,) = [file for file in folder.glob("*.safetensors") if UP in load_file(file)]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def rewrite_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def narrower(config):
    """Take a channel off block 1; off all blocks, where the config knows only one width."""
    own = config.get("per_layer_config", {}).get("1", config)
    own["intermediate_size"] -= 1


def untie(config):
    config["tie_word_embeddings"] = False


def shorter(config):
    config["num_hidden_layers"] = 2
    config.get("per_layer_config", {}).pop("2", None)


WRONG: dict[str, tuple[Any, Any, str]] = {
    "width in the config": (rewrite_config, narrower, "model.layers.{first}.mlp.down_proj.weight is [32, {less}]"),
    "tensor missing": (
        rewrite_weights,
        lambda tensors: tensors.pop(UP),
        UP + " is [{width}, 32], but in the checkpoint it is absent",
    ),
    "tensor too many": (
        rewrite_weights,
        lambda tensors: tensors.update({BIAS: torch.zeros(3)}),
        BIAS + " is absent, but in the checkpoint it is [3]",
    ),
    "shape on disk": (
        rewrite_weights,
        lambda tensors: tensors.update({UP: torch.zeros(50, 32)}),
        UP + " is [{width}, 32], but in the checkpoint it is [50, 32]",
    ),
    "tie": (rewrite_config, untie, "lm_head.weight is [96, 32], but in the checkpoint it is absent"),
    "depth in the config": (
        rewrite_config,
        shorter,
        "model.layers.2.input_layernorm.weight is absent, but in the checkpoint it is [32]",
    ),
    "more layers in the config": (
        rewrite_config,
        lambda config: config.update(num_hidden_layers=4),
        "model.layers.3.input_layernorm.weight is [32], but in the checkpoint it is absent",
    ),
    "no model": (
        rewrite_config,
        lambda config: config.update(hidden_act="no_such"),
        "The config as written builds no {name}: ",
    ),
}


@pytest.fixture
def wrongly(monkeypatch):
    """Return a function that makes every save write something else than the model."""

    def spoil(rewrite, change):
        from transformers import PreTrainedModel

        save = PreTrainedModel.save_pretrained

        def save_wrongly(self, folder, **kwargs):
            save(self, folder, **kwargs)
            rewrite(folder, change)

        monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_wrongly)

    return spoil


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_fails_at_save_and_names_the_tensor(layout, wrong, tmp_path, wrongly):
    cut, options, width = LAYOUTS[layout]
    rewrite, change, message = WRONG[wrong]
    target, model = tmp_path / "it", cut(TIED())
    save_checkpoint(model, target, **options)
    before = contents(target)
    wrongly(rewrite, change)
    words = {"width": width, "less": width - 1, "first": 1 if "compact" in layout else 0}
    name = "MistralForCausalLM" if "switched" in layout else "LlamaForCausalLM"
    with pytest.raises(CheckpointError, match=re.escape(message.format(name=name, **words))):
        save_checkpoint(cut(TIED(seed=1)), target, **options)
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("layout", ["stock", "compact", "padded"])
def test_transformers_itself_agrees_that_it_does_not_load(layout, wrong, tmp_path, wrongly):
    """The oracle: the same checkpoint, written all the same, does not load on the meta device."""
    cut, options, _ = LAYOUTS[layout]
    wrongly(*WRONG[wrong][:2])
    assert save_checkpoint(cut(TIED()), tmp_path / "wrong", verify=False, **options) == layout
    assert not loads(tmp_path / "wrong")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "3KB"}])
def test_what_is_right_passes_and_is_written_again_to_the_byte(layout, shards, tmp_path):
    cut, options, _ = LAYOUTS[layout]
    save_checkpoint(cut(TIED()), tmp_path / "it", **options | shards)
    assert loads(tmp_path / "it")
    save_checkpoint(load(tmp_path / "it")[0], tmp_path / "again", **options | shards)
    first, again = (contents(tmp_path / name) for name in ("it", "again"))
    assert first == again
    assert len(first) > (6 if shards else 2)


def test_wider_than_the_config_s_widest(tmp_path, wrongly):
    wrongly(rewrite_config, lambda config: config["per_layer_config"]["1"].update(intermediate_size=60))
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp \{'intermediate_size': 60\}"):
        save_checkpoint(unevenly(llama()), tmp_path / "it")


def test_a_tie_that_the_config_does_not_know_is_found(tmp_path):
    model = unevenly(llama())
    model.lm_head.weight = model.get_input_embeddings().weight
    with pytest.raises(CheckpointError, match=r"lm_head.weight is \[96, 32\], but in the checkpoint it is absent"):
        save_checkpoint(model, tmp_path / "it")


def loads(folder):
    """Whether transformers' own code finds a place for every tensor and a tensor for every place."""
    try:
        return load(folder, device_map="meta")[1] == {}
    except Exception:
        return False


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
