"""Weights of the kept inputs of a linear that make up for the removed ones.

Pure functions of tensors, float32 in and out. `W` is `(d_out, d_in)`, `a` one token's inputs `(d_in,)`, `M = E[a a^T]`;
`K` are the kept columns, `R` the removed ones. Larger ridges trust the calibration data less.
"""

import torch
from torch import Tensor

RIDGE = 1e-2
"""Of the mean of M's diagonal over the kept inputs."""
LARGER = (0.01, 0.1, 1.0)
"""Ridges to try where the one asked for leaves M indefinite."""


def least_squares(weight: Tensor, moment: Tensor, kept: Tensor, ridge: float = RIDGE) -> tuple[Tensor, str | None]:
    """Return the weights of the kept inputs that come closest to the output of all inputs.

    `W'_K = W_K + W_R M_RK (M_KK + ridge mean(diag M_KK) I)^-1`. It minimises
    `E|W a - W' a_K|^2 + ridge mean(diag M_KK) |W' - W_K|^2`, so on the calibration data the output is never further off
    than without it. Not centred: no bias is needed.

    Args:
        weight: `(d_out, d_in)`; left as it is.
        moment: `(d_in, d_in)`, of the inputs of the dense model.
        kept: sorted columns, int64.
        ridge: fraction of the mean of `M_KK`'s diagonal.

    Returns:
        `(d_out, len(kept))`; and what to note, if anything. Where no ridge up to 1 helps, the
        weights are the old ones.
    """
    own = weight[:, kept]
    if len(kept) == weight.shape[1]:
        return own, None
    removed = _others(kept, weight.shape[1])
    # W_R M_RK: what the removed inputs gave, as far as it goes along with the kept ones.
    missing = weight[:, removed] @ moment[removed][:, kept]
    return _moved(own, missing, moment[kept][:, kept], ridge)


def towards(own: Tensor, moment: Tensor, cross: Tensor, ridge: float = RIDGE) -> tuple[Tensor, str | None]:
    """Return the weights that come closest to a target, of inputs that are not those of the dense model.

    `W' = W_K + (C - W_K M) (M + ridge mean(diag M) I)^-1` minimises
    `E|t - W' a|^2 + ridge mean(diag M) |W' - W_K|^2`: a ridge towards the weights that there are, not towards zero.

    Args:
        own: `W_K (d_out, d)`; left as it is.
        moment: `M = E[a a^T] (d, d)`, of the kept inputs alone.
        cross: `C = E[t a^T] (d_out, d)`, with the target `t (d_out,)`.
        ridge: fraction of the mean of M's diagonal.

    Returns:
        As `least_squares`.
    """
    return _moved(own, cross - own @ moment, moment, ridge)


def bias_shift(weight: Tensor, mean: Tensor, kept: Tensor) -> Tensor:
    """Return what the removed inputs give on average, `W_R E[a_R]`, to be added to a bias.

    An et al. 2023 (FLAP), arXiv 2312.11983.

    Args:
        weight: `(d_out, d_in)`.
        mean: `E[a] (d_in,)`.
        kept: sorted columns, int64.

    Returns:
        `(d_out,)`.
    """
    removed = _others(kept, weight.shape[1])
    return weight[:, removed] @ mean[removed]


def _moved(own: Tensor, missing: Tensor, moment: Tensor, ridge: float) -> tuple[Tensor, str | None]:
    """Return `own + missing (moment + ridge mean(diag moment) I)^-1`, with the lowest ridge for which it exists."""
    mean = moment.diagonal().mean()
    for tried in (ridge, *(larger for larger in LARGER if larger > ridge)):
        damped = moment.clone()
        damped.diagonal().add_(tried * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        moved = own + torch.cholesky_solve(missing.t(), lower).t()
        if torch.isfinite(moved).all():
            return moved, None if tried == ridge else f"its inputs took a ridge of {tried:g} instead of {ridge:g}."
    return own, "no ridge up to 1 gives finite weights; it is not compensated."


def _others(kept: Tensor, width: int) -> Tensor:
    """Return the columns that are not kept, sorted."""
    other = torch.ones(width, dtype=torch.bool, device=kept.device)
    other[kept] = False
    return other.nonzero().flatten()
