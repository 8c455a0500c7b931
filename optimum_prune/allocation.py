"""How many units each group keeps, and which: uniform, global, and the gamma-coupled pools of NIRVANA.

Counts are fixed before a single score exists (`budgets`), so a target that cannot be met is refused before calibration;
`choose` then turns scores into kept indices. Sparsity is always the fraction removed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimum_prune.errors import InvalidConfig

FLOOR = {"kv_group": 1, "mlp_channel": 8}
"""Units that every group keeps, whatever the scores say (METHODS.md 2)."""


@dataclass(frozen=True)
class Size:
    """Size of what is cut alike: one targeted group, or several that have to keep the same units.

    Attributes:
        name: for error messages.
        unit: kind of unit.
        num_units: how many there are.
        weights: how many weights they have together.
        tied: whether it has to keep as many units as all others of its kind.
    """

    name: str
    unit: str
    num_units: int
    weights: int
    tied: bool = False


@dataclass(frozen=True)
class Budget:
    """How many units of one kind go.

    Attributes:
        sparsity: the fraction asked of this kind of unit (after the coupling).
        remove: of each group alone (a list), or of all groups together in one ranking (an int).
        floor: units that every group keeps.
        round_to: kept counts are rounded up to a multiple of it, by sparing the best of the condemned.
    """

    sparsity: float
    remove: int | list[int]
    floor: int
    round_to: int

    def part(self, share: float) -> "Budget":
        """Return the budget of a step on the way: the share of it that has gone by then."""
        if share == 1:
            return self
        if isinstance(self.remove, int):
            return replace(self, remove=_floor(self.remove * share))
        return replace(self, remove=[_floor(remove * share) for remove in self.remove])


def gamma_auto(attention_weights: int, mlp_weights: int, queries_per_group: int) -> float:
    """Return gamma = `(P_M / P_A) * min(1, 4 / (g + 1))`, the ratio of MLP to attention sparsity.

    A reconstruction: the paper (arXiv 2509.14230) publishes 3.36 for Llama-3.1-8B and 3.0 for Llama-3.2-3B without a
    derivation; this gives exactly those.

    Args:
        attention_weights: `P_A`, weights of all targeted attention groups.
        mlp_weights: `P_M`, weights of all targeted MLP groups.
        queries_per_group: g, query heads per KV head.
    """
    return mlp_weights / attention_weights * min(1.0, 4 / (queries_per_group + 1))


def coupled_sparsities(
    sparsity: float, gamma: float, attention_weights: int, mlp_weights: int, largest_mlp: float
) -> tuple[float, float]:
    """Split a sparsity over attention and MLP: `r_A = s (P_A + P_M) / (P_A + gamma P_M)`, `r_M = gamma r_A`.

    From the paper's code (arXiv 2509.14230). Where `r_M` would pass `largest_mlp` (what the floors allow) it is clamped
    there and `r_A` solved from the budget.

    Returns:
        `(r_A, r_M)`, fractions removed.
    """
    total = sparsity * (attention_weights + mlp_weights)
    r_attention = total / (attention_weights + gamma * mlp_weights)
    r_mlp = gamma * r_attention
    if r_mlp > largest_mlp:
        r_mlp = largest_mlp
        r_attention = (total - r_mlp * mlp_weights) / attention_weights
    return r_attention, r_mlp


def budgets(
    groups: Sequence[Size], sparsity: float, allocation: str, *, gamma: float = 1.0, round_to: int = 8
) -> dict[str, Budget]:
    """Fix how many units of each kind go, in one stack.

    Args:
        groups: the targeted groups.
        sparsity: fraction removed of their weights, in [0, 1).
        allocation: `"uniform"` (nearest reachable count in every group), `"global"` or `"gamma"` (`floor` of the exact
            count, over all groups of a kind). Kinds whose groups are tied are always uniform.
        gamma: MLP sparsity over attention sparsity; only read for `"gamma"`.
        round_to: MLP channels kept are rounded up to a multiple of it.

    Raises:
        InvalidConfig: a kind of unit would not be touched, or the floors do not leave enough to remove.
    """
    kinds = {unit: [group for group in groups if group.unit == unit] for unit in dict.fromkeys(g.unit for g in groups)}
    fractions = dict.fromkeys(kinds, sparsity)
    if allocation == "gamma" and kinds.keys() == FLOOR.keys():
        weights = {unit: sum(group.weights for group in kinds[unit]) for unit in kinds}
        channels = [group.num_units for group in kinds["mlp_channel"]]
        largest = 1 - len(channels) * FLOOR["mlp_channel"] / sum(channels)
        fractions["kv_group"], fractions["mlp_channel"] = coupled_sparsities(
            sparsity, gamma, weights["kv_group"], weights["mlp_channel"], largest
        )
    result = {}
    for unit, members in kinds.items():
        sizes = [group.num_units for group in members]
        floor = FLOOR[unit]
        if allocation == "uniform" or any(group.tied for group in members):
            remove = [min(_nearest(fractions[unit] * n), max(n - floor, 0)) for n in sizes]
        else:
            remove = _floor(fractions[unit] * sum(sizes))
        step = round_to if unit == "mlp_channel" else 1
        budget = Budget(fractions[unit], remove, floor, step)
        if sparsity > 0:
            _refuse_unreachable(unit, members, budget)
        result[unit] = budget
    return result


def choose(scores: Sequence[Tensor], budget: Budget) -> list[Tensor]:
    """Choose the units to keep.

    Args:
        scores: one `(num_units,) float32` per group; larger = keep. Ties go by position.
        budget: from `budgets`, for these groups.

    Returns:
        Sorted int64 indices kept, one tensor per group.
    """
    if isinstance(budget.remove, int):
        condemned = _condemn_together(scores, budget.remove, budget.floor)
    else:
        condemned = [_ascending(score)[:count] for score, count in zip(scores, budget.remove, strict=True)]
    return [_spare(score, gone, budget.round_to) for score, gone in zip(scores, condemned, strict=True)]


def _condemn_together(scores: Sequence[Tensor], remove: int, floor: int) -> list[Tensor]:
    """Return the `remove` lowest of all groups' units, the best `floor` of each group exempt; lowest first."""
    candidates = [_ascending(score)[: max(len(score) - floor, 0)] for score in scores]
    group = torch.cat([torch.full_like(index, i) for i, index in enumerate(candidates)])
    unit = torch.cat(candidates)
    order = _ascending(torch.cat([score[index] for score, index in zip(scores, candidates, strict=True)]))[:remove]
    return [unit[order[group[order] == i]] for i in range(len(scores))]


