"""What layers do to the residual stream: against plain loops, whatever the batches, and harmless to the model."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOptionalSubscript=false, reportOptionalIterable=false

import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from optimum_prune.binding import adapter_for, stacks
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.influence import mean_influence
from optimum_prune.errors import UnsupportedModel
from optimum_prune.scorers.block_influence import influence
from tests.models import VARIANTS, inputs, llama, llava, mistral, t5, tokens
from tests.shallow import drop, skip, zero

LENGTHS = (12, 5, 9, 12, 2)
SAMPLES = [tokens(1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]
DATA = CalibrationData(SAMPLES, 12, "test")
PAIRS = replace(DATA, targets=[SAMPLES[i] for i in (1, 0, 4, 2, 3)], start=0)
GOLDEN = ["llama-gqa", "llama-tied-biased", "mistral", "qwen2-mixed-windows", "qwen3", "gemma2", "gemma3"]


def measured(model, data=DATA, batch_size=2, pad=0):
    batches = list(data.batches(batch_size, pad))
    found = [f for f in stacks(model, adapter_for(model)) if f.stack.depth is not None]
    return mean_influence(model, found, batches, influence)


def with_norms(name):
    """Build a variant of which no norm only scales: else a state and its norm would have one direction."""
    model = VARIANTS[name]()
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = torch.rand(parameter.shape, generator=generator) * 2
    return model


def states(name, sample, blocks, without=()):
    """Return what leaves the first so many blocks, `(T, d)`, some sub-layers of which add nothing."""
    if blocks == 0:
        model = with_norms(name)
        seen = []
        model.model.layers[0].register_forward_pre_hook(lambda block, args: seen.append(args[0]))
        model(sample[None])
        return seen[0][0]
    model = zero(with_norms(name), *without) if without else with_norms(name)
    drop(model, range(blocks))
    model.model.norm = nn.Identity()
    return model.model(sample[None]).last_hidden_state[0]


def by_loops(pairs):
    """Average 1 - cos over all tokens of all samples, in float64."""
    values = []
    for before, after in pairs:
        for x, y in zip(before.tolist(), after.tolist(), strict=True):
            dot = sum(a * b for a, b in zip(x, y, strict=True))
            values.append(1 - dot / math.sqrt(sum(a * a for a in x)) / math.sqrt(sum(b * b for b in y)))
    return sum(values) / len(values)


@torch.no_grad()
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    """ShortGPT's block influence, and the same of attention and MLP on the stream around them."""
    got = measured(with_norms(name))
    for layer in range(3):
        path = f"model.layers.{layer}"
        before = [states(name, sample, layer) for sample in SAMPLES]
        between = [states(name, sample, layer + 1, [f"{path}.mlp"]) for sample in SAMPLES]
        after = [states(name, sample, layer + 1) for sample in SAMPLES]
        assert got[path] == pytest.approx(by_loops(zip(before, after, strict=True)), abs=1e-6)
        attention, mlp = zip(before, between, strict=True), zip(between, after, strict=True)
        assert got[f"{path}.self_attn"] == pytest.approx(by_loops(attention), abs=1e-6)
        assert got[f"{path}.mlp"] == pytest.approx(by_loops(mlp), abs=1e-6)
    assert all(1e-3 < value < 2 for value in got.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_block_and_sublayer_is_measured(name):
    model = VARIANTS[name]()
    data = PAIRS if model.config.is_encoder_decoder else DATA
    names = []
    for found in stacks(model, adapter_for(model)):
        if found.stack.depth is not None:
            for layer in range(len(found.blocks)):
                names += [
                    f"{found.path}.{layer}",
                    *(f"{found.path}.{layer}.{p}" for p in found.stack.sublayers.values()),
                ]
    assert list(measured(model, data)) == names


@pytest.mark.parametrize(("build", "data"), [(llama, DATA), (mistral, DATA), (t5, PAIRS)])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_whatever_the_batch_size(build, data, batch_size):
    got, expected = measured(build(), data, batch_size), measured(build(), data, 2)
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("build", "data"), [(llama, DATA), (t5, PAIRS)])
def test_padding_is_not_looked_at(build, data):
    assert measured(build(), data, pad=0) == measured(build(), data, pad=7)


