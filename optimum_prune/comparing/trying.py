"""A live model that computes for a while as if it were pruned."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from optimum_prune.calibration.data import CalibrationData
from optimum_prune.comparing.memory import measured_peak
from optimum_prune.comparing.passes import Scored
from optimum_prune.comparing.trials import Trial
from optimum_prune.depth import DepthTargets
from optimum_prune.masking import MaskTargets
from optimum_prune.structured import Targets


@dataclass(frozen=True)
class Pruning:
    """What pruning on trial did and took.

    Attributes:
        achieved: fraction of the targeted weights that is gone.
        seconds: for all that was not done before.
        peak: bytes on top of the model, what is kept to put back not counted; None where it cannot be measured.
    """

    achieved: float
    seconds: float
    peak: int | None


@contextmanager
def pruned(
    model: PreTrainedModel, trial: Trial, scored: Scored | None, data: CalibrationData | None
) -> Iterator[Pruning]:
    """Prune on trial.

    Args:
        model: is afterwards as it was, whatever happens.
        trial: what to do.
        scored: scores of the trial, where they are all there before anything goes.
        data: of the trial.
    """
    targets, run = trial.targets, (model, trial.scorer, data, trial.config)
    with ExitStack() as stack:
        with measured_peak(model) as peak:
            start = time.perf_counter()
            if isinstance(targets, MaskTargets):
                stack.enter_context(targets.trial(*run))
                achieved, copies = _zeros(targets), sum(target.linear.weight.nbytes for target in targets.targets)
            elif isinstance(targets, Targets):
                kept = stack.enter_context(targets.rehearsal(*run, None if scored is None else scored.scores))
                achieved, copies = _removed(_unit_weights(targets), kept), 0
            else:
                assert scored is not None, "layers are scored before any is hidden"
                kept = targets.choose(scored.scores)
                stack.enter_context(targets.hidden(model, kept))
                achieved, copies = _removed(_layer_weights(targets), kept), 0
            seconds = time.perf_counter() - start
        yield Pruning(achieved, seconds, None if peak.bytes is None else max(peak.bytes - copies, 0))


def _removed(weights: Mapping[str, tuple[int, int]], kept: Mapping[str, Tensor]) -> float:
    """Return the fraction of weights that goes with what is not kept; `weights`: name -> (number, those of a unit)."""
    left = sum(len(kept[name]) * unit for name, (_, unit) in weights.items())
    return 1 - left / sum(number for number, _ in weights.values())


def _unit_weights(targets: Targets) -> dict[str, tuple[int, int]]:
    return {group.name: (group.weights, group.weights // group.num_units) for group in targets.groups}


def _layer_weights(targets: DepthTargets) -> dict[str, tuple[int, int]]:
    return {layer.name: (layer.weights, layer.weights) for pool in targets.pools for layer in pool.layers}


def _zeros(targets: MaskTargets) -> float:
    weights = [target.linear.weight for target in targets.targets]
    return 1 - sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)