def _spare(scores: Tensor, condemned: Tensor, round_to: int) -> Tensor:
    """Drop the condemned (lowest first) after sparing the best of them until a multiple of `round_to` is kept."""
    total = len(scores)
    kept = _round_up(total - len(condemned), round_to, total)
    mask = torch.ones(total, dtype=torch.bool, device=scores.device)
    mask[condemned[: total - kept]] = False
    return mask.nonzero().flatten()


def _refuse_unreachable(unit: str, members: Sequence[Size], budget: Budget) -> None:
    sizes = [group.num_units for group in members]
    what = f"{unit}: {len(members)} groups of {_span(sizes)} units, each of which keeps at least {budget.floor}"
    other = f"prune the rest of the model alone with units=[{', '.join(repr(u) for u in FLOOR if u != unit)}]"
    removable = sum(max(size - budget.floor, 0) for size in sizes)
    if removable == 0:
        raise InvalidConfig(f"{what}: none can be removed. Choose another target, or {other}.")
    asked = budget.remove if isinstance(budget.remove, int) else sum(budget.remove)
    if asked > removable:
        raise InvalidConfig(
            f"{what}: {asked} of {sum(sizes)} would have to go ({budget.sparsity:.4g}), at most {removable} can. "
            "Lower the sparsity."
        )
    if isinstance(budget.remove, list):  # rounding the kept counts up may spare all that is left to remove
        asked = sum(
            size - _round_up(size - gone, budget.round_to, size)
            for size, gone in zip(sizes, budget.remove, strict=True)
        )
    if asked == 0:
        if isinstance(budget.remove, int):
            reachable, advice = f"1 of {sum(sizes)} is {1 / sum(sizes):.3g}", "Raise the sparsity"
        else:
            reachable = f"reachable in a group of {sizes[0]}: {_reachable(sizes[0], budget)}"
            advice = "Raise the sparsity, rank all layers together with allocation='global', lower round_to"
        raise InvalidConfig(
            f"{what}: a sparsity of {budget.sparsity:.4g} removes none ({reachable}). {advice}, or {other}."
        )


def _reachable(size: int, budget: Budget) -> str:
    kept = {_round_up(count, budget.round_to, size) for count in range(budget.floor, size)} - {size}
    fractions = [f"{1 - count / size:.3g}" for count in sorted(kept, reverse=True)]
    return ", ".join(fractions if len(fractions) <= 6 else [*fractions[:3], "...", fractions[-1]]) or "none"


def _round_up(kept: int, step: int, limit: int) -> int:
    return min(math.ceil(kept / step) * step, limit)


def _span(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"


def _ascending(scores: Tensor) -> Tensor:
    return torch.argsort(scores, stable=True)


def _nearest(count: float) -> int:
    return math.floor(count + 0.5 + 1e-9)


def _floor(count: float) -> int:
    return math.floor(count + 1e-9)  # 0.29 * 100 is 28.999999999999996
