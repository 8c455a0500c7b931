"""Scalars of a model's outputs whose gradients scorers look at. Pure functions of tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""Label of a position that predicts nothing."""


@dataclass(frozen=True)
class Outputs:
    """What a model makes of one batch.

    Attributes:
        logits: `(B, T, V)`.
        states: `(B, T, d)`, the last hidden states: what the output embedding reads.
        mask: `(B, T) bool`, False on padding.
        labels: `(B, T) int64`, the token that each position should predict, or `IGNORED`.
    """

    logits: Tensor
    states: Tensor
    mask: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Objective:
    """A scalar of the outputs.

    Attributes:
        name: by which its gradients are found.
        value: `Outputs -> () float32`, summed over what `per` names; it does not see padding.
        per: what the caller divides by the number of: micro-batches of any size then add up to the same value.
    """

    name: str
    value: Callable[[Outputs], Tensor]
    per: Literal["sample", "token"] = "sample"


def largest_logits(outputs: Outputs) -> Tensor:
    """Return the maximum of each logit over the sequence, averaged over the vocabulary and summed over samples.

    `f` of NIRVANA, after the official implementation (METHODS.md 2): an output of the model, not a loss.
    """
    return _filled(outputs, -torch.inf).amax(dim=1).mean(dim=-1).sum()


def mean_logits(outputs: Outputs) -> Tensor:
    """Return the mean of all logits of a sample, summed over samples."""
    tokens = outputs.mask.sum(dim=1)
    return (_filled(outputs, 0.0).mean(dim=-1).sum(dim=1) / tokens).sum()


def soft_largest_logits(outputs: Outputs) -> Tensor:
    """Return the log-sum-exp of each logit over the sequence, averaged over the vocabulary and summed over samples."""
    return _filled(outputs, -torch.inf).logsumexp(dim=1).mean(dim=-1).sum()


def loss(outputs: Outputs) -> Tensor:
    """Return the cross-entropy of the labels, summed over predicted tokens."""
    # Not of the wanted rows alone: to choose them would copy the logits, and their gradient once more.
    logits = outputs.logits.flatten(0, 1).float()
    return F.cross_entropy(logits, outputs.labels.flatten(), ignore_index=IGNORED, reduction="sum")


def energy(outputs: Outputs) -> Tensor:
    """Return `||F||_F^2 / 2` of the last hidden states F, summed over tokens that are no padding (METHODS.md 3)."""
    return outputs.states[outputs.mask].float().square().sum() / 2


def _filled(outputs: Outputs, value: float) -> Tensor:
    logits = outputs.logits.float()
    return logits if outputs.mask.all() else logits.masked_fill(~outputs.mask[..., None], value)


NTK = Objective("ntk", largest_logits)
MEAN_LOGIT = Objective("mean_logit", mean_logits)
LOGSUMEXP = Objective("logsumexp", soft_largest_logits)
LOSS = Objective("loss", loss, per="token")
ENERGY = Objective("energy", energy, per="token")
