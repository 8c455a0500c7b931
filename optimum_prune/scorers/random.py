"""Random: the baseline that every other scorer has to beat."""

import torch
from torch import Tensor

from optimum_prune.scorers.base import Scorer, Statistics


def score(weight: Tensor, statistics: Statistics) -> Tensor:
    """Draw uniform scores, `(d_out, d_in) float32`, from the seeded generator."""
    return torch.rand(weight.shape, generator=statistics.generator, dtype=torch.float32, device="cpu").to(weight.device)


def draw(generator: torch.Generator) -> Tensor:
    """Draw the score of a whole layer, `() float32`."""
    return torch.rand((), generator=generator, dtype=torch.float32, device="cpu")


SCORER = Scorer(
    name="random",
    score=score,
    draw=draw,
    patterns=("structured", "layers", "unstructured", "n:m"),
    reference="uniform random scores, seeded",
)
