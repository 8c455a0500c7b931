"""Fluctuation (FLAP): units whose output hardly varies can be replaced by a constant."""

from collections.abc import Sequence

import torch
from torch import Tensor

from optimum_prune.scorers.base import Scorer, Units, columns_per_unit, no_weights, standardised


def score_units(units: Units) -> Tensor:
    """Return `sum over a unit's columns of Var(x_j) * sum_i W_ij^2` of its readers, `(number,) float32`.

    An et al. 2023, arXiv 2312.11983, there called the fluctuation metric.
    """
    scores = torch.zeros(units.number, device=units.readers[0].weight.device)
    for reader in units.readers:
        assert reader.statistics.variance is not None, "the driver measures the input of every scorer that asks for it"
        fluctuation = reader.statistics.variance * reader.weight.float().square().sum(dim=0)
        scores = scores + columns_per_unit(fluctuation, units.number)
    return scores


def combine(scores: Sequence[Tensor], together: bool) -> list[Tensor]:
    """Standardise each layer by itself, which makes layers comparable (An et al. 2023)."""
    return standardised(scores, together=False)


SCORER = Scorer(
    name="fluctuation",
    score=no_weights,
    score_units=score_units,
    combine=combine,
    inputs="variance",
    reference="FLAP: An, Zhao, Yu, Tang, Wang 2023, arXiv 2312.11983",
)
