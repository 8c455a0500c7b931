"""Biases of linears that a class builds without one: how they come about, and what a config says of them.

Some configs have a switch that gives all linears of a kind a bias (Llama's `attention_bias`). What no switch says is
written by layer, as sizes are that differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from optimum_prune.binding import BoundGroup, bind
from optimum_prune.configs import stack_config

if TYPE_CHECKING:
    # Not at run time: importing transformers' models registers the plugin, and the plugin needs this file.
    from transformers import PreTrainedModel

EXTRA = "extra_biases"
"""Where a layer's sizes name its linears, relative to the block, that have a bias which their class does not build."""

Switch = tuple[str, str]
"""Sub-config of a stack, and its attribute that says whether linears of a kind have biases."""


def add_(linear: nn.Linear) -> None:
    """Give a linear a bias of zeros, if it has none. Works on meta tensors too."""
    if not has_bias(linear):
        zeros = linear.weight.new_zeros(len(linear.weight))
        linear.bias = nn.Parameter(zeros, requires_grad=linear.weight.requires_grad)


def remove_(linear: nn.Linear) -> None:
    """Take the bias of a linear away."""
    linear.register_parameter("bias", None)


def has_bias(linear: nn.Linear) -> bool:
    """Tell whether a linear has a bias."""
    return linear._parameters["bias"] is not None


def without(model: PreTrainedModel) -> list[nn.Linear]:
    """Return all linears of coupled groups that have no bias."""
    return [linear for group in bind(model) for linear in group.linears if not has_bias(linear)]


@contextmanager
def only_for_now(model: PreTrainedModel) -> Iterator[None]:
    """Take away on the way out what biases were created meanwhile."""
    bare = without(model)
    try:
        yield
    finally:
        for linear in bare:
            remove_(linear)


def settle_(model: PreTrainedModel, bare: Sequence[nn.Linear]) -> bool:
    """Make biases that were created ones like any other; tell whether there are any. Call `describe_` afterwards.

    Args:
        model: holds the linears.
        bare: the linears that had no bias before.
    """
    created = [linear for linear in bare if has_bias(linear)]
    if created:
        for linear in created:
            linear.bias.requires_grad_(linear.weight.requires_grad)  # not so while the model was frozen
        complete_(model)
    return bool(created)


def switches(model: PreTrainedModel) -> dict[Switch, bool]:
    """Measure all switches on the live modules: on where every linear that one is for has a bias."""
    found: dict[Switch, bool] = {}
    for switch, group in _switched(model):
        found[switch] = found.get(switch, True) and all(map(has_bias, group.linears))
    return found


def extra(group: BoundGroup, on: Mapping[Switch, bool]) -> list[str]:
    """Return the linears of a group, relative to the block, that have a bias which their class does not build.

    Args:
        group: any bound group.
        on: as `switches` measures it.
    """
    paths, built = group.group.writers + group.group.readers, group.group.biases
    if isinstance(built, str):
        built = paths if on.get((group.declared.config, built)) else ()
    linears = zip(paths, group.linears, strict=True)
    return [path for path, linear in linears if has_bias(linear) and path not in built]


def complete_(model: PreTrainedModel) -> None:
    """Where some linears of a kind have biases, and a switch could say that all have, give zeros to the others."""
    switched = _switched(model)
    begun = {switch for switch, group in switched if any(map(has_bias, group.linears))}
    for switch, group in switched:
        if switch in begun:
            for linear in group.linears:
                add_(linear)


def _switched(model: PreTrainedModel) -> Sequence[tuple[Switch, BoundGroup]]:
    """Find the groups that a switch goes for. One that the config does not have was declared of another class."""
    declared = [(group, group.group.biases, group.declared.config) for group in bind(model)]
    return [
        ((own, name), group)
        for group, name, own in declared
        if isinstance(name, str) and hasattr(stack_config(model.config, group.declared), name)
    ]
