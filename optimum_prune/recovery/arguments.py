"""From a `RecoveryConfig` to transformers' TrainingArguments: what it says, what is fixed, what is left to the user."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from optimum_prune import processes
from optimum_prune.checks import refuse
from optimum_prune.errors import InvalidConfig, unknown
from optimum_prune.modes import plain_defaults
from optimum_prune.recovery.config import RecoveryConfig

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
LOGS = 50
"""Points of the loss curve."""


class OneDevice(TrainingArguments):
    """Arguments by which a process trains on one GPU: nn.DataParallel would multiply the batch by all it sees."""

    @property
    def n_gpu(self) -> int:
        """How many of them a batch is spread over."""
        return min(1, super().n_gpu)


@plain_defaults()
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
    given = {"output_dir": "", "use_cpu": processes.on_cpu(), "report_to": "none"} | (options or {})
    try:
        made = TrainingArguments(**given)
    except (ValueError, TypeError, ImportError) as error:
        raise InvalidConfig(f"trainer_options are refused by TrainingArguments: {error}") from error
    try:
        if made.use_liger_kernel:
            raise ValueError("use_liger_kernel changes the model's class for good")
        with own_random_state(), TemporaryDirectory() as folder:  # which it makes
            made.output_dir = folder
            Trainer(nn.Linear(1, 1), made)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise InvalidConfig(f"trainer_options are refused by the Trainer: {error}") from error


def arguments(config: RecoveryConfig, directory: Path, *, on_cpu: bool) -> TrainingArguments:
    """Word a config as transformers does.

    Args:
        config: its `trainer_options` must be checked already.
        directory: of the checkpoints.
        on_cpu: whether the model is, and is to stay there; several processes go where their launcher says.
    """
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
        "use_cpu": processes.on_cpu() if processes.launched() else on_cpu,
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
    return OneDevice(output_dir=str(directory), **options)


@contextmanager
def own_random_state() -> Iterator[None]:
    """Give the caller's random state back: a Trainer seeds everything."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
