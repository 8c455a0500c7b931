"""The plan of a structured run: which counts its groups can keep, and which they will."""

import math

from transformers import PreTrainedModel

from optimum_prune.bounds import Range, kept_ranges, reachable
from optimum_prune.depth import generation_warnings
from optimum_prune.planning.costs import TARGETED, cost_of_units
from optimum_prune.planning.layout import forecast
from optimum_prune.planning.outlook import Outlook
from optimum_prune.planning.plan import PlannedGroup, PlannedTotal
from optimum_prune.planning.table import compressed
from optimum_prune.pools import Pool
from optimum_prune.structured import Targets


def width_outlook(model: PreTrainedModel, targets: Targets, devices: int) -> Outlook:
    """Plan a structured run; see `Outlook`."""
    removed = [cost_of_units(pool) for pool in targets.pools]
    return Outlook(
        groups=[group for pool in targets.pools for group in _groups(pool, devices)],
        totals=[_total(pool, costs[TARGETED]) for pool, costs in zip(targets.pools, removed, strict=True)],
        removed=removed,
        layout=forecast(model, targets.pools),
        warnings=[
            *(warning for pool in targets.pools for warning in _warnings(pool, devices)),
            *generation_warnings(model),
        ],
    )


def _groups(pool: Pool, devices: int) -> list[PlannedGroup]:
    kept = pool.kept
    return [
        PlannedGroup(
            name=group.name,
            stack=group.stack,
            layer=group.layer,
            site=group.group.site,
            unit=group.unit,
            now=group.num_units,
            kept=kept[group.name],
            reachable=[count for count in reachable(group.num_units, pool.budget) if count % devices == 0],
        )
        for entry in pool.entries
        for group in entry
    ]


def _total(pool: Pool, removed: Range) -> PlannedTotal:
    kept = pool.kept.values()
    now = sum(group.num_units for entry in pool.entries for group in entry)
    exact = now - sum(count.lowest for count in kept)
    weights = sum(size.weights for size in pool.sizes)
    return PlannedTotal(
        stack=pool.stack,
        unit=pool.unit,
        asked=pool.budget.sparsity,
        now=now,
        # An entry of several groups counts once in a pool, but there the counts are exact.
        removed=Range(exact, exact) if all(count.exact for count in kept) else pool.removed,
        achieved=(removed.lowest / weights, removed.highest / weights),
    )


def _warnings(pool: Pool, devices: int) -> list[str]:
    return [f"{pool.unit} of {pool.stack}: {warning}" for warning in (*_spared(pool), *_undivided(pool, devices))]


def _spared(pool: Pool) -> list[str]:
    """Warn that rounding may keep every unit; only the scores tell."""
    if pool.budget.sparsity == 0 or pool.removed.lowest > 0 or pool.why_none is not None:
        return []
    return [
        f"rounding up to a multiple of {pool.budget.round_to} may spare all that is condemned, and a run that removes "
        "nothing is refused. Lower round_to or raise the sparsity."
    ]


def _undivided(pool: Pool, devices: int) -> list[str]:
    """Word that the devices cannot divide what is kept, or may not be able to."""
    kept = kept_ranges(pool.sizes, pool.budget)
    possible = {
        count
        for size, bounds in zip(pool.sizes, kept, strict=True)
        for count in reachable(size.num_units, pool.budget)
        if count in bounds
    }
    odd = sorted(count for count in possible if count % devices)
    if not odd:
        return []
    if all(bounds.exact for bounds in kept):
        return [f"tensor_parallel={devices} does not divide the {compressed(odd)} that are kept."]
    how = (
        f"round_to={math.lcm(pool.budget.round_to, devices)}" if pool.unit == "mlp_channel" else "allocation='uniform'"
    )
    return [
        f"the ranking decides what each layer keeps, so it is not sure that tensor_parallel={devices} divides it. "
        f"Use {how}."
    ]
