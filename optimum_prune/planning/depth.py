"""The plan of a run that drops blocks or skips sub-layers: how many go is known, which depends on the scores."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from optimum_prune.binding import bind
from optimum_prune.bounds import Range
from optimum_prune.config import PruningConfig
from optimum_prune.configs import irregular, layer_types, stack_config
from optimum_prune.depth import (
    BLOCK,
    DepthPool,
    DepthTargets,
    Layer,
    find_depth_targets,
    generation_warnings,
)
from optimum_prune.planning.costs import TARGETED, cost_of_layers
from optimum_prune.planning.layout import Forecast, ask, skeleton_of
from optimum_prune.planning.outlook import Outlook
from optimum_prune.planning.plan import PlannedGroup, PlannedTotal
from optimum_prune.scorers.base import Scorer


def depth_outlook(model: PreTrainedModel, targets: DepthTargets, config: PruningConfig, scorer: Scorer) -> Outlook:
    """Plan a run of pattern `"layers"`; see `Outlook`."""
    bound = bind(model)
    removed = [cost_of_layers(pool, bound) for pool in targets.pools]
    skeleton = skeleton_of(model)
    find_depth_targets(skeleton, config, scorer).rehearse_(skeleton, config)
    return Outlook(
        groups=[_group(pool, layer) for pool in targets.pools for layer in pool.layers],
        totals=[_total(pool, costs[TARGETED]) for pool, costs in zip(targets.pools, removed, strict=True)],
        removed=removed,
        layout=_layout(targets, skeleton, removed),
        warnings=[
            *(irregular(pool.stack, "may no longer") for pool in targets.pools if _mixes(model, pool)),
            *generation_warnings(skeleton),
        ],
    )


def _mixes(model: PreTrainedModel, pool: DepthPool) -> bool:
    """Tell whether blocks go from a stack whose layers have several kinds of attention, by the rule of the class."""
    kinds = layer_types(stack_config(model.config, pool.found.stack)) or ()
    return pool.unit == BLOCK and pool.remove > 0 and len({*kinds}) > 1 and pool.follows_rule(model)


def _layout(targets: DepthTargets, skeleton: PreTrainedModel, removed: Sequence[Mapping[str, Range]]) -> Forecast:
    if any(pool.unit != BLOCK and pool.remove for pool in targets.pools):
        return Forecast("compact", "no class of transformers can build blocks without a sub-layer", {})
    if all(cost.exact for costs in removed for cost in costs.values()):  # then blocks are alike, and any will do
        return ask(skeleton)
    return Forecast("undecided", "blocks differ in size, and the scores decide which of them go", {})


def _group(pool: DepthPool, layer: Layer) -> PlannedGroup:
    candidates = sum(not other.stays for other in pool.layers)
    kept = Range(1, 1) if layer.stays or pool.remove == 0 else Range(0, int(pool.remove < candidates))
    return PlannedGroup(
        name=layer.name,
        stack=pool.found.path,
        layer=layer.layer,
        site=layer.name.removeprefix(f"{pool.found.path}.{layer.layer}").removeprefix("."),
        unit=pool.unit,
        now=1,
        kept=kept,
        reachable=[1] if layer.stays else [0, 1],
    )


def _total(pool: DepthPool, removed: Range) -> PlannedTotal:
    weights = sum(layer.weights for layer in pool.layers)
    return PlannedTotal(
        stack=pool.found.path,
        unit=pool.unit,
        asked=pool.sparsity,
        now=len(pool.layers),
        removed=Range(pool.remove, pool.remove),
        achieved=(removed.lowest / weights, removed.highest / weights),
    )
