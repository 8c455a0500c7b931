"""Masks as objects of use: read off a model's zeros, and put on another model.

A pruned model is dense: its masked weights are zeros like any others. So its zeros are its masks, and a saved
checkpoint needs no more than them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.binding import bind, check_prunable, named_linears
from optimum_prune.errors import InvalidConfig, UnsupportedModel, unknown


def masks_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Read the masks of a model off its zeros.

    Args:
        model: a transformers model of a supported architecture, with plain weights.

    Returns:
        Module path of a linear -> `(d_out, d_in) bool`, True = kept, on the weight's device. Linears without a zero
        have no mask. A zero that a dense checkpoint holds by chance looks like any other.

    Raises:
        UnsupportedModel: the modules are not those of the adapter, or a weight is not in memory.
    """
    found = {}
    for name, linear in named_linears(model).items():
        if linear.weight.is_meta:
            raise UnsupportedModel(f"{name}.weight is not in memory (meta device), so its zeros cannot be seen.")
        mask = linear.weight.detach() != 0
        if not mask.all():
            found[name] = mask
    return found


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
