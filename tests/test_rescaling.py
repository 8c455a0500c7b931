"""The equivalent transform: its sites, what it is for, what it refuses (what holds everywhere is in adapters/)."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportUnhashable=false, reportOperatorIssue=false

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaModel, Qwen3Config, T5EncoderModel

from optimum_prune import equivalent_rescale_, masks_of, rescaling_sites
from optimum_prune.binding import named_linears
from optimum_prune.errors import InvalidConfig, UnsupportedModel
from tests.models import gemma2, llama, llava, opt, qwen3, t5
from tests.pruned import holes
from tests.rescaled import as_float64, distance, draw, logits
from tests.shallow import skip

NORM = "model.layers.1.post_attention_layernorm"
DOWN = "model.layers.1.mlp.down_proj"
UP = "model.layers.1.mlp.up_proj"


def site_of(model, name):
    return next(site for site in rescaling_sites(model) if site.name == name)


def in_block(model, path):
    """Return the sites of a block by their names in it."""
    sites = [site for site in rescaling_sites(model) if site.name.startswith(f"{path}.")]
    return {site.name.removeprefix(f"{path}."): site for site in sites}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# Sites


def test_sites_of_a_block():
    sites = in_block(llama(), "model.layers.1")
    assert {name: site.width for name, site in sites.items()} == {
        "input_layernorm": 32,
        "self_attn.q_proj": 8,  # 4 KV heads of 4 channels, two of which are rotated together
        "self_attn.o_proj": 16,
        "post_attention_layernorm": 32,
        "mlp.down_proj": 48,
    }
    norm, keys, values = (sites[name] for name in ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj"))
    attention = "model.layers.1.self_attn"
    assert sorted(norm.readers) == [f"{attention}.{name}_proj" for name in "kqv"]
    assert (norm.divided, norm.multiplied, norm.note) == ("model.layers.1.input_layernorm", None, "")
    assert (keys.divided, keys.multiplied, keys.readers) == (f"{attention}.k_proj", f"{attention}.q_proj", ())
    assert keys.note == (
        "Channels i and i + 2 of each head share a scale, since RoPE mixes them. "
        "The 2 query heads that read a KV head share its scales."
    )
    assert values.note == "The 2 query heads that read a KV head share its scales."


@pytest.mark.parametrize("layer", [0, 2])
def test_t5_has_no_site_for_what_cross_attention_reads(layer):
    sites = in_block(t5(), f"decoder.block.{layer}")
    assert sites.keys() == {
        *("layer.0.layer_norm", "layer.0.SelfAttention.q", "layer.0.SelfAttention.o"),
        *("layer.1.layer_norm", "layer.1.EncDecAttention.q", "layer.1.EncDecAttention.o"),
        *("layer.2.layer_norm", "layer.2.DenseReluDense.wo"),
    }
    assert sites["layer.1.layer_norm"].readers == (f"decoder.block.{layer}.layer.1.EncDecAttention.q",)


def test_norms_of_queries_and_keys_carry_their_scales():
    for build in (qwen3, lambda: llava(text=Qwen3Config(**qwen3().config.to_diff_dict()))):
        site = next(site for site in rescaling_sites(build()) if site.rotated)
        assert (site.name.rpartition(".")[2], site.width, site.repeats) == ("q_norm", 4, 1)
        assert site.divided.endswith("self_attn.k_norm") and site.multiplied == site.name


def test_gemma_inside_a_llava_is_seen_as_gemma(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = as_float64(llava(text=Gemma2Config(**gemma2().config.to_diff_dict())))
    expected = logits(model)
    equivalent_rescale_(model, draw(rescaling_sites(model)))
    assert distance(logits(model), expected) < 1e-9


def test_a_skipped_sublayer_has_none():
    model = skip(llama(), "attention", 1)
    assert in_block(model, "model.layers.1").keys() == {"post_attention_layernorm", "mlp.down_proj"}
    model = skip(gemma2(), "mlp", 1)
    assert in_block(model, "model.layers.1").keys() == {"input_layernorm", "self_attn.q_proj", "self_attn.o_proj"}


def test_norms_without_a_weight_are_none():
    model = llama()
    model.model.layers[1].input_layernorm = nn.Identity()
    assert "input_layernorm" not in in_block(model, "model.layers.1")
    with pytest.raises(InvalidConfig, match=r"layers\.1\.input_layernorm cannot .* input_layernorm has no weight"):
        equivalent_rescale_(model, {"model.layers.1.input_layernorm": torch.ones(32)})


def test_models_without_a_head_have_them_too():
    names = [site.name for site in rescaling_sites(LlamaModel(llama().config))]
    assert names[0] == "layers.0.input_layernorm" and len(names) == 15
    assert len(rescaling_sites(T5EncoderModel(t5().config))) == 15


def test_sites_of_a_model_that_is_not_in_memory():
    with torch.device("meta"):
        model = llama()
    assert rescaling_sites(model) == rescaling_sites(llama())


# What it is for


@pytest.mark.parametrize("build", [lambda: llama(num_key_value_heads=8), opt, t5], ids=["llama", "opt", "t5"])
def test_magnitude_ranks_rows_as_wanda_does(build):
    model, norms = as_float64(build()), {}
    sites = [site for site in rescaling_sites(model) if site.readers]
    before = {name: linear.weight.detach().clone() for name, linear in named_linears(model).items()}
    for site in sites:
        model.get_submodule(site.readers[0]).register_forward_pre_hook(
            lambda _, args, name=site.name: norms.update({name: args[0].detach().flatten(0, -2).norm(dim=0) + 1e-3})
        )
    logits(model)
    equivalent_rescale_(model, norms)
    for site in sites:
        for reader in site.readers:
            wanda = before[reader].abs() * norms[site.name]
            magnitude = model.get_submodule(reader).weight.detach().abs()
            assert torch.equal(magnitude.argsort(dim=1), wanda.argsort(dim=1)), reader
            assert not torch.equal(before[reader].abs().argsort(dim=1), wanda.argsort(dim=1)), reader


# Exactness


@pytest.fixture(scope="module")
def dense():
    model = as_float64(llama(num_hidden_layers=1))
    return model, logits(model)


scale = st.floats(2.0**-20, 2.0**20)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_any_scale_is_exact_and_can_be_taken_back(dense, data, dtype):
    model, expected = dense
    site = data.draw(st.sampled_from(rescaling_sites(model)))
    scales = torch.tensor(data.draw(st.lists(scale, min_size=site.width, max_size=site.width)), dtype=dtype)
    before = state(model)
    equivalent_rescale_(model, {site.name: scales})
    assert distance(logits(model), expected) < 1e-6  # norms round to float32 inside
    equivalent_rescale_(model, {site.name: 1 / scales.double()})
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("build", [llama, gemma2, opt])
def test_scales_of_one_change_no_bit(build):
    model = build()
    before = state(model)
    equivalent_rescale_(model, {site.name: torch.ones(site.width) for site in rescaling_sites(model)})
    assert same(model, before)


def test_powers_of_two_do_not_round():
    model = llama(mlp_bias=True).bfloat16()
    before = state(model)
    scales = torch.exp2(torch.arange(48) % 9 - 4)
    equivalent_rescale_(model, {DOWN: scales})
    after = model.state_dict()
    assert torch.equal(after[f"{DOWN}.weight"].float(), before[f"{DOWN}.weight"].float() * scales)
    assert torch.equal(after[f"{UP}.weight"].float() * scales[:, None], before[f"{UP}.weight"].float())
    assert torch.equal(after[f"{UP}.bias"].float() * scales, before[f"{UP}.bias"].float())
    assert torch.equal(after[f"{DOWN}.bias"], before[f"{DOWN}.bias"])


def test_gemma_norms_hold_the_scaled_weight_less_one():
    model = gemma2()
    norm = model.model.layers[1].pre_feedforward_layernorm
    nn.init.normal_(norm.weight, std=0.2)
    before = norm.weight.detach().clone()
    equivalent_rescale_(model, {"model.layers.1.pre_feedforward_layernorm": torch.full((32,), 4.0)})
    torch.testing.assert_close(1 + norm.weight, (1 + before) / 4)


def test_the_parameters_stay_the_same_objects():
    model = llama().train().half()
    model.model.layers[1].mlp.up_proj.requires_grad_(False)
    before = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
    equivalent_rescale_(model, draw(rescaling_sites(model)))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and parameter.requires_grad == before[name][1]
        assert parameter.dtype == torch.float16 and parameter.isfinite().all()
    assert model.training and model.model.layers[1].mlp.training


def test_masks_are_kept():
    model = holes(llama())
    masks = masks_of(model)
    equivalent_rescale_(model, draw(rescaling_sites(model)))
    after = masks_of(model)
    assert after.keys() == masks.keys() and all(torch.equal(after[name], mask) for name, mask in masks.items())


def test_a_checkpoint_keeps_it(tmp_path):
    model = llama()
    expected = logits(model)
    equivalent_rescale_(model, draw(rescaling_sites(model)))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert 0 < distance(logits(again), expected) < 1e-4


# Refusals


@pytest.mark.parametrize(
    ("build", "name", "message"),
    [
        (llama, "model.layers.1.mlp.down", r"Unknown rescaling site '.*'; .*Did you mean 'model\.layers\.1\.mlp\.down"),
        (llama, "model.layers.3.mlp.down_proj", "Unknown rescaling site"),
        (
            lambda: opt(activation_function="gelu"),
            "model.decoder.layers.0.fc2",
            r"layers\.0\.fc2 cannot be rescaled exactly: fc1 is followed by GELUActivation, and only a ReLU",
        ),
        (
            lambda: opt(do_layer_norm_before=False),
            "model.decoder.layers.0.final_layer_norm",
            "cannot be rescaled exactly: what comes out of final_layer_norm is the residual stream too",
        ),
        (
            lambda: opt(layer_norm_elementwise_affine=False),
            "model.decoder.layers.2.self_attn_layer_norm",
            "self_attn_layer_norm has no weight",
        ),
        (llava, "model.vision_tower.encoder.layers.0.mlp.fc2", "QuickGELUActivation"),
        (lambda: skip(llama(), "attention", 1), "model.layers.1.input_layernorm", "Unknown rescaling site"),
    ],
)
def test_sites_that_are_none(build, name, message):
    model = build()
    assert name not in {site.name for site in rescaling_sites(model)}
    with pytest.raises(InvalidConfig, match=message):
        equivalent_rescale_(model, {name: torch.ones(1)})


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (torch.ones(47), r"scales of model\.layers\.1\.mlp\.down_proj must be a tensor of shape \[48\], got \[47\]"),
        (torch.ones(48, 1), r"got \[48, 1\]"),
        ([1.0] * 48, r"must be a tensor .*got \[1\.0"),
        (torch.full((48,), -1.0), r"must be positive and finite, got -1\.0"),
        (torch.zeros(48), r"got 0\.0"),
        (torch.full((48,), torch.nan), "got nan"),
        (torch.full((48,), torch.inf), "got inf"),
    ],
)
def test_scales_that_are_none(scales, message):
    model = llama()
    before = state(model)
    with pytest.raises(InvalidConfig, match=message):
        equivalent_rescale_(model, {NORM: torch.full((32,), 2.0), DOWN: scales})
    assert same(model, before)


@pytest.mark.parametrize(
    ("build", "dtype", "name", "value"),
    [
        (llama, torch.float16, DOWN, 1e6),  # columns overflow
        (llama, torch.float16, DOWN, 1e-6),  # columns vanish
        (llama, torch.float16, NORM, 2.0**17),  # the norm's weight is left with 7 bits
        (llama, torch.float32, NORM, 1e40),
        (llama, torch.float32, DOWN, 1e-44),
        (gemma2, torch.bfloat16, "model.layers.1.pre_feedforward_layernorm", 1e4),  # 1e-4 - 1 is -1
    ],
)
@pytest.mark.parametrize("channel", [slice(None), 5])
def test_results_that_the_dtype_cannot_hold(build, dtype, name, value, channel):
    model = build().to(dtype)
    before = state(model)
    scales = torch.ones(site_of(model, name).width, dtype=torch.float64)
    scales[channel] = value
    first = "model.layers.0.mlp.down_proj"
    with pytest.raises(InvalidConfig, match=rf"layers\.1\..* \({dtype}\) cannot hold .*closer to 1, or convert"):
        equivalent_rescale_(model, {first: torch.full((48,), 2.0), name: scales})
    assert same(model, before)


def as_float8(module):
    module.weight = nn.Parameter(module.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


def as_meta(module):
    module.to("meta")


def as_inference(module):
    with torch.inference_mode():
        module.weight = nn.Parameter(module.weight.clone())


def as_damaged(module):
    module.weight.data[0] = torch.nan


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (as_float8, "float8_e4m3fn"),
        (as_meta, r"\.weight is not in memory"),
        (as_inference, r"\.weight was made under torch\.inference_mode"),
        (as_damaged, r"\.weight holds NaN"),
    ],
)
@pytest.mark.parametrize("name", [NORM, UP])
def test_weights_that_cannot_be_scaled(damage, message, name):
    model = llama()
    damage(model.get_submodule(name))
    with pytest.raises(UnsupportedModel, match=rf"{name}.*{message}"):
        equivalent_rescale_(model, {NORM: torch.full((32,), 2.0)})


def test_tied_weights():
    model = llama()
    model.model.layers[0].input_layernorm.weight = model.model.norm.weight
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.input_layernorm\.weight is shared with another module"):
        equivalent_rescale_(model, draw(rescaling_sites(model)))
    equivalent_rescale_(model, draw([site_of(model, DOWN)]))  # not of the tied ones


def test_given_scales_are_left_alone():
    model = llama()
    scales = {site.name: torch.full((site.width,), 2.0, dtype=torch.float64) for site in rescaling_sites(model)}
    equivalent_rescale_(model, scales)
    assert all((scale == 2).all() for scale in scales.values())
