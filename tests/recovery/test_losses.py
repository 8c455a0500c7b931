"""Losses, against plain loops in float64."""

import math

import pytest
import torch

from optimum_prune.objectives import IGNORED
from optimum_prune.recovery.losses import Prediction, cross_entropy, divergence, joined, largest, predicting
from tests.recovery.runs import seeded

B, T, V = 3, 5, 7


@pytest.fixture
def logits():
    return torch.randn(B, T, V, generator=seeded(1)) * 3


@pytest.fixture
def labels():
    labels = torch.randint(0, V, (B, T), generator=seeded(2))
    labels[0, 3:] = labels[1, 0] = labels[2, 2] = IGNORED
    return labels


def probabilities(row):
    powers = [math.exp(x) for x in row]
    return [power / sum(powers) for power in powers]


def pairs(labels, shifted):
    """Yield (row, position of the logits, label) of whatever is asked."""
    for b in range(B):
        for t in range(T):
            position = t - 1 if shifted else t
            if labels[b][t] != IGNORED and position >= 0:
                yield b, position, labels[b][t]


@pytest.mark.parametrize("shifted", [True, False])
def test_cross_entropy(shifted, logits, labels):
    wanted = sum(-math.log(probabilities(logits[b, t].tolist())[y]) for b, t, y in pairs(labels.tolist(), shifted))
    rows, asked = predicting(logits, labels, shifted=shifted)
    assert len(rows) == len(asked) == len(list(pairs(labels.tolist(), shifted)))
    assert cross_entropy(rows.log_softmax(-1), asked).item() == pytest.approx(wanted, rel=1e-5)


def test_decoders_are_never_asked_for_a_first_token(logits):
    labels = torch.full((B, T), IGNORED)
    labels[:, 0] = 3
    assert len(predicting(logits, labels, shifted=True)[1]) == 0
    assert len(predicting(logits, labels, shifted=False)[1]) == B


def test_sixteen_bits_become_float32(logits, labels):
    rows, _ = predicting(logits.bfloat16(), labels, shifted=True)
    assert rows.dtype == torch.float32


@pytest.mark.parametrize("k", [None, 1, 3, V - 1, V])
def test_divergence(k, logits):
    teacher = (torch.randn(B * T, V, generator=seeded(3)) * 2).log_softmax(-1)
    student = logits.flatten(0, 1).log_softmax(-1)
    wanted = 0.0
    for p, q in zip(teacher.double().exp().tolist(), student.double().exp().tolist(), strict=True):
        if k is not None and k < V:
            kept = sorted(range(V), key=lambda i: p[i])[V - k :]
            p, q = ([row[i] for i in kept] + [1 - sum(row[i] for i in kept)] for row in (p, q))
        wanted += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    prediction = Prediction(teacher) if k is None else largest(teacher, k)
    assert divergence(student, prediction).item() == pytest.approx(wanted, rel=1e-4)


def test_some_tokens_are_a_lower_bound(logits):
    teacher = (torch.randn(B * T, V, generator=seeded(3)) * 2).log_softmax(-1)
    student = logits.flatten(0, 1).log_softmax(-1)
    bounds = [divergence(student, largest(teacher, k)).item() for k in range(1, V)]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= divergence(student, Prediction(teacher)).item() * (1 + 1e-5)


@pytest.mark.parametrize("sharp", [1, 30, 200])
@pytest.mark.parametrize("k", [None, 1, 3])
def test_nothing_diverges_from_itself_and_gradients_are_finite(k, sharp, logits):
    student = (logits.flatten(0, 1) * sharp).requires_grad_()
    log_q = student.log_softmax(-1)
    teacher = log_q.detach()
    loss = divergence(log_q, Prediction(teacher) if k is None else largest(teacher, k))
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert student.grad is not None and student.grad.abs().max() < 1e-5


def test_more_is_asked_for_than_there_is():
    assert largest(torch.zeros(2, V), 100).log_probs.shape == (2, V)


def test_predictions_are_joined_in_order():
    parts = [largest(torch.randn(n, V, generator=seeded(n)), 2) for n in (1, 3)]
    both = joined(parts)
    assert both.tokens is not None and parts[0].tokens is not None
    assert torch.equal(both.tokens[:1], parts[0].tokens)
    assert torch.equal(both.log_probs[1:], parts[1].log_probs)
    assert joined([Prediction(torch.zeros(2, V)), Prediction(torch.zeros(3, V))]).tokens is None
