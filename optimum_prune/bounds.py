"""What a budget leaves, before a score exists: exact counts, or the bounds of what a ranking of all groups can give."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from optimum_prune.allocation import Budget, Size, can_go


@dataclass(frozen=True)
class Range:
    """A number of which the bounds are known, both included; they are equal where it does not depend on scores."""

    lowest: int
    highest: int

    @property
    def exact(self) -> bool:
        """Whether it is known."""
        return self.lowest == self.highest

    def __contains__(self, number: int) -> bool:
        return self.lowest <= number <= self.highest

    def __add__(self, other: "Range") -> "Range":
        return Range(self.lowest + other.lowest, self.highest + other.highest)

    def __str__(self) -> str:
        return f"{self.lowest:,}" if self.exact else f"{self.lowest:,} to {self.highest:,}"


def reachable(num_units: int, budget: Budget) -> list[int]:
    """List the counts that a group of `num_units` can keep, ascending: all units, or a multiple of `round_to`."""
    step = budget.round_to
    return [*range(math.ceil(budget.floor / step) * step, num_units, step), num_units]


def kept_ranges(sizes: Sequence[Size], budget: Budget) -> list[Range]:
    """Return how many units each group keeps.

    Args:
        sizes: of the groups, as they were given to `budgets`.
        budget: what `budgets` returned for them.
    """
    counts = [reachable(size.num_units, budget) for size in sizes]
    if isinstance(budget.remove, list):
        condemned = [Range(remove, remove) for remove in budget.remove]
    else:
        room = [max(size.num_units - budget.floor, 0) for size in sizes]
        condemned = [Range(max(0, budget.remove - (sum(room) - own)), min(own, budget.remove)) for own in room]
    return [
        Range(_round_up(allowed[-1] - gone.highest, allowed), _round_up(allowed[-1] - gone.lowest, allowed))
        for allowed, gone in zip(counts, condemned, strict=True)
    ]


def removed_range(sizes: Sequence[Size], budget: Budget) -> Range:
    """Return how many units go in all groups together.

    A ranking of all groups condemns an exact number, but then each group spares up to `round_to - 1` of its own.
    """
    kept = kept_ranges(sizes, budget)
    total = sum(size.num_units for size in sizes)
    lowest = total - sum(count.highest for count in kept)
    highest = total - sum(count.lowest for count in kept)
    if isinstance(budget.remove, list):
        return Range(lowest, highest)
    # Whatever is removed is a multiple of this: a group keeps all of its units or a multiple of `round_to`.
    step = math.gcd(budget.round_to, *(size.num_units for size in sizes))
    spared = len(sizes) * (budget.round_to - 1)
    lowest = max(lowest, math.ceil((budget.remove - spared) / step) * step)
    highest = min(highest, budget.remove // step * step)
    return Range(lowest, highest)


def why_none(sizes: Sequence[Size], budget: Budget) -> str | None:
    """Say why no unit goes, whatever the scores, for the end of a sentence; None where some may go."""
    if budget.sparsity == 0 or removed_range(sizes, budget).highest > 0:
        return None
    numbers = [size.num_units for size in sizes]
    if not can_go(sizes):
        return f"none of {' or '.join(map(str, sorted(set(numbers))))} can go"
    if isinstance(budget.remove, list):
        counts = reachable(numbers[0], budget)[-2::-1]
        fractions = [f"{1 - count / numbers[0]:.3g}" for count in counts]
        shown = fractions if len(fractions) <= 6 else [*fractions[:3], "...", fractions[-1]]
        found = f"reachable in a group of {numbers[0]}: {', '.join(shown) or 'none'}"
    elif budget.remove:
        return spared(budget)
    else:
        found = f"1 of {sum(numbers)} is {1 / sum(numbers):.3g}"
    return f"a sparsity of {budget.sparsity:.4g} removes none ({found})"


def spared(budget: Budget) -> str:
    """Say that rounding keeps every unit, for the end of a sentence."""
    return (
        f"rounding every kept count up to a multiple of {budget.round_to} spares what a sparsity of "
        f"{budget.sparsity:.4g} condemns"
    )


def _round_up(count: int, allowed: Sequence[int]) -> int:
    return allowed[bisect_left(allowed, count)]
