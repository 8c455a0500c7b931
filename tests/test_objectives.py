"""Objectives by hand; that none sees padding is tested beside the scorers."""

import torch

from optimum_prune.objectives import (
    ENERGY,
    IGNORED,
    LOGSUMEXP,
    LOSS,
    MEAN_LOGIT,
    NTK,
    Outputs,
)

LOGITS = torch.tensor([[[1.0, 5.0], [3.0, 2.0]], [[-4.0, 0.0], [9.0, 9.0]]])
STATES = torch.tensor([[[1.0, 2.0], [3.0, 0.0]], [[2.0, 2.0], [50.0, 50.0]]])
MASK = torch.tensor([[True, True], [True, False]])
LABELS = torch.tensor([[1, IGNORED], [0, IGNORED]])
OUTPUTS = Outputs(LOGITS, STATES, MASK, LABELS)


def test_ntk():
    assert NTK.value(OUTPUTS) == (3 + 5) / 2 + (-4 + 0) / 2
    whole = Outputs(LOGITS, STATES, torch.ones(2, 2, dtype=torch.bool), LABELS)
    assert NTK.value(whole) == (3 + 5) / 2 + (9 + 9) / 2


def test_mean_logit():
    assert MEAN_LOGIT.value(OUTPUTS) == (1 + 5 + 3 + 2) / 4 + (-4 + 0) / 2


def test_logsumexp():
    first, second = torch.tensor([1.0, 3.0]).logsumexp(0), torch.tensor([5.0, 2.0]).logsumexp(0)
    torch.testing.assert_close(LOGSUMEXP.value(OUTPUTS), (first + second) / 2 + (-4 + 0) / 2)


def test_loss():
    expected = -LOGITS[0, 0].log_softmax(0)[1] - LOGITS[1, 0].log_softmax(0)[0]
    torch.testing.assert_close(LOSS.value(OUTPUTS), expected)


def test_energy():
    assert ENERGY.value(OUTPUTS) == (1 + 4 + 9 + 4 + 4) / 2


def test_half_precision_is_summed_in_float32():
    logits, ones = torch.full((64, 2, 5000), 300.0, dtype=torch.float16), torch.ones(64, 2, dtype=torch.bool)
    assert NTK.value(Outputs(logits, logits, ones, ones.long())) == 64 * 300.0
