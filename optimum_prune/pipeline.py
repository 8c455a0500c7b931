"""The pipeline on one screen: bind, budget, calibrate, score, choose, cut, describe."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import optimum_prune
from optimum_prune import registry
from optimum_prune.allocation import FLOOR, Budget, Size, budgets, choose, gamma_auto
from optimum_prune.binding import BoundGroup, adapter_for, bind, check_prunable, select
from optimum_prune.calibration.data import load_samples
from optimum_prune.config import PruningConfig
from optimum_prune.errors import InvalidConfig, PruningError
from optimum_prune.report import GroupReport, PruningReport
from optimum_prune.scorers.base import Scorer
from optimum_prune.scoring import score_groups
from optimum_prune.sizes import describe_
from optimum_prune.surgery import slice_

TOLERANCE = 0.02
"""Difference between asked and achieved, in fractions of a kind's weights, from which on the report warns."""


# Under a caller's inference mode no gradient could be taken, and the cut weights never trained.
@torch.inference_mode(False)
def prune(model: PreTrainedModel, config: PruningConfig, tokenizer: Any = None, processor: Any = None) -> PruningReport:
    """Prune a live model in place.

    Everything that can be refused is refused before the first weight changes.

    Args:
        model: a transformers model of a supported architecture, with plain weights.
        config: what to remove, and how to choose it.
        tokenizer: needed when the calibration source is text.
        processor: of a multimodal model; brings the tokenizer along.

    Returns:
        What was asked and what was achieved.

    Raises:
        PruningError: one of its kinds; says what to do.
    """
    start = time.perf_counter()
    if not isinstance(config, PruningConfig):
        raise InvalidConfig(f"config must be a PruningConfig, got a {type(config).__name__}.")
    earlier: dict[str, Any] = getattr(model.config, "pruning_config", None) or {}
    sparsity = float(config.sparsity or 0.0)
    bound = bind(model)
    targets = select(bound, config.units, config.include, config.exclude)
    scorer: Scorer = registry.load("scorers", config.scorer)
    allocation, gamma = _allocation(config, scorer, targets)
    sizes = [Size(group.name, group.unit, group.num_units, group.weights) for group in targets]
    plan = budgets(sizes, sparsity, allocation, gamma=gamma or 1.0, round_to=config.round_to)
    check_prunable(model, targets)
    parameters = model.num_parameters()
    data = None
    if scorer.objective is not None:
        tokenizer = tokenizer or getattr(processor, "tokenizer", None)
        data = load_samples(config.calibration, model, tokenizer, default_seq_len=scorer.seq_len)
    scores = score_groups(model, targets, scorer, data=data, batch_size=config.calibration.batch_size, seed=config.seed)
    kept = _choose(targets, scores, plan)
    groups = _cut(model, targets, kept, sizes)
    report = PruningReport(
        config=config.to_dict(),
        model_type=adapter_for(model).model_type,
        asked=sparsity,
        asked_per_unit={unit: budget.sparsity for unit, budget in plan.items()},
        groups=groups,
        parameters_before=parameters,
        parameters_after=model.num_parameters(),
        allocation=allocation,
        gamma=gamma,
        calibration=data.to_dict() if data else None,
        seconds=time.perf_counter() - start,
        versions={
            "optimum_prune": optimum_prune.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        base_model=earlier.get("base_model") or model.config.name_or_path or None,
        base_revision=earlier.get("base_revision") if earlier else getattr(model.config, "_commit_hash", None),
        previous=_history(earlier),
    )
    report.warnings += [
        f"{unit}: asked {total['asked']:.1%}, achieved {total['achieved']:.1%}: only whole units go, and what is kept "
        "is rounded up and has a floor."
        for unit, total in report.per_unit.items()
        if abs(total["asked"] - total["achieved"]) > TOLERANCE
    ]
    model.config.pruning_config = report.record()
    return report


def _history(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of all earlier prunings, the oldest first, from the latest one."""
    if not record:
        return []
    return [*record.get("previous", []), {key: value for key, value in record.items() if key != "previous"}]


def _allocation(config: PruningConfig, scorer: Scorer, targets: Sequence[BoundGroup]) -> tuple[str, float | None]:
    """Resolve `"auto"`, and refuse a ranking that means nothing for the scorer."""
    allocation = config.allocation
    if allocation == "auto":
        allocation = "gamma" if config.gamma != "auto" else scorer.allocation
    if allocation != "uniform" and scorer.comparable != "model":
        raise InvalidConfig(
            f"allocation={allocation!r} ranks all layers together, but {scorer.name} scores are only comparable inside "
            f"one {scorer.comparable}. Use allocation='uniform'."
        )
    if allocation != "gamma":
        return allocation, None
    weights = {unit: sum(group.weights for group in targets if group.unit == unit) for unit in FLOOR}
    if not all(weights.values()):
        if config.gamma != "auto":
            raise InvalidConfig(f"gamma={config.gamma} couples MLP and attention, but only one of them is targeted.")
        return allocation, None
    if config.gamma != "auto":
        return allocation, float(config.gamma)
    heads = [group.counts().values() for group in targets if group.unit == "kv_group"]
    queries_per_group = max(max(counts) // min(counts) for counts in heads)
    return allocation, gamma_auto(weights["kv_group"], weights["mlp_channel"], queries_per_group)


def _choose(targets: Sequence[BoundGroup], scores: Sequence[Tensor], plan: dict[str, Budget]) -> list[Tensor]:
    """Choose the kept units of every target, in the order of the targets."""
    kept: dict[str, Tensor] = {}
    for unit, budget in plan.items():
        members = [(group, score) for group, score in zip(targets, scores, strict=True) if group.unit == unit]
        chosen = choose([score for _, score in members], budget)
        if budget.sparsity > 0 and all(
            len(keep) == len(score) for keep, (_, score) in zip(chosen, members, strict=True)
        ):
            raise InvalidConfig(
                f"{unit}: rounding every kept count up to a multiple of {budget.round_to} spares what a sparsity of "
                f"{budget.sparsity:.4g} condemns. Lower round_to or raise the sparsity."
            )
        kept |= {group.name: keep for (group, _), keep in zip(members, chosen, strict=True)}
    return [kept[group.name] for group in targets]


def _cut(
    model: PreTrainedModel, targets: Sequence[BoundGroup], kept: Sequence[Tensor], sizes: Sequence[Size]
) -> list[GroupReport]:
    """Slice every target and make the config truthful."""
    try:
        for group, keep in zip(targets, kept, strict=True):
            slice_(group, keep)
        describe_(model)
    except BaseException as error:
        raise PruningError(
            f"Pruning was interrupted between the first cut and the last ({error!r}): the model is partly pruned. "
            "Load it again."
        ) from error
    return [
        GroupReport(
            name=group.name,
            stack=group.stack,
            layer=group.layer,
            unit=group.unit,
            before=size.num_units,
            after=group.num_units,
            kept=keep.tolist(),
            weights_before=size.weights,
            weights_after=group.weights,
        )
        for group, keep, size in zip(targets, kept, sizes, strict=True)
    ]
