"""Pools of structured pruning: units of one kind in one stack, among which a budget is spread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimum_prune.allocation import FLOOR, Budget, Size, can_go, choose, describe_groups
from optimum_prune.binding import BoundGroup
from optimum_prune.bounds import Range, kept_ranges, reachable, removed_range, why_none
from optimum_prune.errors import InvalidConfig
from optimum_prune.ranked import difference


@dataclass(frozen=True)
class Pool:
    """Units of one kind in one stack, among which a budget is spread.

    Attributes:
        stack: path of the stack.
        unit: kind of unit.
        entries: groups that are cut alike; most entries hold one group.
        sizes: of the entries.
        budget: how many units go.
        combine: of the scorer; see `Scorer`.
    """

    stack: str
    unit: str
    entries: list[list[BoundGroup]]
    sizes: list[Size]
    budget: Budget
    combine: Callable[[Sequence[Tensor], bool], list[Tensor]] | None

    def choose(
        self, scores: Mapping[str, Tensor], left: Mapping[str, Tensor] | None = None, share: float = 1.0
    ) -> dict[str, Tensor]:
        """Choose the kept units of every group.

        Args:
            scores: name of a group -> scores of its units; as many groups as the pool has.
            left: name of a group -> units that did not go in an earlier step; all others go anyway.
            share: of the budget, that goes up to this step.

        Returns:
            Name of a group -> kept units, sorted int64.
        """
        kept = choose(self.ranked(scores, left), self.budget.part(share))
        return {group.name: keep for entry, keep in zip(self.entries, kept, strict=True) for group in entry}

    def ranked(self, scores: Mapping[str, Tensor], left: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """Return what the units of every entry are ranked by, `(num_units,) float32`; see `choose`."""
        totals = [torch.stack([scores[group.name] for group in entry]).sum(dim=0) for entry in self.entries]
        candidates = [left[entry[0].name] for entry in self.entries] if left else [slice(None)] * len(totals)
        ranked = [total[candidate] for total, candidate in zip(totals, candidates, strict=True)]
        if self.combine is not None:
            ranked = self.combine(ranked, isinstance(self.budget.remove, int))
        for i, candidate in enumerate(candidates):
            totals[i] = totals[i].new_full((len(totals[i]),), -torch.inf)
            totals[i][candidate] = ranked[i]
        return totals

    def ranking(self, scores: Mapping[str, Tensor], left: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the same by name of a group."""
        ranked = self.ranked(scores, left)
        return {group.name: ranks for entry, ranks in zip(self.entries, ranked, strict=True) for group in entry}

    @property
    def sparsity(self) -> float:
        """Fraction that should go."""
        return self.budget.sparsity

    @property
    def config(self) -> str:
        """Which of the model's configs describes the stack; `""` is the model's own."""
        return self.entries[0][0].declared.config

    @property
    def kept(self) -> dict[str, Range]:
        """How many units each group keeps, by its name, as far as that is known before the scores."""
        ranges = kept_ranges(self.sizes, self.budget)
        return {group.name: kept for entry, kept in zip(self.entries, ranges, strict=True) for group in entry}

    @property
    def reachable(self) -> list[int]:
        """Counts that every group can keep, ascending."""
        counts = [{*reachable(size.num_units, self.budget)} for size in self.sizes]
        return sorted(set.intersection(*counts))

    @property
    def removed(self) -> Range:
        """How many units go in all entries together."""
        return removed_range(self.sizes, self.budget)

    @property
    def why_none(self) -> str | None:
        """Why no unit goes, whatever the scores; None where some may go."""
        return why_none(self.sizes, self.budget)

    def is_whole(self, kept: Mapping[str, Tensor]) -> bool:
        """Tell whether every group keeps all of its units."""
        return all(len(kept[group.name]) == group.num_units for entry in self.entries for group in entry)


def untouched(pool: Pool, reason: str) -> str:
    """Describe that none of a pool's units goes, for a report."""
    return difference(pool.unit, pool.stack, pool.sparsity, f"{0:.1%}", reason)


def nothing_goes(pools: Sequence[Pool], *, ranks_all: bool) -> InvalidConfig:
    """Word the refusal of a run that would remove nothing; `ranks_all` tells whether layers can be ranked together."""
    reasons = [f"{describe_groups(pool.unit, pool.sizes)}: {pool.why_none}." for pool in pools]
    sizes = [size for pool in pools for size in pool.sizes]
    advice = ["Raise the sparsity" if can_go(sizes) else "Choose another target"]
    each_alone = isinstance(pools[0].budget.remove, list) and not any(size.tied for size in sizes)
    if can_go(sizes) and each_alone and ranks_all:
        advice.append("rank all layers together with allocation='global'")
    if can_go(sizes) and any(pool.budget.round_to > 1 for pool in pools):
        advice.append("lower round_to")
    if others := [unit for unit in FLOOR if unit not in {pool.unit for pool in pools}]:
        advice.append(f"or prune the rest of the model alone with units={others}")
    return InvalidConfig(f"{' '.join(reasons)} {', '.join(advice)}.")
