"""Run a comparison: every setting is tried on the same data, and the model is put back after each."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

import optimum_prune
from optimum_prune import checks
from optimum_prune.calibration.data import CalibrationData, load_samples
from optimum_prune.calibration.passages import passages
from optimum_prune.comparing.naming import within
from optimum_prune.comparing.passes import Passes
from optimum_prune.comparing.ranks import Ranks, ranks_of, spearman
from optimum_prune.comparing.results import Comparison, Row
from optimum_prune.comparing.trials import Trial, load_draw, prepare
from optimum_prune.comparing.trying import pruned
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.context import Seen, context
from optimum_prune.errors import InvalidConfig, UnsupportedModel
from optimum_prune.evaluation import DenseReference, dense_reference, evaluate_model
from optimum_prune.measurements import check_evaluation
from optimum_prune.plots.style import check_installed
from optimum_prune.processes import is_main
from optimum_prune.selection import select
from optimum_prune.structured import Targets


# Under a caller's inference mode no gradient could be taken.
@torch.inference_mode(False)
def compare(
    model: PreTrainedModel,
    settings: Sequence[PruningConfig] | Mapping[str, PruningConfig],
    evaluation: CalibrationConfig,
    sparsities: Sequence[float] | None = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
) -> Comparison:
    """Try several settings on one model, and leave it as it was, to the bit.

    Whatever can be refused is refused before the first run. Calibration data is drawn once for all; where its `seq_len`
    is None, samples are as long as the longest that any of the scorers recommends.

    Args:
        model: any supported language model.
        settings: by name; or a sequence, whose names are made from what differs.
        evaluation: the data to measure on; its first samples are used.
        sparsities: every setting is tried at each of them; None: each at its own.
        directory: to write to: the JSON after every row, table and picture at the end.
        tokenizer: needed where data is text.
        processor: of a multimodal model.

    Raises:
        PruningError: one of its kinds; says what to do, and of which setting.
    """
    check_evaluation(evaluation.source, evaluation.selection)
    trials = prepare(model, settings, sparsities)
    directory = directory if is_main() else None  # one of several writes
    if directory is not None:
        check_directory(directory)
    held_out = load_samples(evaluation, model, tokenizer, processor=processor, order="first")
    held_out.check_predicts()
    data = load_draw(model, trials, tokenizer, processor)
    reference = dense_reference(model, held_out, batch_size=evaluation.batch_size)
    if reference is None and (chooser := next((trial.name for trial in trials if trial.selects), None)):
        raise UnsupportedModel(f"Setting {chooser!r}: selection='kl' cannot measure the KL of {type(model).__name__}.")
    dense = evaluate_model(model, held_out, batch_size=evaluation.batch_size)
    described: dict[str, dict[str, Any]] = {}
    for trial in trials:
        described.setdefault(trial.name, trial.config.to_dict())
    found = Comparison(
        settings=described,
        dense=replace(dense, context=context(_seen(data), held_out)),
        rows=[],
        correlations={},
        calibration=_described(data),
        versions={
            "optimum_prune": optimum_prune.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )
    runner = _Runner(model, held_out, evaluation.batch_size, reference, Passes(model, trials, data))
    for trial, part in zip(tqdm(trials, desc="Comparison", unit="setting"), data, strict=True):
        found.rows.append(within(trial.name, runner.row, trial, part))
        found.correlations = _correlations(runner.ranks)
        if directory is not None:
            found.write_json(directory)
    if directory is not None:
        found.save(directory)
    return found


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Make the folder, and refuse one that cannot be written to, or a missing matplotlib.

    Raises:
        InvalidConfig: saying what to do.
    """
    if not isinstance(directory, str | os.PathLike):
        raise checks.refuse("directory", "None or a path", directory)
    check_installed()
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"directory {str(directory)!r} cannot be made: {error.strerror}.") from error
    if not os.access(directory, os.W_OK):
        raise InvalidConfig(f"directory {str(directory)!r} cannot be written to.")


class _Runner:
    """Tries one setting after the other.

    Attributes:
        ranks: name of a structured setting -> ranks of its units.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        held_out: CalibrationData,
        batch_size: int,
        reference: DenseReference | None,
        passes: Passes,
    ):
        self._model, self._held_out, self._batch_size = model, held_out, batch_size
        self._reference, self._passes = reference, passes
        self.ranks: dict[str, Ranks] = {}

    def row(self, trial: Trial, data: CalibrationData | None) -> Row:
        """Score, prune on trial, evaluate, and put everything back."""
        data, seconds = self._chosen(trial, data)
        scored = self._passes.scored(trial, data) if trial.scores_first else None
        if scored is not None and isinstance(trial.targets, Targets):
            self.ranks.setdefault(trial.name, ranks_of(trial.targets, scored.scores))
        with pruned(self._model, trial, scored, data) as pruning:
            measured = evaluate_model(
                self._model, self._held_out, batch_size=self._batch_size, reference=self._reference
            )
        return Row(
            setting=trial.name,
            asked=trial.targets.sparsity,
            achieved=pruning.achieved,
            perplexity=measured.perplexity,
            kl=measured.kl,
            accuracy=measured.accuracy,
            scoring_seconds=None if scored is None else seconds + scored.seconds,
            pruning_seconds=pruning.seconds if scored is not None else seconds + pruning.seconds,
            peak_bytes=pruning.peak if scored is None else scored.peak,
            notes=list(trial.targets.notes),
        )

    def _chosen(self, trial: Trial, data: CalibrationData | None) -> tuple[CalibrationData | None, float]:
        """Choose a trial's calibration batch, where it asks for that; return the seconds it took, too."""
        if not trial.selects:
            return data, 0.0
        assert data is not None, "data is drawn for every setting that chooses among it"
        chosen, selection = select(self._model, trial.targets, trial.scorer, trial.config, data)
        return chosen, selection.seconds


def _correlations(ranks: Mapping[str, Ranks]) -> dict[str, dict[str, float | None]]:
    if len(ranks) < 2:
        return {}
    return {name: {other: spearman(own, theirs) for other, theirs in ranks.items()} for name, own in ranks.items()}


def _seen(data: Sequence[CalibrationData | None]) -> list[Seen]:
    """Return all that the settings are given; parts of one draw begin with the same samples."""
    largest = max((part for part in data if part is not None), key=lambda part: len(part.samples), default=None)
    return [] if largest is None else [Seen("calibrated", [largest.origin], passages(largest.rows()))]


def _described(data: Sequence[CalibrationData | None]) -> dict[str, Any] | None:
    """Describe what a setting is given that chooses among nothing; others are given more of the same draw."""
    smallest = min((part for part in data if part is not None), key=lambda part: len(part.samples), default=None)
    return None if smallest is None else smallest.to_dict()
