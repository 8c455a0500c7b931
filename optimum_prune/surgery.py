"""The only code that cuts: slice units out of the linears of a group, drop blocks, skip sub-layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from optimum_prune.binding import BoundGroup, BoundStack, adapter_for, stacks
from optimum_prune.configs import keep_layers_, layer_types, stack_config, stack_configs
from optimum_prune.errors import InvalidConfig, PruningError
from optimum_prune.skipping import STAND_INS, leaders, skipped, why_not_skip

if TYPE_CHECKING:
    # Not at run time: importing transformers' models registers the plugin, and the plugin needs this file.
    from transformers import PreTrainedModel


@contextmanager
def cutting() -> Iterator[None]:
    """Say of any error, a user's Ctrl-C too, that it came between the first cut and the last."""
    try:
        yield
    except BaseException as error:
        raise PruningError(
            f"Pruning was interrupted between the first cut and the last ({error!r}): the model is partly pruned. "
            "Load it again."
        ) from error


@contextmanager
def kept_aside(weights: Sequence[Tensor], *, always: bool = True) -> Iterator[None]:
    """Put weights back after a while, changed in place meanwhile: always, or only after an error."""
    copies = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def put_back() -> None:
        for weight, copy in zip(weights, copies, strict=True):
            weight.copy_(copy)

    try:
        yield
    except BaseException as error:
        put_back()
        if type(error) is PruningError and error.__cause__ is not None:
            raise error.__cause__ from None  # of `cutting`, which says that the model is partly pruned
        raise
    if always:
        put_back()


@torch.no_grad()
def hide_(group: BoundGroup, kept: Tensor) -> None:
    """Set what reads the other units to zero, in place: the model then computes what it will when they are gone.

    Args:
        group: any bound group.
        kept: sorted indices of the units to keep, int64.
    """
    for linear in group.readers:
        width = linear.weight.shape[1]
        shown = torch.zeros(width, dtype=torch.bool, device="cpu")
        shown[positions(kept, group.num_units, width)] = True
        linear.weight.masked_fill_(~shown.to(linear.weight.device), 0)


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
    tables = group.tables
    # All indices are computed before the first cut: num_units is read off the linears that are about to change.
    for linear, rows in widths.items():
        index = positions(kept, units, rows)
        linear.weight = _cut(linear.weight, 0, index)
        if linear.bias is not None:
            linear.bias = _cut(linear.bias, 0, index)
        linear.out_features = len(index)
    for linear in group.readers:
        index = positions(kept, units, linear.weight.shape[1])
        linear.weight = _cut(linear.weight, 1, index)
        linear.in_features = len(index)
    for table in tables:
        table.weight = _cut(table.weight, 1, kept)
        table.embedding_dim = len(kept)
    repeats = dict.fromkeys(group.group.width_attributes, group.writers[0].out_features)
    repeats |= dict.fromkeys(group.group.unit_attributes, group.num_units)
    for path, value in repeats.items():
        parent, _, attribute = path.rpartition(".")
        setattr(group.block.get_submodule(parent), attribute, value)


def drop_(model: PreTrainedModel, found: BoundStack, kept: Sequence[int]) -> None:
    """Keep some blocks of a stack and drop the rest, in place, and make the configs count them.

    The result equals the old model with the output projections of the dropped blocks set to zero (where norms come
    first). Call `describe_` afterwards: sizes that differ by layer are still written under the old numbers.

    Args:
        model: holds the stack.
        found: any stack of `model` that has a `depth`.
        kept: sorted indices of the blocks to keep, at least one.
    """
    blocks, stack, kept = found.blocks, found.stack, list(kept)
    own = stack_config(model.config, stack)
    if stack.depth is None:
        raise InvalidConfig(
            f"Blocks of {found.path} cannot be dropped: other parts of the model count on their places."
        )
    if not kept or kept != sorted({*kept} & {*range(len(blocks))}):
        raise InvalidConfig(
            f"{found.path} has blocks 0 to {len(blocks) - 1}; kept must be sorted, unique and not empty."
        )
    for layer, kind in leaders(layer_types(own, kept)).items():
        if "attention" in skipped(stack, blocks[kept[layer]]):
            raise InvalidConfig(
                f"{found.path}.{kept[layer]} would become the first block with {kind}, but its attention is skipped: "
                "generation reads the number of cached tokens there. Keep an earlier block."
            )
    if kept[0] != 0:
        _move_first_(stack.first, blocks[0], blocks[kept[0]])
    for layer in reversed(range(len(blocks))):
        if layer not in kept:
            del blocks[layer]
    for layer, block in enumerate(blocks):
        for module in block.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = layer  # pyright: ignore[reportArgumentType]
    keep_layers_(stack_configs(model, stack), stack, kept)
    for other in stacks(model, adapter_for(model)):
        # T5's stacks hold copies of the config, and each copy counts its own stack by the name of the encoder's depth.
        config = getattr(model.get_submodule(other.path.rpartition(".")[0]), "config", None)
        if config is not None and config is not stack_config(model.config, other.stack):
            config.num_hidden_layers = len(other.blocks)  # pyright: ignore[reportAttributeAccessIssue]


def skip_(model: PreTrainedModel, found: BoundStack, layer: int, kind: str) -> None:
    """Take a sub-layer out of a block, in place. Call `describe_` afterwards.

    The result equals the old model with the output projection of the sub-layer set to zero. Its norm stays.

    Args:
        model: holds the stack.
        found: a stack of `model`.
        layer: index of the block.
        kind: `"attention"` or `"mlp"`.
    """
    if reason := why_not_skip(found.stack, layer_types(stack_config(model.config, found.stack)), layer, kind):
        raise InvalidConfig(f"The {kind} of {found.path}.{layer} cannot be skipped: {reason}.")
    parent, _, name = found.stack.sublayers[kind].rpartition(".")
    owner = found.blocks[layer].get_submodule(parent)
    setattr(owner, name, STAND_INS[kind]().train(getattr(owner, name).training))


def _move_first_(first: Mapping[str, tuple[str, ...]], old: nn.Module, new: nn.Module) -> None:
    """Give the new first block what only a first block has."""
    for path, attributes in first.items():
        for attribute in attributes:
            setattr(new.get_submodule(path), attribute, getattr(old.get_submodule(path), attribute))


def positions(kept: Tensor, units: int, width: int) -> Tensor:
    """Return rows or columns of the kept units on an axis of `width`, cut into `units` equal contiguous blocks."""
    block = width // units
    return (kept[:, None] * block + torch.arange(block, device="cpu")).flatten()


@torch.no_grad()
def _cut(parameter: Tensor, dim: int, index: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.index_select(dim, index.to(parameter.device)), requires_grad=parameter.requires_grad)
