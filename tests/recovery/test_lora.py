"""LoRA on pruned models: what trains, what merging keeps, and that nothing of PEFT stays behind."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import AutoModel, Trainer, TrainingArguments

from optimum_prune.errors import InvalidConfig, UnsupportedModel
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.pipeline import prune
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.lora import attach, merge_, target_modules, unload_
from optimum_prune.recovery.masked_linear import masked_linear
from optimum_prune.sparsity import masks_of
from tests.damage import nan_weight, on_meta, quantised, shared
from tests.models import VARIANTS, inputs, llama, llava, opt, t5, tokens
from tests.outputs import load
from tests.pruned import holes, unevenly
from tests.shallow import drop, skip
from tests.zeroed import bits, config, state, targeted

DOWN = "model.layers.1.mlp.down_proj"
PRUNED = {name: lambda build=build: holes(unevenly(build())) for name, build in VARIANTS.items()} | {
    "2:4": lambda: two_of_four(llama()),
    "zeros": lambda: holes(llama()),
    "zeros in one linear": lambda: holes_in_one(llama()),
    "structured": lambda: unevenly(llama()),
    "structured t5": lambda: unevenly(t5()),
    "layers": lambda: drop(holes(unevenly(opt())), [0, 2]),
    "sub-layers": lambda: skip(holes(llama()), "attention", 1),
}


def two_of_four(model):
    prune(model, config(scorer="magnitude"))
    return model


def holes_in_one(model):
    with torch.no_grad():
        model.get_submodule(DOWN).weight[:, ::2] = 0
    return model


def trained(model, **options):
    """Attach an adapter, and put weights in that training might have left there."""
    tuned = attach(model, RecoveryConfig(rank=3, **options))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in tuned.named_parameters():
        if ".lora_B." in name:
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return tuned.eval()


def adapter(tuned) -> Any:
    return {name: p.detach().clone() for name, p in tuned.named_parameters() if ".lora_" in name}


@torch.no_grad()
def logits(tuned, model=None):
    given = inputs(model or tuned)
    dtype = (model or tuned).dtype
    return tuned(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}).logits


def layer(tuned, path=DOWN) -> Any:
    return tuned.get_base_model().get_submodule(path)


# What trains


@pytest.mark.parametrize("name", VARIANTS)
def test_linears_of_blocks_are_trained_and_nothing_else(name):
    model = VARIANTS[name]()
    names = target_modules(model, RecoveryConfig())
    assert names == list(targeted(model))
    assert not any("vision" in name for name in names)
    tuned = attach(model, RecoveryConfig(rank=2))
    trainable = {name for name, parameter in tuned.named_parameters() if parameter.requires_grad}
    factors = {f"base_model.model.{name}.lora_{side}.default.weight" for name in names for side in "AB"}
    assert trainable == factors


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (["q_proj", "v_proj"], 6),
        (["self_attn.q_proj"], 3),
        (["mlp"], 9),
        (["model.layers.1"], 7),
        (["model.layers.*.mlp.down_proj", "*.down_proj"], 3),
        (["*"], 21),
    ],
)
def test_patterns_narrow_them(patterns, count):
    model = llama()
    names = target_modules(model, RecoveryConfig(target_modules=patterns))
    assert len(names) == count
    assert names == [name for name in targeted(model) if name in names]  # in the order of the model
    tuned = attach(model, RecoveryConfig(target_modules=patterns, rank=2))
    assert sum(".lora_B." in name for name in adapter(tuned)) == count


@pytest.mark.parametrize(
    ("build", "pattern", "message"),
    [
        (
            llama,
            "q_prj",
            r"Unknown module pattern 'q_prj'; supported: 'k_proj', 'v_proj', 'q_proj'.*Did you mean 'q_proj'",
        ),
        (
            llama,
            "layers.*.mlp.dwn_proj",
            r"supported: 'model\.layers\.\*\.self_attn\.k_proj'.*Did you mean .*down_proj",
        ),
        (llama, "lm_head", "Unknown module pattern 'lm_head'"),
        (VARIANTS["llama-tied-biased"], "model.embed_tokens", "Unknown module pattern 'model.embed_tokens'"),
        (llava, "*vision_tower*", "Unknown module pattern"),
    ],
)
def test_a_pattern_that_matches_nothing(build, pattern, message):
    model = build()
    with pytest.raises(InvalidConfig, match=message):
        attach(model, RecoveryConfig(target_modules=["*.0.*", pattern]))
    assert not hasattr(model, "peft_config")


def test_the_first_adapter_is_drawn_from_the_seed_alone():
    torch.manual_seed(3)
    first = adapter(attach(holes(llama()), RecoveryConfig(seed=1)))
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    model = holes(llama())
    torch.manual_seed(4)
    second = adapter(attach(model, RecoveryConfig(seed=1)))
    assert torch.equal(torch.rand(3), expected)  # the user's draws go on as if nothing had been drawn
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = adapter(attach(holes(llama()), RecoveryConfig(seed=2)))
    assert not any(torch.equal(first[name], other[name]) for name in first if ".lora_A." in name)


def test_a_fresh_adapter_changes_nothing():
    model = holes(llama())
    before = logits(model)
    torch.testing.assert_close(logits(attach(model, RecoveryConfig()).eval(), model), before, rtol=1e-5, atol=1e-5)


def test_scale_and_dropout_are_those_of_the_config():
    tuned = attach(holes(llama()), RecoveryConfig(rank=4, alpha=6.0, dropout=0.25))
    assert layer(tuned).scaling == {"default": 1.5}
    assert layer(tuned).lora_dropout["default"].p == 0.25


def test_only_what_holds_zeros_is_masked():
    tuned = attach(holes_in_one(llama()), RecoveryConfig())
    kinds = {name: type(module).__name__ for name, module in tuned.named_modules() if hasattr(module, "lora_A")}
    assert [name for name, kind in kinds.items() if kind == "MaskedLinear"] == [f"base_model.model.{DOWN}"]
    tuned = attach(holes(llama()), RecoveryConfig(merge="remask"))
    assert not any(type(module).__name__ == "MaskedLinear" for module in tuned.modules())


# Merging


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in PRUNED] + [(name, torch.float32) for name in PRUNED if name not in VARIANTS],
)
def test_masked_merge(name, dtype):
    model = PRUNED[name]().to(dtype)
    masks, before, described = masks_of(model), state(model), model.config.to_dict()
    tuned = trained(model)
    expected = logits(tuned, model)
    assert not torch.equal(expected, logits_without(tuned, model))
    merged = merge_(tuned, "masked")
    assert merged is model
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(logits(model), expected, rtol=limit, atol=limit)
    assert_same_masks(model, masks)
    assert_plain(model, before, described)
    assert all((model.state_dict()[f"{name}.weight"] != before[f"{name}.weight"]).any() for name in targeted(model))


def logits_without(tuned, model):
    with tuned.disable_adapter():
        return logits(tuned, model)


def assert_same_masks(model, masks):
    found = masks_of(model)
    assert found.keys() == masks.keys()
    assert all(torch.equal(found[name], mask) for name, mask in masks.items())


def assert_plain(model, before, described):
    """Compare all but the values of weights with the model as it was."""
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(
        after[name].shape == tensor.shape and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )
    assert not any("peft" in type(module).__module__ for module in model.modules())
    assert not hasattr(model, "peft_config")
    assert model.config.to_dict() == described
    assert all(parameter.requires_grad for parameter in model.parameters())
    outside = [name for name in before if name.removesuffix(".weight") not in targeted(model)]
    assert all(torch.equal(after[name], before[name]) for name in outside)


def test_two_of_four_stay_two_of_four():
    model = PRUNED["2:4"]()
    merge_(trained(model), "masked")
    for linear in targeted(model).values():
        assert (linear.weight.reshape(-1, 4) == 0).sum(dim=1).eq(2).all()


@pytest.mark.parametrize("merge", ["masked", "remask"])
def test_remask_is_the_plain_merge_without_what_it_filled(merge):
    model, plain = holes(llama()), holes(llama())
    masks = masks_of(model)
    merge_(trained(model, merge="remask"), merge)
    merge_(trained(plain, merge="plain"), "plain")
    assert_same_masks(model, masks)
    assert masks_of(plain) == {}
    for name, linear in targeted(model).items():
        assert torch.equal(linear.weight, targeted(plain)[name].weight * masks[name])


def test_plain_merge_computes_what_the_adapter_did():
    model = holes(llama())
    tuned = trained(model, merge="plain")
    expected = logits(tuned, model)
    torch.testing.assert_close(logits(merge_(tuned, "plain")), expected, rtol=1e-4, atol=1e-4)


def test_pefts_own_merge_keeps_zeros_too():
    model = holes(llama())
    masks = masks_of(model)
    tuned: Any = trained(model)
    expected = logits(tuned, model)
    torch.testing.assert_close(logits(tuned.merge_and_unload()), expected, rtol=1e-5, atol=1e-5)
    assert_same_masks(model, masks)


def test_bfloat16_is_merged_in_float32_and_computes_the_same_bits():
    model = holes(llama())
    model.bfloat16()
    tuned = trained(model)
    assert {factor.dtype for factor in adapter(tuned).values()} == {torch.float32}
    expected = logits(tuned, model)
    down, weight = layer(tuned), layer(tuned).base_layer.weight.clone()
    total = weight.float() + 16 / 3 * down.lora_B["default"].weight @ down.lora_A["default"].weight
    merge_(tuned, "masked")
    assert torch.equal(logits(model), expected)
    assert torch.equal(targeted(model)[DOWN].weight, (total * (weight != 0)).to(torch.bfloat16))


def test_bfloat16_with_float32_outputs_as_t5_is_loaded():
    model = holes(t5())
    model.bfloat16()
    dtypes = {name: torch.float32 if name.endswith(".wo") else torch.bfloat16 for name in targeted(model)}
    for name, linear in targeted(model).items():
        linear.to(dtypes[name])
    tuned = trained(model)
    tuned(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in tuned.parameters() if p.requires_grad)
    expected = logits(tuned, model)
    assert torch.equal(logits(merge_(tuned, "masked")), expected)
    assert {name: linear.weight.dtype for name, linear in targeted(model).items()} == dtypes


def test_tied_heads_stay_tied():
    model = holes(VARIANTS["llama-tied-biased"]())
    merge_(trained(model), "masked")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_flags_of_parameters_are_given_back():
    model = holes(llama())
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    merge_(trained(model), "masked")
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_config_stays_where_peft_would_change_it():
    model = llama(pretraining_tp=2)
    tuned = trained(model)
    assert model.config.pretraining_tp == 2
    merge_(tuned, "plain")
    assert model.config.pretraining_tp == 2


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_a_diverged_adapter_is_not_merged(side):
    model = holes(llama())
    before = bits(model)
    tuned = trained(model)
    getattr(layer(tuned), side)["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(UnsupportedModel, match=rf"{DOWN} holds NaN.*lower learning_rate"):
        merge_(tuned, "masked")
    assert bits(unload_(tuned)) == before


def test_another_merge_is_refused():
    tuned = trained(holes(llama()))
    with pytest.raises(InvalidConfig, match=r"Unknown merge 'none'; supported: 'masked', 'remask', 'plain'"):
        merge_(tuned, "none")


@pytest.mark.parametrize("name", ["llama-tied-biased", "opt", "t5", "llava", "layers"])
def test_unload_gives_the_model_back_bit_for_bit(name):
    model = PRUNED[name]()
    before, described, values = state(model), model.config.to_dict(), bits(model)
    assert unload_(trained(model)) is model
    assert bits(model) == values
    assert_plain(model, before, described)


def test_it_can_be_attached_again():
    model = holes(llama())
    masks = masks_of(model)
    for seed in range(2):
        merge_(trained(model, seed=seed), "masked")
    assert_same_masks(model, masks)


# The adapter on disk


@pytest.mark.parametrize("name", ["structured", "structured t5", "llava"])
def test_a_saved_adapter_is_one_of_pefts(name, tmp_path):
    model = unevenly(llava()) if name == "llava" else PRUNED[name]()
    save_checkpoint(model, tmp_path / "base")
    tuned = trained(model)
    tuned.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(tmp_path / "base")[0], str(tmp_path / "adapter"))
    assert torch.equal(logits(again, model), logits(tuned, model))


def test_masks_are_no_part_of_it(tmp_path):
    """Plain PEFT then computes the update without its mask."""
    model = holes(llama())
    save_checkpoint(model, tmp_path / "base")
    tuned = trained(model)
    assert not any("mask" in name for name, _ in tuned.named_buffers())
    assert {name.rpartition(".")[0] for name in tuned.state_dict()} >= {
        name.rpartition(".")[0] for name in adapter(tuned)
    }
    tuned.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(tmp_path / "base")[0], str(tmp_path / "adapter"))
    assert adapter(again).keys() == adapter(tuned).keys()
    assert all(torch.equal(factor, adapter(tuned)[name]) for name, factor in adapter(again).items())
    assert not torch.allclose(logits(again, model), logits(tuned, model), atol=1e-3)
    unmasked = trained(holes(llama()), merge="none")
    assert torch.equal(logits(again, model), logits(unmasked, model))


# Gradients


@pytest.fixture
def parts():
    """Return x (3, 5, 6), a linear from 6 to 4 with zeros, and A and B of rank 2, in float64."""
    generator = torch.Generator().manual_seed(0)
    x, A, B = (torch.randn(shape, generator=generator).double() for shape in [(3, 5, 6), (2, 6), (4, 2)])
    linear = torch.nn.Linear(6, 4, dtype=torch.float64).requires_grad_(False)
    linear.weight[torch.rand(4, 6, generator=generator) < 0.5] = 0
    return x.requires_grad_(), linear, A.requires_grad_(), B.requires_grad_()


@pytest.mark.parametrize("base", [True, False])
def test_gradients_are_those_of_the_plain_formula(parts, base):
    x, linear, A, B = parts
    delta = 0.7 * (B @ A) * (linear.weight != 0)
    plain = F.linear(x, linear.weight + delta, linear.bias) if base else F.linear(x, delta)
    found = masked_linear(x, linear, A, B, 0.7, base=base)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).double()
    expected = torch.autograd.grad((plain * weights).sum(), [x, A, B])
    for got, want in zip(torch.autograd.grad((found * weights).sum(), [x, A, B]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_an_input_that_requires_no_gradient(parts):
    x, linear, A, B = parts
    masked_linear(x.detach(), linear, A, B, 0.7).sum().backward()
    assert A.grad is not None and B.grad is not None and x.grad is None


def test_no_sum_as_large_as_the_weight_is_kept(parts):
    x, linear, A, B = parts
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        masked_linear(x, linear, A, B, 0.7)
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() == linear.weight.numel()] == [
        linear.weight.data_ptr()
    ]


def test_autocast(parts):
    x, linear, A, B = parts
    linear = linear.float()
    A, B = (factor.detach().float().requires_grad_() for factor in (A, B))
    x = x.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = masked_linear(x, linear, A, B, 0.7)
        merged = linear.weight + 0.7 * (B.detach().double() @ A.detach().double()).float() * (linear.weight != 0)
        assert torch.equal(found, F.linear(x, merged, linear.bias))
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    expected = torch.autograd.grad(masked_linear(x, linear, A, B, 0.7).sum(), [x, A, B])
    for leaf, want in zip([x, A, B], expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, want, rtol=0.05, atol=0.05)


def test_dropout_is_of_what_the_update_reads_alone():
    model = holes(llama())
    tuned = trained(model, dropout=0.999999).train()
    module, x = layer(tuned), torch.randn(2, 48)
    assert torch.equal(module(x), module.base_layer(x))
    expected = x @ (module.base_layer.weight + module.get_delta_weight("default")).T
    torch.testing.assert_close(module.eval()(x), expected, rtol=1e-5, atol=1e-5)
    tuned = trained(holes(llama()), dropout=0.5).train()
    module, x = layer(tuned), torch.randn(2, 48)
    torch.manual_seed(0)
    update = module(x) - module.base_layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(update, F.dropout(x, 0.5) @ module.get_delta_weight("default").T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "reentrant"), [("llama-gqa", False), ("opt", True), ("t5", True), ("llava", False), ("llava", True)]
)
def test_every_update_moves_with_gradient_checkpointing(name, reentrant, tmp_path):
    model = holes(VARIANTS[name]())
    masks = masks_of(model)
    tuned = attach(model, RecoveryConfig(rank=2))
    before = adapter(tuned)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    train(tuned, model, tmp_path, max_steps=2, **options)
    after = adapter(tuned)
    assert len(after) == 2 * len(target_modules(VARIANTS[name](), RecoveryConfig()))
    assert [factor for factor in after if torch.equal(after[factor], before[factor])] == []
    assert hooks(model)
    merge_(tuned, "masked")
    assert not hooks(model)
    assert masks_of(model).keys() >= masks.keys()
    assert all(torch.equal(masks_of(model)[name], mask) for name, mask in masks.items())


def hooks(model):
    """Return those by which transformers makes outputs of embeddings require a gradient."""
    found = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return [hook for hook in found if "require_grad" in getattr(hook, "__name__", "")]


def train(tuned, model, folder, **options):
    given = inputs(model, batch=4)
    labels = given.pop("decoder_input_ids") if model.config.is_encoder_decoder else given["input_ids"]
    rows: Any = [{name: tensor[i] for name, tensor in (given | {"labels": labels}).items()} for i in range(4)]
    args = TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", **options)
    Trainer(tuned, args, train_dataset=rows).train()


def test_checkpoints_compute_the_same_gradients():
    def gradients(checkpointing):
        model = holes(llama())
        tuned = trained(model).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        ids = tokens()
        tuned(input_ids=ids, labels=ids).loss.backward()
        return {name: parameter.grad for name, parameter in tuned.named_parameters() if parameter.requires_grad}

    expected = gradients(False)
    for name, gradient in gradients(True).items():
        torch.testing.assert_close(gradient, expected[name])


# Refusals


def wrapped(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def adapted(model):
    get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    return model


def damaged(damage):
    def apply(model):
        damage(model)
        return model

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrapped, "PeftModel has PEFT adapters already \\(default\\). Merge them or unload them"),
        (adapted, "LlamaForCausalLM has PEFT adapters already"),
        (damaged(quantised), r"layers\.1\.mlp\.up_proj is a .*int8.*not a plain linear"),
        (damaged(on_meta), "is not in memory"),
        (damaged(shared), "is shared between"),
        (damaged(nan_weight), "holds NaN"),
        (lambda model: model.half(), r"layers\.0\.self_attn\.\w+\.weight is float16 on a CPU.*bfloat16 or float32"),
    ],
    ids=["PeftModel", "injected", "quantised", "meta", "shared", "nan", "float16"],
)
def test_what_cannot_be_trained_is_refused_by_name(spoil, message):
    model = spoil(holes(llama()))
    before = [name for name, _ in model.named_modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(UnsupportedModel, match=message):
        attach(model, RecoveryConfig())
    assert [name for name, _ in model.named_modules()] == before
    assert [parameter.requires_grad for parameter in model.parameters()] == flags


def test_a_model_without_a_head(tmp_path):
    save_checkpoint(unevenly(llama()), tmp_path)
    model, _ = load(tmp_path, AutoModel)
    tuned = attach(model, RecoveryConfig(rank=2))
    assert type(tuned) is PeftModel
    assert merge_(tuned, "masked") is model


def test_a_model_that_came_from_a_gguf_is_no_quantised_one():
    model = llama()
    model.config.quantization_config = {"quant_method": "gguf"}
    setattr(model, "is_quantized", True)  # noqa: B010 - an attribute that transformers declares nowhere
    unload_(attach(model, RecoveryConfig()))
    assert not model.is_quantized and not hasattr(model.config, "quantization_config")  # pyright: ignore
