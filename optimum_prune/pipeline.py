"""The pipeline on one screen: find targets, calibrate, score, choose, cut, describe."""

import time
from collections.abc import Collection
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import optimum_prune
from optimum_prune import registry
from optimum_prune.binding import adapter_for, stacks
from optimum_prune.calibration.data import CalibrationData, load_samples
from optimum_prune.calibration.gradients import check_head
from optimum_prune.calibration.passages import passages
from optimum_prune.calibration.request import resolve
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.configs import describe_ties_, own_configs_
from optimum_prune.depth import DepthTargets, find_depth_targets, generation_warnings
from optimum_prune.errors import InvalidConfig
from optimum_prune.layouts.forms import check_writable_
from optimum_prune.masking import MaskTargets, find_mask_targets
from optimum_prune.padded import check_unpadded
from optimum_prune.planning.layout import skeleton_of
from optimum_prune.ranked import difference
from optimum_prune.report import PruningReport
from optimum_prune.scorers.base import Scorer
from optimum_prune.selection import Selection, select, widened
from optimum_prune.structured import Targets, find_targets, resolve_compensation
from optimum_prune.surgery import cutting
from optimum_prune.wrapping import check_unwrapped

FIND_TARGETS = {
    "structured": find_targets,
    "layers": find_depth_targets,
    "unstructured": find_mask_targets,
    "n:m": find_mask_targets,
}
"""Kind of pattern -> what finds its targets."""
TOLERANCE = 0.02
"""Difference between asked and achieved, in fractions of a kind's weights, from which on the report warns."""
REASONS = {
    "structured": "only whole units go, and what is kept is rounded up and has a floor",
    "layers": "only whole layers go, and they may differ in size",
    "unstructured": "only whole weights go, and some were zero before, or read inputs that always are",
    "n:m": "some weights were zero before, or read inputs that always are",
}
"""Pattern -> why asked and achieved may differ."""


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
    check_unwrapped(model)
    PruningConfig.check_type(config)
    earlier: dict[str, Any] = getattr(model.config, "pruning_config", None) or {}
    scorer = load_scorer(config)
    targets = find_targets_of(model, config, scorer)
    targets.check(model)
    check_unpadded(model)
    rehearse(model, config, scorer)
    parameters = model.num_parameters()
    data = selection = None
    if needs_data(config, scorer):
        data = load_samples(
            _asked(config.calibration, model, scorer),
            model,
            tokenizer or getattr(processor, "tokenizer", None),
            processor=processor,
            default_seq_len=scorer.seq_len,
            image_stack=image_stack(model, targets.asked),
        )
        if config.calibration.selection == "kl":
            data, selection = select(model, targets, scorer, config, data)
    own_configs_(model)
    groups = targets.prune_(model, scorer, data, config)
    with cutting():  # what is cut without a record could not be saved
        describe_ties_(model)
        report = PruningReport(
            config=config.to_dict(),
            model_type=adapter_for(model).model_type,
            asked=targets.sparsity,
            asked_per_stack=targets.asked,
            groups=groups,
            parameters_before=parameters,
            parameters_after=model.num_parameters(),
            allocation=targets.allocation,
            gamma=targets.gamma or None,
            calibration=_described(data, selection),
            seconds=time.perf_counter() - start,
            versions={
                "optimum_prune": optimum_prune.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            base_model=earlier.get("base_model") or model.config.name_or_path or None,
            base_revision=earlier.get("base_revision") if earlier else getattr(model.config, "_commit_hash", None),
            previous=_history(earlier),
            compensation=resolve_compensation(config, scorer) if config.kind == "structured" else None,
            induction=[gain.to_dict() for gain in targets.gains] or None if isinstance(targets, MaskTargets) else None,
        )
        report.warnings += [
            difference(unit, stack, total["asked"], f"{total['achieved']:.1%}", REASONS[config.kind])
            for stack, units in report.per_stack.items()
            for unit, total in units.items()
            if abs(total["asked"] - total["achieved"]) > TOLERANCE
            and (total["achieved"] > 0 or isinstance(targets, MaskTargets))  # else it is in the notes, with its reason
        ]
        report.warnings += [*targets.notes, *generation_warnings(model)]
        model.config.pruning_config = report.record()
    return report


def find_targets_of(
    model: PreTrainedModel, config: PruningConfig, scorer: Scorer
) -> Targets | DepthTargets | MaskTargets:
    """Find what a config targets in a model.

    Args:
        model: a skeleton will do.
        config: of the run.
        scorer: of the config.

    Raises:
        PruningError: whatever the names, shapes and the class of the model tell.
    """
    targets = FIND_TARGETS[config.kind](model, config, scorer)
    if scorer.needs_gradients:
        check_head(model)
    return targets


def rehearse(
    model: PreTrainedModel, config: PruningConfig, scorer: Scorer, layout: str = "auto", class_switch: bool = False
) -> None:
    """Write on trial what a save of the pruned model will write beside the weights.

    Args:
        model: left as it was; a skeleton will do.
        config: of the run.
        scorer: of the config.
        layout: as for `save_checkpoint`.
        class_switch: likewise.

    Raises:
        CheckpointError: the model's class or config refuses what would be written.
    """
    skeleton = skeleton_of(model)
    FIND_TARGETS[config.kind](skeleton, config, scorer).rehearse_(skeleton, config)
    check_writable_(skeleton, layout, class_switch)


def needs_data(config: PruningConfig, scorer: Scorer) -> bool:
    """Tell whether anything looks at calibration data."""
    return scorer.needs_data or config.induction is not None or resolve_compensation(config, scorer) != "none"


def _asked(calibration: CalibrationConfig, model: PreTrainedModel, scorer: Scorer) -> CalibrationConfig:
    if calibration.selection == "none":
        return calibration
    return widened(calibration, resolve(calibration, model, scorer.seq_len, "random").seq_len)


def _described(data: CalibrationData | None, selection: Selection | None) -> dict[str, Any] | None:
    if data is None:
        return None
    selected = {"selection": selection.to_dict()} if selection else {}
    return data.to_dict() | selected | {"passages": passages(data.rows())}


def load_scorer(config: PruningConfig) -> Scorer:
    """Load the scorer of a config, and refuse what it cannot do."""
    scorer: Scorer = registry.load("scorers", config.scorer)
    if config.kind not in scorer.patterns:
        fit = [n for n in registry.available("scorers") if config.kind in registry.load("scorers", n).patterns]
        raise InvalidConfig(
            f"scorer {config.scorer!r} ranks for pattern {', '.join(map(repr, scorer.patterns))} and cannot choose for "
            f"{config.pattern!r}; scorers that can: {', '.join(map(repr, fit))}."
        )
    scorer = scorer.with_options(config.scorer_options)
    if config.calibration.selection != "none" and not scorer.needs_data:
        raise InvalidConfig(
            f"selection={config.calibration.selection!r} chooses the data that scores are made of, and {scorer.name} "
            "looks at none. Leave selection out, or choose another scorer."
        )
    return scorer


def image_stack(model: PreTrainedModel, targeted: Collection[str]) -> str | None:
    """Name a stack among those at the `targeted` paths that reads nothing but images (which need no mask), if any."""
    live = stacks(model, adapter_for(model))
    return next((f.stack.name for f in live if f.path in targeted and f.stack.mask is None), None)


def _history(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of all earlier prunings, the oldest first, from the latest one."""
    if not record:
        return []
    return [*record.get("previous", []), {key: value for key, value in record.items() if key != "previous"}]
