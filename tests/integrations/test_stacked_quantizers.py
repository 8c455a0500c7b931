"""Quantising what was pruned: at load where plain transformers can load it, and afterwards in any case."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from optimum_prune import PruningConfig, prune
from optimum_prune.binding import named_linears
from optimum_prune.errors import UnsupportedModel
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.sizes import measure
from tests.models import llama, tokens
from tests.pruned import holes, unevenly, uniformly

SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 136}
"""Widths that are multiples of 64 after `uniformly`: else the 4-bit kernel of bitsandbytes for CPUs computes amiss."""
RECORD = {"version": 1, "library": "optimum_prune"}
PRUNED = {
    "narrower": ("stock", uniformly),
    "zeros": ("stock", holes),
    "padded": ("padded", unevenly),
}


def built(cut):
    model = cut(llama(**SHAPE))
    model.config.pruning_config = dict(RECORD)
    return model


@pytest.fixture(params=PRUNED)
def checkpoint(request, tmp_path):
    """Return a folder that plain transformers loads."""
    layout, cut = PRUNED[request.param]
    assert save_checkpoint(built(cut), tmp_path / "it", layout=layout) == layout
    return tmp_path / "it"


@pytest.fixture
def compact(tmp_path):
    assert save_checkpoint(built(unevenly), tmp_path / "it") == "compact"
    return tmp_path / "it"


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens()).logits


def int8():
    return pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig()


def bitsandbytes(**options):
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**options)


QUANTIZERS = {
    "torchao": lambda: TorchAoConfig(int8()),
    "bitsandbytes 8 bit": lambda: bitsandbytes(load_in_8bit=True),
    "bitsandbytes 4 bit": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}


@torch.no_grad()
def assert_near(model, pruned):
    """Compare what the linears of two models compute: a quantised weight differs a little, and a zero stays one."""
    for name, linear in named_linears(pruned).items():
        quantised: Any = model.get_submodule(name)
        assert type(quantised.weight) is not nn.Parameter, name
        found = quantised(torch.eye(linear.in_features)).T.float()
        assert (found - linear.weight).norm() < 0.3 * linear.weight.norm(), name
        assert not found[linear.weight == 0].any(), name


@pytest.mark.parametrize("name", QUANTIZERS)
def test_at_load(name, checkpoint):
    config = QUANTIZERS[name]()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)
    assert_near(model, AutoModelForCausalLM.from_pretrained(checkpoint))
    assert model.config.pruning_config["library"] == RECORD["library"]
    assert model.generate(tokens(), max_new_tokens=3).shape == (2, 15)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_saved_again(name, tmp_path):
    config = QUANTIZERS[name]()
    save_checkpoint(built(uniformly), tmp_path / "it")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "it", quantization_config=config)
    before = logits(model)
    model.save_pretrained(tmp_path / "quantised")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
    assert torch.equal(logits(again), before)
    assert AutoConfig.from_pretrained(tmp_path / "quantised").pruning_config["library"] == RECORD["library"]


@pytest.mark.parametrize("at_load", [False, True], ids=["loaded compact", "pruned while loading"])
def test_torchao_afterwards(at_load, compact, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model: Any
    if at_load:
        llama(**SHAPE).save_pretrained(tmp_path / "dense")
        recipe = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=recipe)
    else:
        model = AutoModelForCausalLM.from_pretrained(compact)
    plain, sizes = copy.deepcopy(model), measure(model)
    assert len({str(counts) for counts in sizes["model.layers"].values()}) > 1
    quantization.quantize_(model, int8())
    assert_near(model, plain)
    assert model.generate(tokens(), max_new_tokens=3).shape == (2, 15)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_compact_with_a_quantizer_at_load(name, compact):
    config = QUANTIZERS[name]()
    message = f"quantized with CheckpointConfig but you are passing a {type(config).__name__} config"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(compact, quantization_config=config)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_pruning_what_is_quantised(name, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=QUANTIZERS[name]())
    with pytest.raises(UnsupportedModel, match="quantised"):
        prune(model, PruningConfig(scorer="magnitude", sparsity=0.3))
