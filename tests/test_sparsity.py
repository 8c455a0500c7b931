"""Masks are zeros: read back, and put on another model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from optimum_prune import Pruner, PruningConfig
from optimum_prune.binding import named_linears
from optimum_prune.errors import InvalidConfig, UnsupportedModel
from optimum_prune.sparsity import apply_masks_, masks_of
from tests.models import VARIANTS, llama, llava, t5
from tests.pruned import holes

DOWN = "model.layers.1.mlp.down_proj"


def halves():
    return PruningConfig(pattern="unstructured", scorer="magnitude", sparsity=0.5)


def down(model):
    return named_linears(model)[DOWN].weight


def record(pattern, *previous):
    """Return what a config holds of prunings by these patterns, the latest first."""
    return {"recipe": {"pattern": pattern}, "previous": [{"recipe": {"pattern": earlier}} for earlier in previous]}


# Reading them


def test_zeros_are_masks():
    model = llama()
    model.config.pruning_config = record("unstructured")
    with torch.no_grad():
        down(model)[3, 5] = 0
        down(model)[4, 6] = -0.0
    masks = masks_of(model)
    assert masks.keys() == {DOWN}
    assert masks[DOWN].dtype == torch.bool and masks[DOWN].shape == (32, 48)
    assert (~masks[DOWN]).nonzero().tolist() == [[3, 5], [4, 6]]


def test_a_dense_model_has_none():
    assert masks_of(llama()) == {}


@pytest.mark.parametrize(
    ("described", "kept"),
    [
        (None, False),  # dequantised, and not pruned
        (record("structured"), False),
        (record("layers", "structured"), False),
        (record("unstructured"), True),
        (record("2:4"), True),
        (record("structured", "2:4"), True),  # zeros first, then units
        (record("structured") | {"layout": "padded"}, True),
    ],
)
def test_few_zeros_are_kept_where_the_record_says_that_pruning_made_them(described, kept):
    model = holes(llama(), sparsity=0.125)
    if described is not None:
        model.config.pruning_config = described
    assert masks_of(model).keys() == (named_linears(model).keys() if kept else set())


@pytest.mark.parametrize("described", [None, record("structured")])
def test_many_zeros_are_those_of_others(described):
    """A quarter of all weights, or of one linear's."""
    model = holes(llama(), sparsity=0.3)
    with torch.no_grad():
        down(model)[down(model) == 0] = 1
        down(model)[0, 0] = 0
    model.config.pruning_config = described
    assert masks_of(model).keys() == named_linears(model).keys()
    model = holes(llama(), sparsity=0.1)
    model.config.pruning_config = described
    with torch.no_grad():
        down(model)[:, ::3] = 0
    assert masks_of(model).keys() == {DOWN}


def test_the_record_of_a_run_tells(tmp_path):
    """Of a model with zeros by chance, in memory and loaded again."""
    for config, kept in ((PruningConfig(scorer="magnitude", sparsity=0.3), False), (halves(), True)):
        pruner = Pruner(holes(llama(), sparsity=0.1))
        pruner.prune(config)
        pruner.save_pretrained(tmp_path / "it")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "it")
        assert bool(pruner.masks()) == bool(masks_of(again)) == kept


@pytest.mark.parametrize("name", VARIANTS)
def test_every_linear_of_every_stack_is_seen(name):
    model = holes(VARIANTS[name]())
    assert list(masks_of(model)) == list(named_linears(model))


def test_pruner_gives_them_and_a_saved_checkpoint_has_them(tmp_path):
    pruner = Pruner(llama())
    assert pruner.masks() == {}
    pruner.prune(halves())
    masks = pruner.masks()
    assert {name: int(mask.sum()) / mask.numel() for name, mask in masks.items()} == dict.fromkeys(
        named_linears(pruner.model), 0.5
    )
    pruner.save_pretrained(tmp_path / "it")
    again = masks_of(AutoModelForCausalLM.from_pretrained(tmp_path / "it", dtype=torch.bfloat16))
    assert again.keys() == masks.keys()
    assert all(torch.equal(again[name], mask) for name, mask in masks.items())


def test_weights_that_are_not_there():
    with torch.device("meta"):
        model = llama()
    with pytest.raises(UnsupportedModel, match=r"k_proj\.weight is not in memory .* zeros cannot be seen"):
        masks_of(model)


# Applying them


def test_other_weights_stay():
    masks = masks_of(holes(llama()))
    model, before = llama(seed=1), llama(seed=1)
    apply_masks_(model, {DOWN: masks[DOWN]})
    weight = down(model)
    assert torch.equal(masks_of(model)[DOWN], masks[DOWN])
    assert torch.equal(weight, torch.where(masks[DOWN], down(before), 0))
    assert not weight[~masks[DOWN]].signbit().any()
    assert weight.requires_grad
    for (name, one), two in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(one, two) == (name != f"{DOWN}.weight")


@pytest.mark.parametrize("build", [t5, llava])
def test_masks_of_one_model_fit_another(build):
    model, pruned = build(seed=1), holes(build())
    apply_masks_(model, masks_of(pruned))
    assert all(torch.equal(mask, masks_of(model)[name]) for name, mask in masks_of(pruned).items())


@pytest.mark.parametrize(
    ("name", "mask", "message"),
    [
        (DOWN, torch.ones(48, 32, dtype=torch.bool), r"down_proj must be bool of shape \[32, 48\] .* shape \[48, 32\]"),
        (DOWN, torch.ones(32, 48), r"must be bool of shape .* got torch\.float32 of shape \[32, 48\]"),
        (DOWN + ".weight", torch.ones(32, 48, dtype=torch.bool), rf"Unknown linear .* Did you mean '{DOWN}'"),
    ],
)
def test_masks_that_do_not_fit_change_nothing(name, mask, message):
    model = llama()
    good = torch.zeros(48, 32, dtype=torch.bool)
    with pytest.raises(InvalidConfig, match=message):
        apply_masks_(model, {"model.layers.0.mlp.up_proj": good, name: mask})
    assert masks_of(model) == {}


def test_weights_that_cannot_change():
    with torch.inference_mode():
        model = llama()
    with pytest.raises(UnsupportedModel, match="inference_mode"):
        apply_masks_(model, {DOWN: torch.zeros(32, 48, dtype=torch.bool)})
