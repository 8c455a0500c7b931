"""The only code that cuts: slice the units of a bound group out of its linears."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from optimum_prune.binding import BoundGroup
from optimum_prune.errors import InvalidConfig


def slice_(group: BoundGroup, kept: Sequence[int] | Tensor) -> None:
    """Keep some units of a group and drop the rest, in place.

    Dtype, device, `requires_grad`, training mode, biases and the module objects themselves stay; the parameters are new
    objects, so an optimizer made before holds the old ones. Gradients are dropped. Works on meta tensors too.

    Args:
        group: any bound group.
        kept: sorted indices of the units to keep, int64, at least one.
    """
    # On the CPU whatever the default device: transformers loads models under `torch.device("meta")`.
    kept = torch.as_tensor(kept, dtype=torch.int64, device="cpu")
    units = group.num_units
    if kept.numel() == 0 or kept[0] < 0 or kept[-1] >= units or (kept.diff() <= 0).any():
        raise InvalidConfig(f"{group.name} has units 0 to {units - 1}; kept must be sorted, unique and not empty.")
    if len(kept) == units:
        return
    widths = {linear: linear.weight.shape[0] for linear in group.writers}
    # All indices are computed before the first cut: num_units is read off the linears that are about to change.
    for linear, rows in widths.items():
        index = _positions(kept, units, rows)
        linear.weight = _cut(linear.weight, 0, index)
        if linear.bias is not None:
            linear.bias = _cut(linear.bias, 0, index)
        linear.out_features = len(index)
    for linear in group.readers:
        index = _positions(kept, units, linear.weight.shape[1])
        linear.weight = _cut(linear.weight, 1, index)
        linear.in_features = len(index)
    repeats = dict.fromkeys(group.group.width_attributes, group.writers[0].out_features)
    repeats |= dict.fromkeys(group.group.unit_attributes, group.num_units)
    for path, value in repeats.items():
        parent, _, attribute = path.rpartition(".")
        setattr(group.block.get_submodule(parent), attribute, value)


def _positions(kept: Tensor, units: int, width: int) -> Tensor:
    """Rows or columns of the kept units on an axis of `width`, cut into `units` equal contiguous blocks."""
    block = width // units
    return (kept[:, None] * block + torch.arange(block, device="cpu")).flatten()


@torch.no_grad()
def _cut(parameter: Tensor, dim: int, index: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.index_select(dim, index.to(parameter.device)), requires_grad=parameter.requires_grad)
