"""How alike two scorers rank: Spearman's correlation."""

from collections.abc import Mapping
from statistics import mean

import torch
from torch import Tensor

from optimum_prune.structured import Targets

Ranks = Mapping[str, Mapping[str, Tensor]]
"""Kind of unit -> name of the first group that is ranked so -> rank of each unit, `(num_units,) float64`."""


def ranks_of(targets: Targets, scores: Mapping[str, Tensor]) -> Ranks:
    """Rank the units inside of every group, or of groups that have to keep the same units."""
    found: dict[str, dict[str, Tensor]] = {}
    for pool in targets.pools:
        for entry, totals in zip(pool.entries, pool.ranked(scores), strict=True):
            found.setdefault(pool.unit, {})[entry[0].name] = ranks(totals)
    return found


def spearman(first: Ranks, second: Ranks) -> float | None:
    """Return Spearman's correlation: mean over groups of a kind, then over kinds; None where none is ranked by both."""
    kinds = []
    for unit in first.keys() & second.keys():
        both = [(first[unit][name], second[unit][name]) for name in first[unit].keys() & second[unit].keys()]
        if found := [value for one, other in both if (value := _correlation(one, other)) is not None]:
            kinds.append(mean(found))
    return mean(kinds) if kinds else None


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each value, `(n,) float64`; equal ones share the mean of theirs.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0]))
    tensor([1.5000, 0.0000, 1.5000], dtype=torch.float64)
    """
    _, position, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0) - 1
    return (last.double() - (counts.double() - 1) / 2)[position]


def _correlation(first: Tensor, second: Tensor) -> float | None:
    """Return Pearson's correlation; None where one of both does not vary."""
    first, second = first - first.mean(), second - second.mean()
    scale = (first.norm() * second.norm()).item()
    return (first @ second).item() / scale if scale else None
