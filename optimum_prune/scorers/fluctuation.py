"""Fluctuation (FLAP): units whose output hardly varies can be replaced by a constant."""

from collections.abc import Sequence

from torch import Tensor

from optimum_prune.scorers.base import Part, Scorer, Units, no_weights, standardised, sum_readers


def score_units(units: Units) -> Tensor:
    """Return `sum over a unit's columns of Var(x_j) * sum_i W_ij^2` of its readers, `(number,) float32`.

    An et al. 2023, arXiv 2312.11983, there called the fluctuation metric.
    """

    def columns(reader: Part) -> Tensor:
        assert reader.statistics.variance is not None, "the driver measures the input of every scorer that asks for it"
        return reader.statistics.variance * reader.weight.float().square().sum(dim=0)

    return sum_readers(units, columns)


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
