"""Structured OBS: the error that the best correction of the other units cannot make up for."""

import torch
from torch import Tensor

from optimum_prune.scorers.base import Scorer, Units, no_weights

RIDGE = 0.01
"""Of the mean of the diagonal of the moments; the same as in least-squares compensation."""


def score_units(units: Units) -> Tensor:
    """Return `tr(W_u ([(M + ridge)^-1]_uu)^-1 W_u^T)` of the readers, `(number,) float32`.

    M is `E[x x^T]` of the reader's input, `W_u` the columns of a unit. Of one column it is
    `||W_:,u||^2 / [(M + ridge)^-1]_uu`, the optimal brain surgeon's saliency for a whole column (METHODS.md 6).
    """
    scores = torch.zeros(units.number, dtype=torch.float32, device=units.readers[0].weight.device)
    for reader in units.readers:
        moment = reader.statistics.moment
        assert moment is not None, "the driver measures the input of every scorer that asks for it"
        read = reader.weight.any(dim=0)  # what went in an earlier step has no part in the correction
        moment = moment * read * read[:, None]
        ridge = RIDGE * moment.diagonal().sum() / read.sum().clamp(min=1)
        ridge = torch.where(ridge > 0, ridge, 1)  # an input that is always zero
        regularised = moment + ridge * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(regularised))
        size = len(inverse) // units.number
        # (number, size, size): the blocks on the diagonal
        blocks = inverse.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        columns = reader.weight.float().t().unflatten(0, (-1, size))  # (number, size, d_out)
        scores = scores + (columns * torch.linalg.solve(blocks, columns)).sum(dim=(1, 2))
    return scores


SCORER = Scorer(
    name="obs",
    score=no_weights,
    score_units=score_units,
    inputs="hessian",
    comparable="matrix",
    reference="optimal brain surgeon: Hassibi, Stork 1993; of whole columns: Kurtic et al. 2023, arXiv 2302.04089",
)
