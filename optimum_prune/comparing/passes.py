"""Scores that several trials share: one pass over the data for all that look at the same things."""

import json
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from optimum_prune.calibration.data import CalibrationData
from optimum_prune.comparing.memory import measured_peak
from optimum_prune.comparing.trials import Trial
from optimum_prune.masking import MaskTargets
from optimum_prune.scorers.base import Scorer
from optimum_prune.scoring import score_groups
from optimum_prune.structured import Targets


@dataclass(frozen=True)
class Scored:
    """The scores of one trial, and what they cost.

    Attributes:
        scores: by name of the group or layer; larger = keep.
        seconds: that a pass takes which makes them.
        peak: bytes that the pass takes on top of the model; None where that cannot be measured.
    """

    scores: Mapping[str, Tensor]
    seconds: float
    peak: int | None


class Passes:
    """Scores of trials, made when they are first asked for.

    A pass serves all sparsities, and all scorers that look at the same gradients or inputs: for one of them alone it
    would take as long and as much memory, so both are reported of each.
    """

    def __init__(self, model: PreTrainedModel, trials: Sequence[Trial], data: Sequence[CalibrationData | None]):
        self._model = model
        self._trials = list(zip(trials, data, strict=True))
        self._done: dict[Hashable, Scored] = {}

    def scored(self, trial: Trial, data: CalibrationData | None) -> Scored:
        """Return the scores of a trial whose scores are all there before anything goes.

        Args:
            trial: one of those given.
            data: what it is scored on: its part of the draw; or samples that were chosen for it alone.
        """
        if trial.selects:
            return next(iter(self._run([trial], data).values()))
        if (key := _scorer_key(trial)) not in self._done:
            alike = [t for t, d in self._trials if d is data and _pass_key(t) == _pass_key(trial)]
            self._done |= self._run(alike, data)
        return self._done[key]

    def _run(self, trials: Sequence[Trial], data: CalibrationData | None) -> dict[Hashable, Scored]:
        first = trials[0]
        assert not isinstance(first.targets, MaskTargets), "weights are scored and set to zero in turn"
        scorers: dict[Hashable, Scorer] = {_scorer_key(trial): trial.scorer for trial in trials}
        with measured_peak(self._model) as peak:
            start = time.perf_counter()
            if isinstance(first.targets, Targets):
                found = score_groups(
                    self._model,
                    first.targets.groups,
                    list(scorers.values()),
                    data=data,
                    batch_size=first.config.calibration.batch_size,
                    seed=first.config.seed,
                )
            else:
                found = [first.targets.score(self._model, first.scorer, data, first.config)]
            seconds = time.perf_counter() - start
        return {key: Scored(scores, seconds, peak.bytes) for key, scores in zip(scorers, found, strict=True)}


def _pass_key(trial: Trial) -> Hashable:
    """Return what is equal for trials whose scores one pass makes."""
    scorer = trial.scorer
    if not (trial.scores_first and isinstance(trial.targets, Targets) and scorer.needs_data) or trial.selects:
        return _scorer_key(trial)
    return _targeted(trial), scorer.objectives, scorer.gates, scorer.inputs, scorer.reads


def _scorer_key(trial: Trial) -> Hashable:
    """Return what is equal for trials that have the same scores."""
    options = json.dumps(trial.config.scorer_options or {}, sort_keys=True)
    seed = None if trial.scorer.needs_data else trial.config.seed
    alone = trial.name if trial.selects or not trial.scores_first else None
    return _targeted(trial), trial.config.scorer, options, seed, alone


def _targeted(trial: Trial) -> tuple[str, ...]:
    """Return the names of all groups or layers that a trial scores."""
    kind = trial.config.kind  # a group of units and a sub-layer may have one name
    if isinstance(trial.targets, Targets):
        return kind, *(group.name for group in trial.targets.groups)
    if isinstance(trial.targets, MaskTargets):
        return (kind,)
    return kind, *(layer.name for pool in trial.targets.pools for layer in pool.layers)
