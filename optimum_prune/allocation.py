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
    sparsity: float,
    gamma: float,
    attention_weights: int,
    mlp_weights: int,
    largest_attention: float,
    largest_mlp: float,
) -> tuple[float, float]:
    """Split a sparsity over attention and MLP: `r_A = s (P_A + P_M) / (P_A + gamma P_M)`, `r_M = gamma r_A`.

    From the paper's code (arXiv 2509.14230), which clamps `r_M` alone. Where one of both would pass the largest
    fraction that its floors allow, it is clamped there, and the other is solved from the budget; with gamma below 1
    that one is `r_A`. Where the budget is more than both can lose, the other one passes its largest fraction.

    Returns:
        `(r_A, r_M)`, fractions removed.
    """
    total = sparsity * (attention_weights + mlp_weights)
    r_attention = total / (attention_weights + gamma * mlp_weights)
    r_mlp = gamma * r_attention
    if r_mlp > largest_mlp:
        r_mlp = largest_mlp
        r_attention = (total - r_mlp * mlp_weights) / attention_weights
    elif r_attention > largest_attention:
        r_attention = largest_attention
        r_mlp = (total - r_attention * attention_weights) / mlp_weights
    return r_attention, r_mlp


def can_go(groups: Sequence[Size]) -> int:
    """Count the units that the floors let go."""
    return sum(max(group.num_units - FLOOR[group.unit], 0) for group in groups)


def budgets(
    groups: Sequence[Size], sparsity: float, allocation: str, *, gamma: float = 1.0, round_to: int = 8
) -> dict[str, Budget]:
    """Fix how many units of each kind go, in one stack. That may be none: see `bounds.why_none`.

    Args:
        groups: the targeted groups.
        sparsity: fraction removed of their weights, in [0, 1).
        allocation: `"uniform"` (nearest reachable count in every group), `"global"` or `"gamma"` (`floor` of the exact
            count, over all groups of a kind). Kinds whose groups are tied are always uniform.
        gamma: MLP sparsity over attention sparsity; only read for `"gamma"`, where units of both kinds can go.
        round_to: MLP channels kept are rounded up to a multiple of it.

    Raises:
        InvalidConfig: the floors do not leave enough to remove.
    """
    kinds = {unit: [group for group in groups if group.unit == unit] for unit in dict.fromkeys(g.unit for g in groups)}
    fractions = dict.fromkeys(kinds, sparsity)
    coupled = allocation == "gamma" and all(can_go(kinds.get(unit, [])) for unit in FLOOR)
    if coupled:
        weights = [sum(group.weights for group in kinds[unit]) for unit in FLOOR]
        largest = [can_go(kinds[unit]) / sum(group.num_units for group in kinds[unit]) for unit in FLOOR]
        fractions = dict(zip(FLOOR, coupled_sparsities(sparsity, gamma, *weights, *largest), strict=True))
    result = {}
    for unit, members in kinds.items():
        sizes = [group.num_units for group in members]
        floor, removable = FLOOR[unit], can_go(members)
        together = _floor(fractions[unit] * sum(sizes))
        uniform = allocation == "uniform" or any(group.tied for group in members)
        if removable and together > removable and (coupled or not uniform):
            raise InvalidConfig(
                f"{describe_groups(unit, members)}: {min(together, sum(sizes))} of {sum(sizes)} would have to go "
                f"({min(fractions[unit], 1):.4g}), at most {removable} can. Lower the sparsity."
            )
        if uniform:
            remove = [min(_nearest(fractions[unit] * n), max(n - floor, 0)) for n in sizes]
        else:
            remove = min(together, removable)
        step = round_to if unit == "mlp_channel" else 1
        result[unit] = Budget(fractions[unit], remove, floor, step)
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


def describe_groups(unit: str, groups: Sequence[Size]) -> str:
    """Describe all groups of one kind: their number, their sizes and their floor."""
    numbers = {group.num_units for group in groups}
    span = f"{min(numbers)} to {max(numbers)}" if len(numbers) > 1 else f"{min(numbers)}"
    return f"{unit}: {len(groups)} groups of {span} units, each of which keeps at least {FLOOR[unit]}"


def _round_up(kept: int, step: int, limit: int) -> int:
    return min(math.ceil(kept / step) * step, limit)


def _ascending(scores: Tensor) -> Tensor:
    return torch.argsort(scores, stable=True)


def _nearest(count: float) -> int:
    return math.floor(count + 0.5 + 1e-9)


def _floor(count: float) -> int:
    return math.floor(count + 1e-9)  # 0.29 * 100 is 28.999999999999996
