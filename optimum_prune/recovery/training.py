"""A transformers Trainer with our loss: everything else - schedule, logs, checkpoints, resuming - is its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from optimum_prune import processes
from optimum_prune.errors import CheckpointError
from optimum_prune.recovery.adapter import WEIGHTS
from optimum_prune.recovery.arguments import arguments, own_random_state
from optimum_prune.recovery.callbacks import LossBar, StopDiverged
from optimum_prune.recovery.checkpoints import STATE, latest
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.objective import Collate, Objective


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
    checkpoint = latest(directory)
    if checkpoint is not None and (state := _finished(checkpoint)) is not None:
        if (best := _best(state, directory)) is not None:
            adapted.load_adapter(str(best), adapted.active_adapter)
        return Trained.of(state)
    bar = LossBar()
    callbacks: list[TrainerCallback] = [bar, StopDiverged()]
    if config.patience is not None:
        callbacks.append(EarlyStoppingCallback(config.patience))
    with own_random_state():
        trainer = RecoveryTrainer(
            objective,
            model=adapted,
            args=arguments(config, directory, on_cpu=next(adapted.parameters()).device.type == "cpu"),
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
    _best(trainer.state, directory)  # where it is gone, the Trainer goes on with the last
    return Trained.of(trainer.state)


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
        metrics = processes.from_main({f"{metric_key_prefix}_loss": self.objective.of_losses(losses)})
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _curve(history: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    names = {"loss": "train", "eval_loss": "held_out"}
    return [
        {"step": row["step"], name: float(row[key])}
        for row in history
        for key, name in names.items()
        if key in row and math.isfinite(row[key])  # JSON has no word for the others
    ]


def _finished(checkpoint: Path) -> TrainerState | None:
    """Return the state of a training that had come to its end; a Trainer would train it a step further."""
    state: Any = TrainerState.load_from_json(str(checkpoint / STATE))
    stopped = state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]
    return state if stopped else None


def _best(state: Any, directory: Path) -> Path | None:
    """Return the checkpoint of the best step, if there is one.

    Raises:
        CheckpointError: it is gone.
    """
    if not state.best_global_step:
        return None
    checkpoint = directory / f"checkpoint-{state.best_global_step}"
    if not (checkpoint / WEIGHTS).is_file():  # PEFT would look for it on the Hub
        raise CheckpointError(f"{checkpoint} has no {WEIGHTS} any more. Delete the folder that it is in to begin anew.")
    return checkpoint
