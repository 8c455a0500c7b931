"""Wanda: weights times the norm of what they read."""

from torch import Tensor

from optimum_prune.scorers.base import Scorer, Statistics, Units, sum_readers


def score(weight: Tensor, statistics: Statistics) -> Tensor:
    """Return `|W_ij| ||X_j||_2`, `(d_out, d_in) float32` (Sun et al. 2023, arXiv 2306.11695, equation 1).

    The norm is a mean over tokens, not a sum, which changes no ranking inside of a matrix.

    >>> import torch
    >>> statistics = Statistics(torch.Generator(), norm=torch.tensor([500.0, 10.0]))
    >>> score(torch.tensor([[0.001, 0.01]]), statistics)
    tensor([[0.5000, 0.1000]])
    """
    assert statistics.norm is not None, "the driver measures the input of every scorer that asks for it"
    return weight.float().abs() * statistics.norm


def score_units(units: Units) -> Tensor:
    """Return the sum of `score` over a unit's columns in its readers, `(number,) float32`: `sum_i |W_iu| ||a_u||`.

    An extension of ours (METHODS.md 5); what the unit itself reads plays no part.
    """
    return sum_readers(units, lambda reader: score(reader.weight, reader.statistics).sum(dim=0))


SCORER = Scorer(
    name="wanda",
    score=score,
    score_units=score_units,
    patterns=("structured", "unstructured", "n:m"),
    inputs="norm",
    comparable="matrix",
    scope="row",
    reference="Wanda: Sun, Liu, Bair, Kolter 2023, arXiv 2306.11695, equation 1",
)
