"""The dense model as a teacher: alive, or by what it said before training."""

import pytest
import torch

from optimum_prune.objectives import IGNORED
from optimum_prune.recovery.data import load_training_data
from optimum_prune.recovery.losses import divergence, predicting
from optimum_prune.recovery.objective import Objective
from optimum_prune.recovery.teacher import SAMPLE, CachedTeacher, LiveTeacher, collating, indexed
from tests.models import llama, source, t5
from tests.recovery.runs import config, largest_difference

VOCABULARY = 96


@pytest.fixture(params=["decoder", "encoder-decoder"])
def setting(request):
    """Return student, teacher, samples of several lengths and what makes batches."""
    build = llama if request.param == "decoder" else t5
    model, dense = build(), build(seed=1)
    given = {} if request.param == "decoder" else {"dataset": source(model, 12)}
    data = load_training_data(config(**given), model)
    return model, LiveTeacher(dense), indexed(data.train), collating(data.collate, shifted=build is llama)


def test_samples_keep_their_numbers(setting):
    _, _, samples, collate = setting
    assert collate([samples[3], samples[0]])[SAMPLE].tolist() == [3, 0]
    assert indexed(samples[:2], first=7)[1][SAMPLE] == 8


def test_what_it_says_stands_where_labels_ask(setting):
    model, teacher, samples, collate = setting
    batch = collate(samples[:5])
    shifted = not model.config.is_encoder_decoder
    asked = (batch["labels"][:, 1:] if shifted else batch["labels"]) != IGNORED
    assert teacher(batch).log_probs.shape == (int(asked.sum()), VOCABULARY)
    assert teacher(batch).log_probs.exp().sum(-1) == pytest.approx(1, rel=1e-5)
    alone = torch.cat([teacher(collate([sample])).log_probs for sample in samples[:5]])
    assert largest_difference(teacher(batch).log_probs, alone) < 1e-4


@torch.no_grad()
def test_a_cache_of_the_whole_vocabulary_is_the_live_teacher(setting):
    """Also for samples that come in another order and other company."""
    model, teacher, samples, collate = setting
    cached = CachedTeacher.ask(teacher, samples, collate, VOCABULARY)
    batch = collate([samples[4], samples[1], samples[7]])
    shifted = not model.config.is_encoder_decoder
    inputs = {name: values for name, values in batch.items() if name not in (SAMPLE, "labels")}
    rows, _ = predicting(model(**inputs).logits, batch["labels"], shifted=shifted)
    live, kept = (divergence(rows.log_softmax(-1), found(batch)).item() for found in (teacher, cached))
    assert live > 1 and kept == pytest.approx(live, rel=1e-4)


def test_a_cache_of_a_few_is_small_and_forgets_the_dense_model(setting):
    model, teacher, samples, collate = setting
    cached = CachedTeacher.ask(teacher, samples, collate, 8)
    del teacher.dense
    losses = Objective(1.0, cached, shifted=not model.config.is_encoder_decoder).measure(model, samples, collate, 3)
    assert losses.kl is not None and losses.kl > 0.1
    prediction = cached(collate(samples[:1]))
    assert prediction.tokens is not None and prediction.tokens.shape[1] == prediction.log_probs.shape[1] == 8


def test_it_is_asked_without_dropout_and_left_as_it_was(setting):
    _, teacher, samples, collate = setting
    teacher.dense.train()
    batch = collate(samples[:2])
    assert torch.equal(teacher(batch).log_probs, teacher(batch).log_probs)
    assert teacher.dense.training
