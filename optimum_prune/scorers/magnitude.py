"""Magnitude: the weights alone."""

from torch import Tensor

from optimum_prune.scorers.base import Scorer, Statistics, Units, weighted_units


def score(weight: Tensor, statistics: Statistics) -> Tensor:
    """Return `W^2`, `(d_out, d_in) float32`, which ranks weights as `|W|` does.

    A few channels of a trained model hold most of a layer's energy and say little about what it computes, so for
    structured pruning this is a baseline, not a recommendation.
    """
    return weight.float().square()


def score_units(units: Units) -> Tensor:
    """Return the L2 norm of each unit over all linears, `(number,) float32`."""
    return weighted_units(score, units).sqrt()


SCORER = Scorer(
    name="magnitude",
    score=score,
    patterns=("structured", "unstructured", "n:m"),
    score_units=score_units,
    reference="absolute weights, of units the L2 norm over their coupled linears (a baseline older than any paper)",
)
