"""What is compared, resolved against a model: whatever can be refused is refused here, before the first run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import PreTrainedModel

from optimum_prune.calibration.data import CalibrationData, load_samples
from optimum_prune.calibration.refusals import check_calibration
from optimum_prune.calibration.request import resolve
from optimum_prune.comparing.naming import SELECTION, at, named, within
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.depth import DepthTargets
from optimum_prune.errors import CalibrationError, InvalidConfig
from optimum_prune.masking import MaskTargets
from optimum_prune.pipeline import find_targets_of, image_stack, load_scorer, needs_data
from optimum_prune.scorers.base import Scorer
from optimum_prune.selection import widened
from optimum_prune.structured import Targets
from optimum_prune.wrapping import check_language_model


@dataclass(frozen=True)
class Trial:
    """One setting at one sparsity.

    Attributes:
        name: of the setting.
        config: with this sparsity.
        scorer: of the config.
        targets: of the config in the model.
    """

    name: str
    config: PruningConfig
    scorer: Scorer
    targets: Targets | DepthTargets | MaskTargets

    @property
    def needs_data(self) -> bool:
        """Whether anything looks at calibration data."""
        return needs_data(self.config, self.scorer)

    @property
    def selects(self) -> bool:
        """Whether it chooses among several calibration batches."""
        return self.needs_data and self.config.calibration.selection == "kl"

    @property
    def predicts(self) -> bool:
        """Whether it looks at predictions of next tokens."""
        return self.scorer.predicts or self.selects

    @property
    def scores_first(self) -> bool:
        """Whether all scores are there before anything goes, and choosing takes no time of its own."""
        return not isinstance(self.targets, MaskTargets) and self.config.steps == 1


def prepare(
    model: PreTrainedModel,
    settings: Sequence[PruningConfig] | Mapping[str, PruningConfig],
    sparsities: Sequence[float] | None,
    *,
    skeleton: bool = False,
) -> list[Trial]:
    """Find what every setting targets at every sparsity.

    Args:
        model: left as it was.
        settings: see `compare`.
        sparsities: see `compare`.
        skeleton: the model stands for one that is not loaded, so it has no weights to be refused.

    Raises:
        PruningError: whatever a run would refuse before it reads data; the setting is named.
    """
    check_language_model(model, "compared")
    trials = [within(name, _trial, model, name, config, skeleton) for name, config in at(named(settings), sparsities)]
    shared = None
    for trial in filter(lambda trial: trial.needs_data, trials):
        shared = shared or trial
        ours, theirs = _without_selection(trial.config.calibration), _without_selection(shared.config.calibration)
        if ours != theirs:
            differing = [f.name for f in fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)]
            raise InvalidConfig(
                f"Settings {shared.name!r} and {trial.name!r} differ in calibration ({', '.join(differing)}), but all "
                f"are compared on one draw of data. Only {' and '.join(SELECTION)} may differ."
            )
    return trials


def _trial(model: PreTrainedModel, name: str, config: PruningConfig, skeleton: bool) -> Trial:
    scorer = load_scorer(config)
    targets = find_targets_of(model, config, scorer)
    if not skeleton:
        targets.check(model)
    return Trial(name, config, scorer, targets)


def _without_selection(calibration: CalibrationConfig) -> CalibrationConfig:
    return replace(calibration, **{f.name: f.default for f in fields(calibration) if f.name in SELECTION})


@dataclass(frozen=True)
class Draw:
    """What all trials together ask of calibration data.

    Attributes:
        config: of the one draw; its `num_samples` are enough for every trial.
        seq_len: stands in for a `config.seq_len` of None: the longest that a scorer recommends.
        image_stack: a stack that is pruned and reads nothing but images, if any is.
        needed: samples for each trial, by its position; 0 where it looks at none.
    """

    config: CalibrationConfig
    seq_len: int | None
    image_stack: str | None
    needed: list[int]


def draw_for(model: PreTrainedModel, trials: Sequence[Trial]) -> Draw | None:
    """Ask for the data of all trials at once; None where none looks at any."""
    asking = [trial for trial in trials if trial.needs_data]
    if not asking:
        return None
    shared = _without_selection(asking[0].config.calibration)
    default = max((trial.scorer.seq_len for trial in asking if trial.scorer.seq_len is not None), default=None)
    seq_len = resolve(shared, model, default, "random").seq_len
    needed = [
        0
        if not trial.needs_data
        else widened(trial.config.calibration, seq_len).num_samples
        if trial.selects
        else shared.num_samples
        for trial in trials
    ]
    pictures = (image_stack(model, trial.targets.asked) for trial in asking)
    return Draw(
        replace(shared, num_samples=max(needed)), default, next((name for name in pictures if name), None), needed
    )


def check_draw(model: PreTrainedModel, trials: Sequence[Trial]) -> None:
    """Refuse what `load_draw` would refuse before it reads a sample; `model` may be a skeleton."""
    if draw := draw_for(model, trials):
        options: dict[str, Any] = {"default_seq_len": draw.seq_len, "image_stack": draw.image_stack}
        options["predicts"] = any(trial.predicts for trial in trials)
        check_calibration(draw.config, model, skeleton=True, **options)


def load_draw(
    model: PreTrainedModel, trials: Sequence[Trial], tokenizer: Any, processor: Any
) -> list[CalibrationData | None]:
    """Draw calibration data once; return what each trial gets of it.

    Raises:
        CalibrationError: it cannot be read, does not fit the model, or is too little for the choice of a setting.
    """
    draw = draw_for(model, trials)
    if draw is None:
        return [None] * len(trials)
    drawn = load_samples(
        draw.config,
        model,
        tokenizer,
        processor=processor,
        default_seq_len=draw.seq_len,
        image_stack=draw.image_stack,
    )
    for trial, needed in zip(trials, draw.needed, strict=True):
        if trial.selects and len(drawn.samples) < needed:
            raise CalibrationError(
                f"Setting {trial.name!r}: selection='kl' needs {needed} samples; {drawn.source} gives only "
                f"{len(drawn.samples)}. Lower candidates, num_samples or seq_len, or leave selection out."
            )
    parts = {needed: drawn.part(range(min(needed, len(drawn.samples)))) for needed in {*draw.needed} - {0}}
    found = [parts.get(needed) for needed in draw.needed]
    for trial, part in zip(trials, found, strict=True):
        if part is not None and trial.predicts:
            within(trial.name, part.check_predicts)
    return found
