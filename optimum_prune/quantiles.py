"""A few numbers that stand for a distribution of scores."""

import torch
from torch import Tensor

AT = (0.05, 0.25, 0.5, 0.75, 0.95)
MOST = 100_000
"""Scores that are looked at, evenly spaced: to sort those of a large matrix would take longer than to prune it."""


def kept_and_removed(scores: Tensor, kept: Tensor) -> dict[str, list[float]]:
    """Return the quantiles `AT` of the scores of what is kept and of what is removed.

    Args:
        scores: any shape, float32; what is not finite was not there to be chosen, and does not count.
        kept: bool, the same shape.

    Returns:
        By `"kept"` and `"removed"`, to 6 digits; without the one that has no scores.
    """
    spacing = -(-scores.numel() // MOST)
    scores, kept = scores.flatten()[::spacing].cpu(), kept.flatten()[::spacing].cpu()
    there = scores.isfinite()
    parts = {"kept": scores[kept & there], "removed": scores[~kept & there]}
    return {name: _quantiles(part) for name, part in parts.items() if len(part)}


def _quantiles(scores: Tensor) -> list[float]:
    found = scores.double().quantile(scores.new_tensor(AT, dtype=torch.float64))
    return [float(f"{value:.6g}") for value in found.tolist()]
