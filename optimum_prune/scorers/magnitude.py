"""Magnitude: the weights alone."""

import torch
from torch import Tensor

from optimum_prune.scorers.base import Scorer, Statistics


def score(weight: Tensor, statistics: Statistics) -> Tensor:
    """Return `W^2`, `(d_out, d_in) float32`, which ranks weights as `|W|` does.

    A unit's score is the root of its sum, its L2 norm over all linears.

    A few channels of a trained model hold most of a layer's energy and say little about what it computes, so for
    structured pruning this is a baseline, not a recommendation.
    """
    return weight.float().square()


SCORER = Scorer(
    name="magnitude",
    score=score,
    patterns=("structured", "unstructured", "n:m"),
    finish=torch.sqrt,
    reference="L2 norm of a unit's weights over its coupled linears (a baseline older than any paper to cite)",
)
