"""Padded weights: every layer as wide as the widest, what is missing zero, so that plain transformers loads them.

Zeros are exact. A padded MLP channel is multiplied by columns of zeros; a padded head reads values of zero, through
columns of zeros. Training keeps them so: neither side of such a unit gets a gradient while the other is zero.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from optimum_prune.adapters.base import Stack
from optimum_prune.binding import BoundGroup, adapter_for, bind, stacks
from optimum_prune.configs import assign, make_plain_, stack_config
from optimum_prune.errors import InvalidConfig, UnsupportedModel
from optimum_prune.sizes import build_skeleton, refusal


def pad(model: PreTrainedModel, state: Mapping[str, Tensor] | None = None) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Widen every layer of a model to the widest.

    Args:
        model: its config describes it; neither is changed.
        state: its weights, where they are not in the model itself.

    Returns:
        A skeleton of the model's class, with a plain config, and the weights for it. Those that need no padding are
        the model's own, not copies.

    Raises:
        InvalidConfig: no plain config of that class has room for every layer.
        UnsupportedModel: a weight is not in memory.
    """
    skeleton = wide_skeleton(model)
    small, wide = state or model.state_dict(), skeleton.state_dict()
    if absent := [name for name, tensor in small.items() if tensor.is_meta]:
        raise UnsupportedModel(
            f"{absent[0]} is not in memory (meta device: offloaded, or never loaded), so nothing can be padded. Save "
            "with layout='compact', or load with a device_map that keeps every layer on a CPU or GPU."
        )
    nothing = torch.empty(0, dtype=model.dtype, device=model.device)
    padded: dict[str, Tensor] = {}
    for name, tensor in logging.tqdm(wide.items(), desc="Padding weights", delay=2):
        # Of a skipped sub-layer there is nothing; a whole one of zeros adds as little to the residual stream.
        padded[name] = _widened(small[name], tensor.shape) if name in small else nothing.new_zeros(tensor.shape)
    return skeleton, padded


def _widened(weight: Tensor, shape: torch.Size) -> Tensor:
    """Put a weight into the corner of zeros of another shape: kept units are the first ones of their axis."""
    if weight.shape == shape:
        return weight
    wide = weight.new_zeros(shape)
    wide[tuple(slice(0, width) for width in weight.shape)] = weight.detach()
    return wide


def wide_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Build the narrowest model of the class, on the meta device, whose config is plain and which has room for all.

    Of head counts, a class may refuse many (Llama: hidden_size % heads); what the config says globally it takes.

    Raises:
        InvalidConfig: no plain config of that class has room for every layer.
    """
    config = copy.deepcopy(model.config)
    make_plain_(config, [found.stack for found in stacks(model, adapter_for(model))])
    skeleton, reason = _try(model, config)
    for stack, widest in _cautious(model):
        own = stack_config(config, stack)
        given = {name: getattr(own, name) for name in widest.group.counts}
        units = next(iter(given.values()))
        # Counts of channels are too many to try them all.
        candidates = range(widest.num_units, units) if widest.unit == "kv_group" else [widest.num_units]
        for count in candidates:
            narrow = copy.deepcopy(config)
            assign([stack_config(narrow, stack)], {name: count * of // units for name, of in given.items()})
            found, reason_narrow = _try(model, narrow)
            if reason_narrow is None:
                config, skeleton, reason = narrow, found, None
                break
    if skeleton is None or reason is not None:
        raise InvalidConfig(
            f"layout='padded' is not possible: no plain config of {type(model).__name__} has room for every layer "
            f"({reason}). Use layout='compact'."
        )
    return skeleton


def _cautious(model: PreTrainedModel) -> Iterator[tuple[Stack, BoundGroup]]:
    """Find the widest group of every kind of which the config's global counts may exceed every layer's."""
    widest: dict[tuple[str, str], BoundGroup] = {}
    for group in bind(model):
        key = (group.declared.config, group.unit)
        if group.group.keep_global and (key not in widest or group.num_units > widest[key].num_units):
            widest[key] = group
    return ((group.declared, group) for group in widest.values())


def _try(model: PreTrainedModel, config: PreTrainedConfig) -> tuple[PreTrainedModel | None, str | None]:
    """Build a skeleton of a config; return it and None, or also the reason why the model does not fit into it."""
    try:
        skeleton = build_skeleton(type(model), type(config).from_dict(config.to_dict()))
    except Exception as error:  # a class may refuse a config in any way it likes
        return None, refusal(error)
    return skeleton, _misfit(model, skeleton)


def _misfit(model: PreTrainedModel, skeleton: PreTrainedModel) -> str | None:
    """Say which of a model's tensors does not go into the corner of the skeleton's, or None."""
    live = {group.name: group for group in bind(model)}
    axes: dict[str, int] = {}
    skipped: list[str] = []
    for group in bind(skeleton):
        small = live.get(group.name)
        if small is None:
            skipped.append(f"{group.name}.")
        elif _blocks(small) != _blocks(group):
            return f"a unit of {group.name} would have {_blocks(group)} rows and columns, not {_blocks(small)}"
        else:
            axes |= _axes(group)
    have = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wide = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    for name in sorted(have.keys() | wide.keys()):
        if name not in have and name.startswith(tuple(skipped)):
            continue
        if name not in have or name not in wide:
            return f"{name} would be {'too many' if name in wide else 'missing'}"
        if not _has_room(wide[name], have[name], axes.get(name)):
            return f"{name} would be {list(wide[name])}, but is {list(have[name])}"
    return None


def _has_room(wide: torch.Size, small: torch.Size, axis: int | None) -> bool:
    return len(wide) == len(small) and all(
        have == room or (dim == axis and have < room) for dim, (have, room) in enumerate(zip(small, wide, strict=True))
    )


def _blocks(group: BoundGroup) -> list[int]:
    """Return how many rows or columns one unit has in each linear of a group."""
    widths = [linear.weight.shape[0] for linear in group.writers] + [linear.weight.shape[1] for linear in group.readers]
    return [width // group.num_units for width in widths]


def _axes(group: BoundGroup) -> dict[str, int]:
    """Return, by name of a tensor, the axis that carries the units."""
    names: Any = group.linear_names
    writers, readers = names[: len(group.writers)], names[len(group.writers) :]
    rows = {f"{name}.{kind}": 0 for name in writers for kind in ("weight", "bias")}
    columns = {f"{name}.weight": 1 for name in [*readers, *(name for name, _ in group.named_tables)]}
    return rows | columns