def test_padding_on_the_left():
    (whole,) = DATA.batches(len(LENGTHS), 0)
    left = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for i, length in enumerate(LENGTHS):
        for name, tensor in whole.items():
            left[name][i, 12 - length :] = tensor[i, :length]
    model = llama()
    got = mean_influence(model, stacks(model, adapter_for(model)), [left], influence)
    assert got == pytest.approx(measured(llama()), abs=1e-6)


def test_tokens_count_and_not_samples():
    once = measured(llama(), replace(DATA, samples=[SAMPLES[0], SAMPLES[4]]))
    a, b = (measured(llama(), replace(DATA, samples=[SAMPLES[i]])) for i in (0, 4))
    assert once == pytest.approx({name: (12 * a[name] + 2 * b[name]) / 14 for name in once}, abs=1e-6)


def test_the_encoder_is_masked_by_its_own_mask():
    longer = replace(PAIRS, targets=[*PAIRS.targets[:-1], tokens(1, 12, seed=9)[0]])
    names = [f"encoder.block.{layer}" for layer in range(3)]
    one, other = measured(t5(), PAIRS), measured(t5(), longer)
    assert [one[name] for name in names] == [other[name] for name in names]
    assert all(one[name] != other[name] for name in one.keys() - names)


def test_images_count_as_tokens():
    given = inputs(llava(), batch=2)
    data = CalibrationData(list(given["input_ids"]), 12, "test", images=[p[None] for p in given["pixel_values"]])
    others = replace(data, images=[torch.zeros_like(pixels) for pixels in data.images])
    one, other = measured(llava(), data), measured(llava(), others)
    assert one.keys() == other.keys() and all(one[name] != other[name] for name in one)
    assert not any("vision" in name for name in one)


def test_a_skipped_sublayer_does_nothing():
    got = measured(skip(skip(llama(), "attention", 1), "mlp", 2))
    assert got["model.layers.1.self_attn"] == got["model.layers.2.mlp"] == 0
    assert got["model.layers.1.mlp"] == pytest.approx(got["model.layers.1"], abs=1e-6)


def test_the_head_is_not_run():
    model = llama()
    model.lm_head.forward = lambda *args: pytest.fail("logits that nobody reads")
    measured(model)


def test_half_precision():
    model = llama()
    assert measured(model.to(torch.bfloat16)) == pytest.approx(measured(llama()), abs=0.02)


def test_no_block_holds_on_to_its_states():
    model, seen = llama(), []
    for block in model.model.layers:
        block.post_attention_layernorm.register_forward_pre_hook(lambda norm, args: seen.append(weakref.ref(args[0])))
    alive = []
    model.model.norm.register_forward_pre_hook(lambda norm, args: alive.extend(ref() is not None for ref in seen))
    measured(model, batch_size=5)
    assert alive == [False] * 3


def traces(model):
    return [(id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def test_the_model_is_left_as_it_was():
    model = llama().train()
    model.model.layers[1].eval()
    before, values = traces(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured(model)
    assert traces(model) == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hooks_go_on_every_way_out(error):
    model = llama().train()
    before = traces(model)

    def fail(one, other):
        raise error

    with pytest.raises(error):
        mean_influence(model, stacks(model, adapter_for(model)), list(DATA.batches(2, 0)), fail)
    assert traces(model) == before


@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_layer_that_is_not_finite_is_named(layer):
    model = llama()
    model.model.layers[layer].mlp.down_proj.weight.data[0, 0] = torch.nan
    before = traces(model)
    with pytest.raises(UnsupportedModel, match=rf"hidden states of model\.layers\.{layer} are not finite on the calib"):
        measured(model)
    assert traces(model) == before
