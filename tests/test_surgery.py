"""Slicing one group. What holds for every architecture is in adapters/test_contracts.py."""

import pytest
import torch

from optimum_prune.binding import bind
from optimum_prune.errors import InvalidConfig
from optimum_prune.surgery import slice_
from tests.models import llama


@pytest.fixture
def model():
    return llama(attention_bias=True, mlp_bias=True)


def group_of(model, unit, layer=1):
    return next(group for group in bind(model) if group.unit == unit and group.layer == layer)


def test_mlp_channels(model):
    mlp = model.model.layers[1].mlp
    before = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    slice_(group_of(model, "mlp_channel"), [0, 5, 47])
    rows = torch.tensor([0, 5, 47])
    for name in ("gate_proj", "up_proj"):
        assert torch.equal(mlp.state_dict()[f"{name}.weight"], before[f"{name}.weight"][rows])
        assert torch.equal(mlp.state_dict()[f"{name}.bias"], before[f"{name}.bias"][rows])
    assert torch.equal(mlp.down_proj.weight, before["down_proj.weight"][:, rows])
    assert torch.equal(mlp.down_proj.bias, before["down_proj.bias"])
    assert (mlp.intermediate_size, mlp.gate_proj.out_features, mlp.down_proj.in_features) == (3, 3, 3)


def test_kv_groups_take_their_query_heads_along(model):
    attention = model.model.layers[1].self_attn
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    slice_(group_of(model, "kv_group"), torch.tensor([1, 3]))
    kv = torch.tensor([*range(4, 8), *range(12, 16)])  # heads of 4 rows
    queries = torch.tensor([*range(8, 16), *range(24, 32)])  # two query heads to a group
    for name, rows in (("k_proj", kv), ("v_proj", kv), ("q_proj", queries)):
        assert torch.equal(attention.state_dict()[f"{name}.weight"], before[f"{name}.weight"][rows])
        assert torch.equal(attention.state_dict()[f"{name}.bias"], before[f"{name}.bias"][rows])
    assert torch.equal(attention.o_proj.weight, before["o_proj.weight"][:, queries])
    assert torch.equal(attention.o_proj.bias, before["o_proj.bias"])
    assert (attention.num_key_value_groups, attention.head_dim) == (2, 4)


def test_other_groups_are_left_alone(model):
    before = dict(model.named_parameters())
    slice_(group_of(model, "kv_group"), [0])
    changed = {name for name, parameter in model.named_parameters() if parameter is not before[name]}
    kinds = {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"}
    assert changed == {f"model.layers.1.self_attn.{kind}" for kind in kinds | {"o_proj.weight"}}


def test_cuts_compose(model):
    twice, once = (
        group_of(model, "mlp_channel", 0),
        group_of(llama(attention_bias=True, mlp_bias=True), "mlp_channel", 0),
    )
    slice_(twice, [1, 2, 3, 10, 20])
    slice_(twice, [0, 3])
    slice_(once, [1, 10])
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(twice.linears, once.linears, strict=True))


def test_the_old_storage_is_let_go(model):
    group = group_of(model, "mlp_channel")
    slice_(group, [0, 1])
    for linear in group.linears:
        assert linear.weight.untyped_storage().nbytes() == linear.weight.numel() * 4


def test_old_gradients_are_dropped(model):
    group = group_of(model, "mlp_channel")
    for linear in group.linears:
        linear.weight.grad = torch.ones_like(linear.weight)
    slice_(group, [0, 1])
    assert all(linear.weight.grad is None and linear.weight.is_leaf for linear in group.linears)


@pytest.mark.parametrize("kept", [[], [-1, 0], [4], [2, 1], [1, 1]], ids=str)
def test_refuses_other_than_sorted_units(model, kept):
    before = dict(model.named_parameters())
    with pytest.raises(InvalidConfig, match=r"model\.layers\.1\.self_attn has units 0 to 3; kept must be sorted"):
        slice_(group_of(model, "kv_group"), kept)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
