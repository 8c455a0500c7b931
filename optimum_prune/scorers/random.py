"""Random: the baseline that every other scorer has to beat."""

import torch
from torch import Tensor

from optimum_prune.scorers.base import Scorer, Statistics


def score(weight: Tensor, statistics: Statistics) -> Tensor:
    """Draw uniform scores, `(d_out, d_in) float32`, from the seeded generator."""
    return torch.rand(weight.shape, generator=statistics.generator, device="cpu").to(weight.device)


SCORER = Scorer(name="random", score=score, reference="uniform random scores, seeded")
