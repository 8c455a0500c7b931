"""Masks from scores: bool, True = kept, with exact counts. Pure functions of tensors.

Larger scores are kept. Of equal scores, those further to the left (and up) go first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-12  # 0.29 * 100 is 28.999999999999996, and products of large counts are off by more
CHUNK = 2**20
"""Scores that are copied at once, to order them."""


def removed_of(count: int, sparsity: float) -> int:
    """Return `int(count * sparsity)`, safe from rounding: how many of `count` weights go."""
    return int(count * (sparsity + EPSILON))


def row_mask(scores: Tensor, remove: int) -> Tensor:
    """Remove the `remove` lowest of every row.

    Args:
        scores: `(rows, d_in) float32`.
        remove: weights that go from each row.

    Returns:
        `(rows, d_in) bool`.
    """
    if remove == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    height = max(1, CHUNK // scores.shape[1])
    threshold = torch.cat([_lowest(part, remove) for part in scores.split(height)])
    mask = scores > threshold
    missing = scores.shape[1] - remove - mask.sum(dim=1)
    rows = missing.nonzero()[:, 0]
    if len(rows):  # ties: of those equal to the threshold, some stay
        equal = scores[rows] == threshold[rows]
        going = equal.sum(dim=1) - missing[rows]
        mask[rows] |= equal & (equal.cumsum(dim=1) > going[:, None])
    return mask


def _lowest(scores: Tensor, rank: int) -> Tensor:
    """Return the `rank`-th lowest of every row, counted from 1: `(rows, 1)`."""
    if not scores.is_cpu:
        return scores.kthvalue(rank, dim=1, keepdim=True).values
    # NumPy's vectorised partition takes a sixth of the time of kthvalue, which also moves an index along.
    ordered = scores.detach().clone(memory_format=torch.contiguous_format)
    ordered.numpy().partition(rank - 1, axis=1)  # in place
    return ordered[:, rank - 1 : rank].clone()


def matrix_mask(scores: Tensor, remove: int) -> Tensor:
    """Remove the `remove` lowest of a whole matrix, `(rows, d_in)`; the mask has its shape."""
    return row_mask(scores.reshape(1, -1), remove).view(scores.shape)


def global_masks(scores: Sequence[Tensor], remove: int) -> list[Tensor]:
    """Remove the `remove` lowest of several matrices together."""
    joined = row_mask(torch.cat([score.flatten() for score in scores])[None], remove)[0]
    parts = joined.split([score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]


def n_of_m_mask(scores: Tensor, n: int, m: int) -> Tensor:
    """Remove the `n` lowest of every `m` consecutive scores of a row.

    Args:
        scores: `(rows, d_in) float32`; m divides d_in.
        n: zeros in each group.
        m: size of a group.

    Returns:
        `(rows, d_in) bool`.
    """
    groups = scores.unflatten(-1, (-1, m)).unbind(dim=-1)  # m of (rows, d_in / m)
    # By comparisons: a rank costs m - 1 of them, far less than sorting groups of four.
    kept = []
    for i, score in enumerate(groups):
        rank = torch.zeros(score.shape, dtype=torch.int8, device=score.device)
        for j, other in enumerate(groups):
            if j != i:
                rank += (other <= score) if j < i else (other < score)
        kept.append(rank >= n)
    return torch.stack(kept, dim=-1).flatten(-2)
