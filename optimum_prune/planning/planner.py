"""The planner: the refusals of the run, then what it will keep."""

from collections.abc import Collection, Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from optimum_prune import checks
from optimum_prune.binding import adapter_for, bind
from optimum_prune.bounds import Range
from optimum_prune.calibration.refusals import check_calibration
from optimum_prune.calibration.request import resolve
from optimum_prune.config import PruningConfig
from optimum_prune.depth import DepthTargets
from optimum_prune.masking import MaskTargets
from optimum_prune.padded import check_unpadded, says_padded
from optimum_prune.pipeline import REASONS, TOLERANCE, find_targets_of, image_stack, load_scorer, needs_data, rehearse
from optimum_prune.planning.costs import model_costs
from optimum_prune.planning.depth import depth_outlook
from optimum_prune.planning.plan import Plan, PlannedTotal
from optimum_prune.planning.table import percent
from optimum_prune.planning.width import width_outlook
from optimum_prune.planning.zeros import zeros_outlook
from optimum_prune.ranked import difference
from optimum_prune.refit import few_tokens
from optimum_prune.scorers.base import Scorer
from optimum_prune.structured import Targets

NONE = Range(0, 0)
PADDED = (
    "The checkpoint is padded: what is counted here has its padding in it, and the run will ask for a model without it "
    "(optimum-cli prune convert)."
)


def make_plan(
    model: PreTrainedModel,
    config: PruningConfig,
    tensor_parallel: int = 1,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: Any = None,
    skeleton: bool = False,
    layout: str = "auto",
    class_switch: bool = False,
) -> Plan:
    """Plan a run.

    Args:
        model: left as it was.
        config: of the run.
        tensor_parallel: devices among which heads and MLP channels are to be divided; the run knows nothing of it.
        tokenizer: of the run.
        processor: of the run.
        skeleton: the model stands for one that is not loaded: weights, tokenizer and processor are not there to be
            refused.
        layout: that the result is to be saved in; see `Pruner.save_pretrained`.
        class_switch: likewise.

    Raises:
        PruningError: whatever the run would refuse before it reads data, or its save.
    """
    PruningConfig.check_type(config)
    devices = checks.integer(1)("tensor_parallel", tensor_parallel)
    scorer = load_scorer(config)
    targets = find_targets_of(model, config, scorer)
    if not skeleton:
        targets.check(model)
        check_unpadded(model)
    if needs_data(config, scorer):
        check_calibration(
            config.calibration,
            model,
            tokenizer,
            processor=processor,
            default_seq_len=scorer.seq_len,
            image_stack=image_stack(model, targets.asked),
            predicts=scorer.predicts or config.calibration.selection == "kl",
            skeleton=skeleton,
        )
    if isinstance(targets, DepthTargets):
        outlook = depth_outlook(model, targets, config, scorer)
    elif isinstance(targets, MaskTargets):
        outlook = zeros_outlook(model, targets, config.induction)
    else:
        outlook = width_outlook(model, targets, devices)
    cut = targets.groups if isinstance(targets, Targets) else []
    before = model_costs(model)
    plan = Plan(
        config=config.to_dict(),
        model_type=adapter_for(model).model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        asked=targets.sparsity,
        allocation=targets.allocation,
        gamma=targets.gamma or None,
        tensor_parallel=devices,
        groups=outlook.groups,
        totals=outlook.totals,
        before=before,
        after={
            name: _left(cost, [gone[name] for gone in outlook.removed if name in gone]) for name, cost in before.items()
        },
        layout=outlook.layout,
        warnings=[
            *_differences(outlook.totals, config.kind),
            *targets.notes,
            *outlook.warnings,
            *_few_tokens(model, targets, config, scorer),
            *([PADDED] if skeleton and says_padded(model) else []),
            *_undivided(model, {group.name for group in cut}, devices),
        ],
    )
    plan.check_layout(layout, class_switch)
    rehearse(model, config, scorer, layout, class_switch)
    return plan


def _left(before: int, removed: Iterable[Range]) -> Range:
    gone = sum(removed, NONE)
    return Range(before - gone.highest, before - gone.lowest)


def _differences(totals: Iterable[PlannedTotal], kind: str) -> list[str]:
    """Word what the run will warn of, where all that may be achieved is too far from what is asked."""
    return [
        difference(total.unit, total.stack, total.asked, percent(total.achieved), REASONS[kind])
        for total in totals
        if max(total.achieved) > 0  # else it is in the notes, with its reason
        and (total.asked - max(total.achieved) > TOLERANCE or min(total.achieved) - total.asked > TOLERANCE)
    ]


def _few_tokens(
    model: PreTrainedModel, targets: Targets | DepthTargets | MaskTargets, config: PruningConfig, scorer: Scorer
) -> list[str]:
    """Word that all samples at their full length are too few tokens for least squares."""
    if not isinstance(targets, Targets) or targets.compensation not in ("least_squares", "sequential"):
        return []
    request = resolve(config.calibration, model, scorer.seq_len, "random")
    if request.model == "image-text":  # the tokens of images come on top
        return []
    widest = max(linear.weight.shape[1] for group in targets.groups for linear in group.readers)
    samples = config.calibration.num_samples
    return few_tokens(samples * request.seq_len, widest, samples)


def _undivided(model: PreTrainedModel, cut: Collection[str], devices: int) -> list[str]:
    """Word that the devices cannot divide what is not cut."""
    left_alone = [group for group in bind(model) if group.declared.default and group.name not in cut]
    odd = {(group.unit, group.stack): group.num_units for group in left_alone if group.num_units % devices}
    return [
        f"{unit} of {stack}: tensor_parallel={devices} does not divide the {units} of a layer that is not cut."
        for (unit, stack), units in odd.items()
    ]
