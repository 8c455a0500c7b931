"""What a trained model has learned, in numbers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def mean_loss(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """Return the mean cross-entropy over batches of as many targets each, in nats per token."""
    losses = [model(**batch).loss for batch in batches]
    return torch.stack(losses).mean().item()


def unigram_loss(known: Tensor, new: Tensor, vocabulary: int) -> float:
    """Return the cross-entropy of guessing tokens by their frequency alone, in nats per token.

    Args:
        known: `(T,) int64`, the tokens that are counted; each token of the vocabulary counts once more.
        new: `(T',) int64`, the tokens that are guessed.
        vocabulary: number of token ids.
    """
    counts = torch.bincount(known, minlength=vocabulary) + 1.0
    return -(counts / counts.sum()).log()[new].mean().item()
