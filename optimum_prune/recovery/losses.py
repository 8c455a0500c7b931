"""Losses of the recovery: cross-entropy, and the distance to what a dense model predicts. Pure functions of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from optimum_prune.objectives import IGNORED


@dataclass(frozen=True)
class Prediction:
    """What a teacher predicts at P positions.

    Attributes:
        log_probs: `(P, V) float32`, or the `k` largest of each position, `(P, k)`.
        tokens: which ones those are, `(P, k) int64`; None for the whole vocabulary in its order.
    """

    log_probs: Tensor
    tokens: Tensor | None = None

    def to(self, device: torch.device | str) -> "Prediction":
        """Return the same on a device."""
        return Prediction(self.log_probs.to(device), None if self.tokens is None else self.tokens.to(device))


def joined(predictions: Sequence[Prediction]) -> Prediction:
    """Put the positions of several predictions one after the other; all of the whole vocabulary, or of `k` tokens."""
    tokens = [prediction.tokens for prediction in predictions if prediction.tokens is not None]
    return Prediction(torch.cat([p.log_probs for p in predictions]), torch.cat(tokens) if tokens else None)


def predicting(logits: Tensor, labels: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor]:
    """Choose the logits that predict something, with what they should predict.

    Args:
        logits: `(B, T, V)`.
        labels: `(B, T) int64`, `IGNORED` where nothing is asked.
        shifted: whether a position predicts the label of the next one, as in decoders, not its own.

    Returns:
        `(P, V) float32` and `(P,) int64`, rows of the batch one after the other.
    """
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    asked = labels != IGNORED
    return logits[asked].float(), labels[asked]


def cross_entropy(log_q: Tensor, wanted: Tensor) -> Tensor:
    """Return the negative log-likelihood, summed over positions: `(P, V), (P,) -> ()`."""
    return F.nll_loss(log_q, wanted, reduction="sum")


def divergence(log_q: Tensor, teacher: Prediction) -> Tensor:
    """Return `KL(teacher || q)` in nats, summed over positions: `(P, V) -> ()`.

    Of the `k` largest alone, all other tokens count as one: a lower bound, and 0 where both agree.
    """
    if teacher.tokens is None:
        return F.kl_div(log_q, teacher.log_probs, reduction="sum", log_target=True)
    chosen = log_q.gather(-1, teacher.tokens)
    log_p, log_q = (torch.cat([some, _rest(some)], dim=-1) for some in (teacher.log_probs, chosen))
    return F.kl_div(log_q, log_p, reduction="sum", log_target=True)


def largest(log_probs: Tensor, k: int) -> Prediction:
    """Keep the `k` largest of each position: `(P, V) -> (P, k)`."""
    values, tokens = log_probs.topk(min(k, log_probs.shape[-1]), dim=-1)
    return Prediction(values, tokens)


def _rest(log_probs: Tensor) -> Tensor:
    """Return the logarithm of the probability that is left, `(P, k) -> (P, 1)`."""
    left = 1 - log_probs.exp().sum(dim=-1, keepdim=True)
    return left.clamp_min(torch.finfo(left.dtype).eps).log()
