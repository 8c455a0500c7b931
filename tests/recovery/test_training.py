"""The training: its curve, the step that is kept, when it ends, and what it leaves alone."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optimum_prune.errors import InvalidConfig
from optimum_prune.recovery.arguments import FIXED, GOVERNED, check_trainer_options
from optimum_prune.recovery.data import load_training_data
from optimum_prune.recovery.lora import attach
from optimum_prune.recovery.objective import Objective
from optimum_prune.recovery.report import Losses
from optimum_prune.recovery.teacher import collating, indexed
from optimum_prune.recovery.training import RecoveryTrainer, train
from tests.models import llama
from tests.pruned import holes
from tests.recovery.runs import adapter, config

BRISK = {"learning_rate": 0.1, "schedule": "constant", "warmup": 0.0}


@dataclass(frozen=True)
class Scripted(Objective):
    """Gives out held-out losses that were written before, and remembers the adapters that it was to measure."""

    script: list[float] = field(default_factory=list)
    measured: list[dict[str, Tensor]] = field(default_factory=list)

    def measure(self, model, samples, collate, batch_size):
        self.measured.append(adapter(model))
        return Losses(self.script[len(self.measured) - 1])


class Run:
    """A training, and what it was of."""

    def __init__(self, folder, script=None, **options):
        self.model, self.config, self.folder = holes(llama()), config(**options), folder
        data = load_training_data(self.config, self.model)
        self.objective: Any = Objective.of(self.config, self.model, None)
        if script is not None:
            self.objective = Scripted(0.0, None, True, script)
        self.collate = collating(data.collate, shifted=True)
        self.samples, self.held_out = indexed(data.train), indexed(data.held_out)
        self.adapted = attach(self.model, self.config)

    def train(self):
        self.trained = train(
            self.adapted, self.config, self.objective, self.samples, self.held_out, self.collate, self.folder
        )
        return self

    @property
    def held_out_losses(self):
        return {row["step"]: row["held_out"] for row in self.trained.curve if "held_out" in row}

    def has(self, wanted):
        return all(torch.equal(tensor, wanted[name]) for name, tensor in adapter(self.adapted).items())


@pytest.fixture(scope="module")
def up_again(tmp_path_factory):
    """A training whose loss falls, and rises again before the end."""
    folder, cwd = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("cwd")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        run = Run(folder, [3.0, 2.0, 2.5], max_steps=7, evaluations=3, **BRISK).train()
    return run, cwd


def test_the_curve(up_again):
    run, _ = up_again
    assert run.held_out_losses == {3: 3.0, 6: 2.0, 7: 2.5}  # at the last step too
    assert [row["step"] for row in run.trained.curve if "train" in row] == [1, 2, 3, 4, 5, 6, 7]
    assert (run.trained.steps, run.trained.diverged) == (7, None)


def test_the_best_step_is_kept(up_again):
    run, _ = up_again
    assert run.trained.best_step == 6
    assert run.has(run.objective.measured[1]) and not run.has(run.objective.measured[2])


def test_no_file_is_left_where_one_works(up_again):
    run, cwd = up_again
    assert list(cwd.iterdir()) == []
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoint-6", "checkpoint-7"]


def test_nothing_but_the_adapter_is_trained(up_again):
    run, _ = up_again
    before, after = (dict(found.adapted.named_parameters()) for found in (Run(run.folder), run))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(adapter(run.adapted))


def test_held_out_samples_are_measured(tmp_path):
    run = Run(tmp_path, max_steps=2, evaluations=1).train()
    loss = run.objective.measure(run.adapted, run.held_out, run.collate, 1).lm
    assert run.held_out_losses == {2: pytest.approx(loss, rel=1e-6)}


PATIENT = {"max_steps": 12, "evaluations": 6, "patience": 2, **BRISK}
SCRIPT = [5.0, 4.0, 4.0, 4.5, 1.0, 1.0]


def test_patience(tmp_path):
    run = Run(tmp_path, SCRIPT, **PATIENT).train()
    assert run.held_out_losses == {2: 5.0, 4: 4.0, 6: 4.0, 8: 4.5}  # two were no better
    assert (run.trained.steps, run.trained.best_step) == (8, 4)
    again = Run(tmp_path, [], **PATIENT).train()  # what had come to its end is not trained on
    assert again.trained == run.trained
    assert again.has(run.objective.measured[1])


def test_patience_lasts_over_a_break(tmp_path, monkeypatch):
    stop_at_step(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path, SCRIPT, **PATIENT).train()
    monkeypatch.undo()
    run = Run(tmp_path, SCRIPT[3:], **PATIENT).train()
    assert run.held_out_losses == {2: 5.0, 4: 4.0, 6: 4.0, 8: 4.5}
    assert (run.trained.steps, run.trained.best_step) == (8, 4)


def test_a_training_that_diverges_ends(tmp_path):
    run = Run(tmp_path, max_steps=8, evaluations=4, learning_rate=1e30, schedule="constant", warmup=0.0).train()
    assert (run.trained.diverged, run.trained.best_step, run.trained.steps) == (2, 0, 2)
    assert all(math.isfinite(value) for row in run.trained.curve for value in row.values())


def test_the_callers_random_state_is_not_touched(tmp_path):
    run = Run(tmp_path, max_steps=1, dropout=0.5)
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    run.train()
    assert random.getstate() == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))
    assert torch.equal(torch.random.get_rng_state(), before[2])


# Options of the Trainer


@pytest.mark.parametrize(("name", "instead"), GOVERNED.items())
def test_what_the_config_says_is_refused(name, instead):
    with pytest.raises(InvalidConfig) as error:
        check_trainer_options({"report_to": "none", name: 1})
    assert str(error.value) == f"trainer_options cannot set {name}; say it by {instead}."


@pytest.mark.parametrize("name", FIXED)
def test_what_the_best_step_depends_on_is_refused(name):
    with pytest.raises(InvalidConfig, match=f"^trainer_options cannot set {name}: that the best step is kept"):
        check_trainer_options({name: False})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": True}, r"^trainer_options are refused by the Trainer: "),  # there is one process
        ({"report_to": "no_such_tracker"}, r"^trainer_options are refused by the Trainer: no_such_tracker"),
        (
            {"use_liger_kernel": True},
            r"^trainer_options are refused by the Trainer: use_liger_kernel changes the model",
        ),
        ({"push_to_hub": True}, r"^trainer_options cannot set push_to_hub; say it by Pruner\.push_to_hub\(\)\.$"),
        ({"max_grad_norm": "1"}, r"^trainer_options\['max_grad_norm'\] must be a number, got '1'\.$"),
        ({"logging_steps": True}, r"^trainer_options\['logging_steps'\] must be a number, got True\.$"),
    ],
)
def test_what_only_a_trainer_refuses_is_refused_before_anything_is_pruned(options, message):
    with pytest.raises(InvalidConfig, match=message):
        check_trainer_options(options)


def test_what_it_does_not_know_is_refused():
    with pytest.raises(InvalidConfig, match=r"max_grad_norms.*max_grad_norm"):
        check_trainer_options({"max_grad_norms": 1})


@pytest.mark.parametrize("options", [{"optim": "adamwx"}, {"bf16": True, "fp16": True}])
def test_what_it_does_not_take_is_refused(options):
    with pytest.raises(InvalidConfig, match=r"^trainer_options are refused by TrainingArguments: "):
        check_trainer_options(options)


def test_what_it_takes():
    check_trainer_options(None)
    check_trainer_options({"bf16": True, "logging_steps": 5, "optim": "adafactor", "weight_decay": 0.1})


def stop_at_step(monkeypatch, step):
    """Break trainings off in the forward pass of a step."""
    loss = RecoveryTrainer.compute_loss

    def broken(self, *args, **kwargs):
        if self.state.global_step + 1 >= step:
            raise KeyboardInterrupt
        return loss(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", broken)
