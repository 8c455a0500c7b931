"""The plan of a run that sets weights to zero: how many of each linear is known, unless one ranking is of all."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from optimum_prune.bounds import Range
from optimum_prune.config import InductionConfig
from optimum_prune.depth import generation_warnings
from optimum_prune.masking import UNIT, MaskTargets, Target
from optimum_prune.masks import removed_of
from optimum_prune.planning.costs import model_costs
from optimum_prune.planning.layout import Forecast, ask, ask_with_biases, skeleton_of
from optimum_prune.planning.outlook import Outlook
from optimum_prune.planning.plan import PlannedGroup, PlannedTotal


def zeros_outlook(model: PreTrainedModel, targets: MaskTargets, induction: InductionConfig | None) -> Outlook:
    """Plan a run of pattern `"unstructured"` or n:m, after which every weight has the shape it had; see `Outlook`."""
    layout, created = _biases(model, targets, induction)
    removed = _removed(targets, [[target] for target in targets.targets])
    return Outlook(
        groups=[_group(target, gone) for target, gone in zip(targets.targets, removed, strict=True)],
        totals=_totals(targets),
        removed=created,
        layout=layout,
        warnings=[*_zeros_before(model), *generation_warnings(model)],
    )


def _biases(
    model: PreTrainedModel, targets: MaskTargets, induction: InductionConfig | None
) -> tuple[Forecast, list[dict[str, Range]]]:
    """Forecast the layout, and what biases add that the run may create: it removes less than nothing."""
    skeleton = skeleton_of(model)
    if induction is None or not induction.allow_bias:
        return ask(skeleton), []
    layout = ask_with_biases(skeleton, [target.name for target in targets.targets if target.sparsity > 0])
    before, after = model_costs(model), model_costs(skeleton)
    return layout, [{name: Range(before[name] - after[name], 0) for name in before}]


def _removed(targets: MaskTargets, parts: Sequence[Sequence[Target]]) -> list[Range]:
    """Bound how many weights go from each of several parts, which together are all that is targeted."""
    if targets.scope != "global":
        counts = [sum(_count(targets, target) for target in part) for part in parts]
        return [Range(count, count) for count in counts]
    sizes = [_size(part) for part in parts]
    remove = removed_of(sum(sizes), targets.targets[0].sparsity)
    return [Range(max(0, remove - (sum(sizes) - own)), min(own, remove)) for own in sizes]


def _count(targets: MaskTargets, target: Target) -> int:
    """Return how many weights of a linear go, where it is ranked by itself."""
    rows, columns = target.linear.weight.shape
    if targets.n_of_m:
        n, m = targets.n_of_m
        return rows * columns // m * n
    if targets.scope == "row":
        return rows * removed_of(columns, target.sparsity)
    return removed_of(rows * columns, target.sparsity)


def _size(part: Sequence[Target]) -> int:
    return sum(target.linear.weight.numel() for target in part)


def _group(target: Target, gone: Range) -> PlannedGroup:
    now = target.linear.weight.numel()
    return PlannedGroup(
        name=target.name,
        stack=target.stack,
        layer=target.layer,
        site=target.name.removeprefix(f"{target.stack}.{target.layer}."),
        unit=UNIT,
        now=now,
        kept=Range(now - gone.highest, now - gone.lowest),
        reachable=None,
    )


def _totals(targets: MaskTargets) -> list[PlannedTotal]:
    stacks: dict[str, list[Target]] = {}
    for target in targets.targets:
        stacks.setdefault(target.stack, []).append(target)
    removed = _removed(targets, list(stacks.values()))
    return [
        PlannedTotal(
            stack=stack,
            unit=UNIT,
            asked=targets.asked[stack][UNIT],
            now=(now := _size(part)),
            removed=gone,
            achieved=(gone.lowest / now, gone.highest / now),
        )
        for (stack, part), gone in zip(stacks.items(), removed, strict=True)
    ]


def _zeros_before(model: PreTrainedModel) -> list[str]:
    """Word that the run may find more zeros than it makes; a skeleton has none to count."""
    record = getattr(model.config, "pruning_config", None)
    patterns = [cut["recipe"]["pattern"] for cut in (*record.get("previous", []), record)] if record else []
    if not any(pattern == "unstructured" or ":" in pattern for pattern in patterns):
        return []
    return ["The model has zeros of an earlier run. Where they are kept, the run reports more zeros than planned here."]
