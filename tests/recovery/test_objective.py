"""What the training makes small: tokens weigh alike, however samples are put into batches and steps."""

from typing import Any

import pytest
import torch

from optimum_prune.recovery.data import load_training_data
from optimum_prune.recovery.lora import attach
from optimum_prune.recovery.objective import Objective
from optimum_prune.recovery.teacher import LiveTeacher, collating, indexed
from optimum_prune.recovery.training import train
from tests.models import llama, source, t5
from tests.recovery.runs import adapter, config, largest_difference

BUILD = {"decoder": llama, "encoder-decoder": t5}


def prepared(model, teacher=None, **options):
    """Return a config, its objective, samples of several lengths, and what makes batches of them."""
    asked = config(dataset=source(model, 24) if model.config.is_encoder_decoder else config().dataset, **options)
    data = load_training_data(asked, model)
    objective = Objective.of(asked, model, teacher and LiveTeacher(teacher))
    samples = indexed([*data.train, *data.held_out])
    return asked, objective, samples, collating(data.collate, shifted=not model.config.is_encoder_decoder)


@pytest.mark.parametrize("build", BUILD.values(), ids=list(BUILD))
def test_it_is_the_loss_of_transformers(build):
    model = build()
    _, objective, samples, collate = prepared(model)
    for sample in samples[:3]:
        batch = collate([sample])
        with torch.no_grad():
            given = {name: values for name, values in batch.items() if name not in ("sample", "decoder_input_ids")}
            wanted = model(**given).loss.item()
        assert objective.measure(model, [sample], collate, 1).lm == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("build", BUILD.values(), ids=list(BUILD))
def test_batches_and_padding_change_nothing(build):
    model = build().train()
    _, objective, samples, collate = prepared(model, build(seed=1), loss="mix")
    alone, some, all_of_them = (objective.measure(model, samples, collate, size) for size in (1, 5, 24))
    assert alone.kl is not None and alone.kl > 0.1
    for other in (some, all_of_them):
        assert (other.lm, other.kl) == pytest.approx((alone.lm, alone.kl), rel=1e-5)
    assert all(module.training for module in model.modules())


def test_mix():
    model = llama()
    _, objective, samples, collate = prepared(model, llama(seed=1), loss="mix", kl_weight=0.25)
    losses = objective.measure(model, samples, collate, 8)
    assert losses.kl is not None
    assert objective.of_losses(losses) == pytest.approx(0.75 * losses.lm + 0.25 * losses.kl)
    _, objective, *_ = prepared(model, llama(seed=1), loss="kl")
    assert objective.of_losses(losses) == losses.kl
    _, objective, *_ = prepared(model)
    assert objective.of_losses(losses) == losses.lm
    assert objective.measure(model, samples, collate, 8).kl is None


@pytest.mark.parametrize(("size", "accumulated", "loss"), [(4, 1, "lm"), (2, 2, "mix"), (1, 4, "lm")])
def test_a_step_is_that_of_the_mean_over_its_tokens(size, accumulated, loss, tmp_path):
    """By plain gradient descent, against autograd on the samples one by one."""
    model, teacher = llama(), None if loss == "lm" else llama(seed=1)
    options = {"optim": "sgd", "max_grad_norm": 0.0}
    how = {"batch_size": size, "gradient_accumulation": accumulated, "schedule": "constant", "warmup": 0.0}
    asked, objective, samples, collate = prepared(
        model, teacher, loss=loss, max_steps=1, learning_rate=0.5, trainer_options=options, **how
    )
    samples = sorted(samples, key=lambda sample: len(sample["labels"]))[::7]
    assert len(samples) == 4 and len({len(sample["labels"]) for sample in samples}) > 2
    tuned = attach(model, asked)
    before = adapter(tuned)
    sums = [objective.sums(tuned, collate([sample])) for sample in samples]
    mean: Any = sum(objective.mix(s.lm, s.kl) for s in sums) / sum(s.tokens for s in sums)
    mean.backward()
    wanted: Any = {name: -0.5 * p.grad for name, p in tuned.named_parameters() if p.grad is not None}
    tuned.zero_grad()
    trained = train(tuned, asked, objective, samples, samples, collate, tmp_path)
    assert trained.curve[0] == {"step": 1, "train": pytest.approx(mean.item(), rel=1e-4)}
    for name, after in adapter(tuned).items():
        assert largest_difference(after - before[name], wanted[name]) < 1e-5
    assert max(float(step.abs().max()) for step in wanted.values()) > 1e-2
