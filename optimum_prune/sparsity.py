"""Masks as objects of use: read off a model's zeros, and put on another model.

A pruned model is dense: its masked weights are zeros like any others. So its zeros are its masks, and a saved
checkpoint needs no more than them. Zeros that are there by chance are no mask: of weights that were quantised to 4 bits
and dequantised again, about an eighth is zero.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.binding import bind, check_prunable, named_linears
from optimum_prune.errors import InvalidConfig, UnsupportedModel, unknown

SUBSTANTIAL = 0.25
"""Share of zeros from which on weights without a record count as pruned: twice what 4 bits leave by chance."""


def pruned_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Find the linears whose zeros were made by pruning, by module path.

    Where the record of this or an earlier pruning says that single weights were set to zero, or that the checkpoint is
    padded, these are all linears that hold a zero. Else others may have pruned the model: then they are the linears of
    which a quarter of the weights are zero, or all with a zero where a quarter of the weights of all linears are.

    Raises:
        UnsupportedModel: the modules are not those of the adapter, or a weight is not in memory.
    """
    linears = named_linears(model)
    for name, linear in linears.items():
        if linear.weight.is_meta:
            raise UnsupportedModel(f"{name}.weight is not in memory (meta device), so its zeros cannot be seen.")
    zeros = {name: linear.weight.numel() - int(linear.weight.count_nonzero()) for name, linear in linears.items()}
    total = sum(linear.weight.numel() for linear in linears.values())
    everywhere = _records_zeros(model.config) or sum(zeros.values()) >= SUBSTANTIAL * total
    return {
        name: linear
        for name, linear in linears.items()
        if zeros[name] and (everywhere or zeros[name] >= SUBSTANTIAL * linear.weight.numel())
    }


def _records_zeros(config: Any) -> bool:
    """Tell whether the record of a model's prunings says that zeros were made, or that there is padding."""
    record = getattr(config, "pruning_config", None) or {}
    patterns = [one.get("recipe", {}).get("pattern") for one in (record, *record.get("previous", ()))]
    return record.get("layout") == "padded" or any(p not in (None, "structured", "layers") for p in patterns)


def masks_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Read the masks of a model off its zeros.

    Args:
        model: a transformers model of a supported architecture, with plain weights.

    Returns:
        Module path of a linear -> `(d_out, d_in) bool`, True = kept, on the weight's device. Linears without a zero
        have no mask, nor have those whose zeros are there by chance; see `pruned_linears`.

    Raises:
        UnsupportedModel: the modules are not those of the adapter, or a weight is not in memory.
    """
    return {name: linear.weight.detach() != 0 for name, linear in pruned_linears(model).items()}


@torch.no_grad()
def apply_masks_(model: PreTrainedModel, masks: Mapping[str, Tensor]) -> None:
    """Set the weights to zero that masks remove, in place. Nothing is changed if one mask does not fit.

    Args:
        model: of the architecture that the masks are for.
        masks: as from `masks_of`: module path of a linear -> `(d_out, d_in) bool`, True = kept.

    Raises:
        InvalidConfig: a mask of a linear that the model does not have, or of another shape or dtype.
        UnsupportedModel: a weight that cannot be pruned.
    """
    for linear, removed in match(model, masks):
        linear.weight.masked_fill_(removed, 0)


def match(model: PreTrainedModel, masks: Mapping[str, Tensor]) -> list[tuple[nn.Linear, Tensor]]:
    """Find the linear of every mask, and check that all fit.

    Returns:
        The linear, and what is removed of it: `(d_out, d_in) bool`, on its device.

    Raises:
        PruningError: as `apply_masks_`.
    """
    found = named_linears(model)
    for name, mask in masks.items():
        if name not in found:
            raise InvalidConfig(unknown("linear", name, found))
        shape = found[name].weight.shape
        if mask.dtype != torch.bool or mask.shape != shape:
            raise InvalidConfig(
                f"The mask of {name} must be bool of shape {list(shape)} (True = kept), got {mask.dtype} of shape "
                f"{list(mask.shape)}."
            )
    check_prunable(model, [group for group in bind(model) if masks.keys() & set(group.linear_names)])
    return [(found[name], ~mask.to(found[name].weight.device)) for name, mask in masks.items()]
