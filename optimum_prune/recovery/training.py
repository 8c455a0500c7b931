"""A transformers Trainer with our loss: everything else - schedule, logs, checkpoints, resuming - is its own."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.logging import tqdm

from optimum_prune.checks import refuse
from optimum_prune.errors import CheckpointError, InvalidConfig, PruningError, unknown
from optimum_prune.recovery.adapter import WEIGHTS
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.objective import Collate, Objective

GOVERNED = {
    "output_dir": "recover(directory=...)",
    "max_steps": "max_steps",
    "num_train_epochs": "max_steps",
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "gradient_checkpointing": "gradient_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    "seed": "seed",
    "data_seed": "seed",
    "eval_steps": "evaluations",
    "save_steps": "evaluations",
    "resume_from_checkpoint": "recover(directory=...)",
    "use_cpu": "the device that the model is on",
    "per_device_eval_batch_size": "batch_size",
    "warmup_ratio": "warmup",
    "label_smoothing_factor": "loss",
    "push_to_hub": "Pruner.push_to_hub()",
}
"""Field of TrainingArguments -> what says it here."""
FIXED = (
    "eval_strategy",
    "save_strategy",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "remove_unused_columns",
    "restore_callback_states_from_checkpoint",
)
"""Fields of TrainingArguments on which keeping the best step depends."""
STATE = "trainer_state.json"
"""File of a checkpoint that a Trainer writes last."""
LOGS = 50
"""Points of the loss curve."""


@dataclass(frozen=True)
class Trained:
    """How a training went.

    Attributes:
        steps: steps trained.
        best_step: the step whose adapter the model has now; 0 where no step had a finite loss.
        diverged: the step that was found to have none, and ended the training; else None.
        curve: see `RecoveryReport.curve`.
    """

    steps: int
    best_step: int
    diverged: int | None
    curve: list[dict[str, float]]

    @classmethod
    def of(cls, state: TrainerState) -> "Trained":
        """Read what a Trainer remembers."""
        losses = {int(row["step"]): row["eval_loss"] for row in state.log_history if "eval_loss" in row}
        diverged = next((step for step, loss in losses.items() if not math.isfinite(loss)), None)
        return cls(state.global_step, int(state.best_global_step or 0), diverged, _curve(state.log_history))


def check_trainer_options(options: dict[str, Any] | None) -> None:
    """Refuse fields that TrainingArguments does not have or does not take, and those that a RecoveryConfig governs.

    Raises:
        InvalidConfig: naming the field, and where to say it.
    """
    known = {option.name: option.default for option in fields(TrainingArguments)}
    for name, value in (options or {}).items():
        if name in GOVERNED:
            raise InvalidConfig(f"trainer_options cannot set {name}; say it by {GOVERNED[name]}.")
        if name in FIXED:
            raise InvalidConfig(f"trainer_options cannot set {name}: that the best step is kept depends on it.")
        if name not in known:
            raise InvalidConfig(unknown("field of TrainingArguments", name, list(known)))
        if type(known[name]) in (int, float) and type(value) not in (int, float, type(None)):
            raise refuse(f"trainer_options[{name!r}]", "a number", value)
    given = {"output_dir": "", "use_cpu": not torch.cuda.is_available(), "report_to": "none"} | (options or {})
    try:
        arguments = TrainingArguments(**given)
    except (ValueError, TypeError, ImportError) as error:
        raise InvalidConfig(f"trainer_options are refused by TrainingArguments: {error}") from error
    try:
        if arguments.use_liger_kernel:
            raise ValueError("use_liger_kernel changes the model's class for good")
        with _own_random_state(), TemporaryDirectory() as folder:  # which it makes
            arguments.output_dir = folder
            Trainer(nn.Linear(1, 1), arguments)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise InvalidConfig(f"trainer_options are refused by the Trainer: {error}") from error


def train(
    adapted: Any,
    config: RecoveryConfig,
    objective: Objective,
    samples: Sequence[dict[str, Tensor]],
    held_out: Sequence[dict[str, Tensor]],
    collate: Collate,
    directory: Path,
) -> Trained:
    """Train what requires a gradient, and leave the model with the best step's adapter.

    Args:
        adapted: a model with an adapter, as PEFT makes it.
        config: how.
        objective: what is made small.
        samples: features of each sample.
        held_out: those by which steps are compared.
        collate: makes a batch of features.
        directory: of the checkpoints. Whole ones that are there already are resumed from.
    """
    checkpoint = _latest_checkpoint(directory)
    if checkpoint is not None and (state := _finished(checkpoint)) is not None:
        if state.best_global_step:
            _load_adapter(adapted, directory / f"checkpoint-{state.best_global_step}")
        return Trained.of(state)
    bar = LossBar()
    callbacks: list[TrainerCallback] = [bar, StopDiverged()]
    if config.patience is not None:
        callbacks.append(EarlyStoppingCallback(config.patience))
    with _own_random_state():
        trainer = RecoveryTrainer(
            objective,
            model=adapted,
            args=_arguments(config, directory, on_cpu=next(adapted.parameters()).device.type == "cpu"),
            data_collator=collate,
            train_dataset=list(samples),
            eval_dataset=list(held_out),
            callbacks=callbacks,
        )
        for printing in (ProgressCallback, PrinterCallback):  # LossBar shows the same in one line
            trainer.remove_callback(printing)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            bar.close()
            # Autocast is for training alone: what is measured from here on is measured as before it.
            trainer.accelerator.unwrap_model(adapted, keep_fp32_wrapper=False)
    return Trained.of(trainer.state)


def _arguments(config: RecoveryConfig, directory: Path, *, on_cpu: bool) -> TrainingArguments:
    every = max(1, math.ceil(config.max_steps / config.evaluations))
    options: dict[str, Any] = {
        "max_steps": config.max_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.schedule if config.schedule != "constant" else "constant_with_warmup",
        "warmup_steps": round(config.warmup * config.max_steps),
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "logging_steps": max(1, config.max_steps // LOGS),
        "logging_first_step": True,
        "save_total_limit": 2,
        "report_to": "none",
        "use_cpu": on_cpu,
        "seed": config.seed,
        **(config.trainer_options or {}),
        "eval_strategy": "steps",
        "eval_steps": every,
        "save_strategy": "steps",
        "save_steps": every,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "remove_unused_columns": False,
        "restore_callback_states_from_checkpoint": True,  # how long patience has lasted already
    }
    return TrainingArguments(output_dir=str(directory), **options)


class RecoveryTrainer(Trainer):
    """A Trainer whose loss is an `Objective`, a mean over the predicted tokens of a whole step."""

    loss_is_scaled_for_ga = True

    def __init__(self, objective: Objective, **kwargs: Any):
        super().__init__(**kwargs)
        self.objective = objective
        self.model_accepts_loss_kwargs = True  # so that the tokens of a step are counted

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the share of a batch in the loss of its step."""
        sums = self.objective.sums(model, inputs)
        loss = self.objective.mix(sums.lm, sums.kl) / (
            sums.tokens if num_items_in_batch is None else num_items_in_batch
        )
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over them
        return (loss, {}) if return_outputs else loss

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Measure the held-out samples, weighting tokens alike."""
        samples: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        model: Any = self.accelerator.unwrap_model(self.model)
        losses = self.objective.measure(model, samples, self.data_collator, self.args.train_batch_size)
        metrics = {f"{metric_key_prefix}_loss": self.objective.of_losses(losses)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class LossBar(TrainerCallback):
    """A progress bar of the steps, with the latest losses."""

    _bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar."""
        self._bar = tqdm(desc="Recovery", unit="step", total=state.max_steps, initial=state.global_step)
        self._shown: dict[str, str] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move it by a step."""
        self._bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show what was logged."""
        for key, name in (("loss", "loss"), ("eval_loss", "held out")):
            if key in (logs or {}):
                self._shown[name] = f"{float((logs or {})[key]):.4f}"
        self._bar.set_postfix(self._shown)

    def close(self) -> None:
        """Close it, also after an error."""
        if self._bar is not None:
            self._bar.close()


