"""Modules that stand for skipped sub-layers, and which sub-layers a block has to keep.

A skipped sub-layer adds zeros to the residual stream; its norms stay, and have no effect. Decoding that takes tokens
back out of the cache (prompt lookup) fails in transformers where a sliding-window layer has its attention skipped.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optimum_prune.adapters.base import Stack

SKIP = "skip"
"""Where a layer's sizes name its skipped sub-layers: transformers' own word in `per_layer_config`."""


class Skipped(nn.Module):
    """Stands for a sub-layer that was removed; it has no weights."""


class SkippedAttention(Skipped):
    """Attention that adds nothing, and puts nothing into the cache."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return zeros `(B, T, d)`, and no attention weights."""
        return torch.zeros_like(hidden_states), None


class SkippedMLP(Skipped):
    """An MLP that adds nothing."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return zeros `(B, T, d)`."""
        return torch.zeros_like(hidden_states)


STAND_INS: dict[str, type[Skipped]] = {"attention": SkippedAttention, "mlp": SkippedMLP}
"""Kind of sub-layer -> what takes its place."""


def skipped(stack: Stack, block: nn.Module) -> list[str]:
    """Name the kinds of sub-layer that are skipped in a block, sorted."""
    return sorted(kind for kind, path in stack.sublayers.items() if isinstance(block.get_submodule(path), Skipped))


def leaders(layer_types: Sequence[str] | None) -> dict[int, str]:
    """Return the blocks whose attention has to stay: layer -> kind of attention that it is the first of.

    Generation reads the number of cached tokens off them: positions off the first layer, and the mask of every kind of
    attention off the first layer of that kind. With their attention skipped, tokens come out wrong, in silence.

    Args:
        layer_types: the config's list, or None where all layers are of one kind.
    """
    kinds = list(layer_types or ["attention"])
    return {kinds.index(kind): kind for kind in reversed(kinds)} | {0: kinds[0]}


def why_not_skip(stack: Stack, layer_types: Sequence[str] | None, layer: int, kind: str) -> str | None:
    """Say why a sub-layer has to stay, or None if it can be skipped."""
    if kind not in stack.sublayers:
        return f"blocks of {stack.path} have no sub-layer of that kind to skip"
    if kind == "attention" and (first := leaders(layer_types).get(layer)) is not None:
        return f"it is the first layer with {first}, and generation reads the number of cached tokens there"
    return None
