"""NTK (NIRVANA): the sensitivity of the model's output to each weight."""

import torch
from torch import Tensor

from optimum_prune.scorers.base import Scorer, Statistics


def objective(logits: Tensor, mask: Tensor) -> Tensor:
    """Return `f`: the maximum of each logit over the sequence, averaged over the vocabulary and summed over samples.

    `f` follows the official implementation of the paper; it is an output of the model, not a loss. The maximum is
    taken inside a sample, so micro-batches of any size add up to the same value (METHODS.md 2).

    Args:
        logits: `(B, T, V)`.
        mask: `(B, T) bool`, False on padding.

    Returns:
        `() float32`. The caller divides by the number of samples.
    """
    logits = logits.float()
    if not mask.all():
        logits = logits.masked_fill(~mask[..., None], -torch.inf)
    return logits.amax(dim=1).mean(dim=-1).sum()


def score(weight: Tensor, statistics: Statistics) -> Tensor:
    """Return `S(W_ij) = |df/dW_ij * W_ij|`, `(d_out, d_in) float32` (Ai et al. 2025, arXiv 2509.14230).

    The gradient is accumulated with its sign over the whole calibration set; the absolute value is taken once.
    """
    assert statistics.gradient is not None, "the driver computes the gradient of every scorer that has an objective"
    return (weight.float() * statistics.gradient).abs()


SCORER = Scorer(
    name="ntk",
    score=score,
    objective=objective,
    allocation="gamma",
    seq_len=128,
    reference="NIRVANA: Ai, Wei, Chen, He 2025, arXiv 2509.14230; gamma='auto' is a reconstruction",
)