class StopDiverged(TrainerCallback):
    """Ends a training whose held-out loss is not finite any more: no step mends that."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Ask for it."""
        if not math.isfinite(metrics["eval_loss"]):
            control.should_training_stop = True


def _curve(history: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    names = {"loss": "train", "eval_loss": "held_out"}
    return [
        {"step": row["step"], name: float(row[key])}
        for row in history
        for key, name in names.items()
        if key in row and math.isfinite(row[key])  # JSON has no word for the others
    ]


def _latest_checkpoint(directory: Path) -> Path | None:
    """Return the last checkpoint that is whole."""
    found = [path for path in directory.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            json.loads((path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return path
    return None


def _finished(checkpoint: Path) -> TrainerState | None:
    """Return the state of a training that had come to its end; a Trainer would train it a step further."""
    state: Any = TrainerState.load_from_json(str(checkpoint / STATE))
    stopped = state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]
    return state if stopped else None


def _load_adapter(adapted: Any, checkpoint: Path) -> None:
    if not (checkpoint / WEIGHTS).is_file():  # PEFT would look for it on the Hub
        raise CheckpointError(f"{checkpoint} has no {WEIGHTS} any more. Delete the folder that it is in to begin anew.")
    adapted.load_adapter(str(checkpoint), adapted.active_adapter)


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn what a full disk or a damaged file of the checkpoints raises into one error.

    Raises:
        CheckpointError: with what to do.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save has no other kind of error for a disk that is full
        if isinstance(error, PruningError) or (type(error) is RuntimeError and "stream" not in str(error).lower()):
            raise
        raise CheckpointError(
            f"The checkpoints in {directory} cannot be written or read: {error}. Make room there, or delete the one "
            "that is damaged; with the same directory= the training goes on from the last that is whole."
        ) from error


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Give the caller's random state back: a Trainer seeds everything."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
