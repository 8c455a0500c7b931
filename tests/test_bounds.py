"""Bounds of kept counts, against every way in which scores can fall."""

from itertools import product

import pytest
import torch

from optimum_prune.allocation import Budget, Size, budgets, choose
from optimum_prune.bounds import Range, kept_ranges, reachable, removed_range


def sizes(*counts: int, unit: str = "mlp_channel") -> list[Size]:
    return [Size(f"group {i}", unit, count, count * 3) for i, count in enumerate(counts)]


def outcomes(groups: list[Size], budget: Budget) -> set[tuple[int, ...]]:
    """Return the counts that all groups can be left with: all ways to condemn so many units, then the real rounding."""
    found = set()
    room = [range(max(size.num_units - budget.floor, 0) + 1) for size in groups]
    for condemned in product(*room):
        if sum(condemned) == budget.remove:
            scores = [
                torch.cat([torch.zeros(gone), torch.ones(size.num_units - gone)])
                for gone, size in zip(condemned, groups, strict=True)
            ]
            found.add(tuple(len(kept) for kept in choose(scores, budget)))
    return found


@pytest.mark.parametrize("round_to", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("counts", [(12, 12, 12), (11, 13), (9,), (24, 10), (4, 20), (8, 12)])
def test_bounds_hold_and_are_reached(counts, round_to):
    for remove in range(1, sum(max(count - 8, 0) for count in counts) + 1):
        budget = Budget(0.5, remove, 8, round_to)
        real = outcomes(sizes(*counts), budget)
        kept, removed = kept_ranges(sizes(*counts), budget), removed_range(sizes(*counts), budget)
        for i, bounds in enumerate(kept):
            assert bounds == Range(min(counts[i] for counts in real), max(counts[i] for counts in real))
        gone = {sum(counts) - sum(after) for after in real}
        assert removed.lowest <= min(gone) and max(gone) <= removed.highest
        if len(counts) == 1 or round_to == 1:
            assert removed == Range(min(gone), max(gone))


def test_bounds_of_equal_groups_are_tight():
    """As models have them: widths and floors are multiples of `round_to`."""
    for remove in range(1, 49):
        budget = Budget(0.5, remove, 8, 4)
        gone = {72 - sum(after) for after in outcomes(sizes(24, 24, 24), budget)}
        found = removed_range(sizes(24, 24, 24), budget)
        assert found.highest == max(gone)
        assert min(gone) - 4 <= found.lowest <= min(gone)


def test_counts_fixed_beforehand_are_exact():
    groups = sizes(48, 37)
    budget = budgets(groups, 0.3, "uniform", round_to=8)["mlp_channel"]
    assert kept_ranges(groups, budget) == [Range(40, 40), Range(32, 32)]
    assert removed_range(groups, budget) == Range(13, 13)


@pytest.mark.parametrize(
    ("units", "floor", "round_to", "expected"),
    [
        (4, 1, 1, [1, 2, 3, 4]),
        (37, 8, 8, [8, 16, 24, 32, 37]),
        (48, 8, 16, [16, 32, 48]),
        (48, 8, 64, [48]),
        (4, 8, 8, [4]),
    ],
)
def test_reachable_counts(units, floor, round_to, expected):
    assert reachable(units, Budget(0.5, 1, floor, round_to)) == expected


def test_a_range_in_words():
    assert [str(Range(1, 1)), str(Range(1000, 2000))] == ["1", "1,000 to 2,000"]
