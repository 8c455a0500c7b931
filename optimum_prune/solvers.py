"""Weights that make up for those removed: SparseGPT and ADMM, for all linears that read the same input at once.

Pure functions of tensors. `H` is `E[x x^T]` of the common input, `(d, d) float32`; factors of 2 and of the number of
tokens change neither masks nor weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from optimum_prune.masks import matrix_mask, n_of_m_mask, removed_of, row_mask

OUTER, INNER = 128, 16
"""Columns that are updated together, and columns between which every single one is."""
DAMPING = 0.01
"""Of the mean of the diagonal; tenfold on every failure, up to 1."""


def damped(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Return a copy of H without dead columns (their diagonal is 1), and which columns are dead, `(d,) bool`."""
    hessian = hessian.clone()
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1
    return hessian, dead


def inverse_factor(hessian: Tensor) -> tuple[Tensor, str | None]:
    """Return the upper triangular U with `(H + damping)^-1 = U^T U`, and what to note where it took more damping.

    H is factored from its last column to its first, `H = R R^T` with R upper triangular, and `U = R^-1`: one Cholesky
    and one triangular inverse. Where no damping up to 1 makes H positive definite, its diagonal alone is used.
    """
    mean = hessian.diagonal().mean()
    damping = DAMPING
    while damping <= 1:
        flipped = hessian.flip(0, 1)
        flipped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(flipped)
        if not failed:
            upper = lower.flip(0, 1)
            identity = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
            note = None if damping == DAMPING else f"the Hessian took a damping of {damping:g} of its mean diagonal."
            return torch.linalg.solve_triangular(upper, identity, upper=True), note
        damping *= 10
    return hessian.diagonal().rsqrt().diag(), "the Hessian is not positive definite; its diagonal alone was used."


def sparsegpt(
    weights: Sequence[Tensor],
    hessian: Tensor,
    sparsity: float,
    n_of_m: tuple[int, int] | None = None,
    masks: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], str | None]:
    """Prune column by column, and spread what each loses over the columns to its right.

    Frantar & Alistarh 2023, arXiv 2301.00774, algorithm 1: score `w^2 / U_jj^2`, update
    `W[:, j:] -= ((w_j - q_j) / U_jj) U[j, j:]`. Unstructured, the lowest of every 128 columns of a linear go, with
    exact counts (the published threshold removes one too many); n:m is chosen m columns at a time, from weights updated
    so far.

    Args:
        weights: `(rows, d)` each, of linears with a common input; left as they are.
        hessian: `(d, d) float32`.
        sparsity: fraction removed; not read for n:m.
        n_of_m: n zeros in every m.
        masks: `(rows, d) bool` each, True = kept: nothing is chosen then, and sparsity and n_of_m are not read.

    Returns:
        Pruned weights, float32, where what is removed is exactly 0; and what to note, if anything.
    """
    hessian, dead = damped(hessian)
    factor, note = inverse_factor(hessian)
    m = n_of_m[1] if n_of_m and masks is None else 1
    inner = m * max(1, INNER // m)
    outer = inner * (OUTER // INNER)
    work = torch.cat([weight.float() for weight in weights]).t().contiguous()  # (d, rows): a column is contiguous
    work[dead] = 0
    importance = factor.diagonal().square().reciprocal()[:, None]
    rows = [len(weight) for weight in weights]
    keep = torch.cat(list(masks)).t().contiguous() if masks else torch.ones_like(work, dtype=torch.bool)
    for start in range(0, len(work), outer):
        end = min(start + outer, len(work))
        if n_of_m is None and masks is None:
            scores = work[start:end].square() * importance[start:end]
            chosen = [
                matrix_mask(part, removed_of(len(part[0]) * end, sparsity) - removed_of(len(part[0]) * start, sparsity))
                for part in scores.split(rows, dim=1)
            ]
            keep[start:end] = torch.cat(chosen, dim=1)
        errors = torch.empty_like(work[start:end])
        for left in range(start, end, inner):
            right = min(left + inner, end)
            for j in range(left, right):
                if n_of_m and masks is None and j % m == 0:
                    scores = work[j : j + m].square() * importance[j : j + m]
                    keep[j : j + m] = n_of_m_mask(scores.t(), *n_of_m).t()
                kept = work[j] * keep[j]
                error = (work[j] - kept) / factor[j, j]
                errors[j - start] = error
                work[j] = kept
                work[j + 1 : right].addr_(factor[j, j + 1 : right], error, alpha=-1)
            work[right:end].addmm_(factor[left:right, right:end].t(), errors[left - start : right - start], alpha=-1)
        work[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    work.add_(0)  # turns the -0.0 of products with masks into 0; choosing by `where` would take four times as long
    return list(work.t().split(rows)), note


def sparsegpt_masked(weights: Sequence[Tensor], hessian: Tensor, masks: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights of `sparsegpt` with masks that are chosen by something else."""
    return sparsegpt(weights, hessian, 0.0, masks=masks)[0]


ITERATIONS, FREE, RHO = 10, 6, 1.0
"""Of ADMM: how many, in how many of them the mask is free, and the penalty. Ours; see `admm`."""


def admm(
    weights: Sequence[Tensor], hessian: Tensor, sparsity: float, n_of_m: tuple[int, int] | None = None
) -> tuple[list[Tensor], str | None]:
    """Alternate between the weights that keep the output and those that the mask allows.

    After Boza 2024, arXiv 2401.02938 (ADMM with inputs scaled to norm 1). The schedule is ours: 10 iterations, of which
    the first 6 choose the mask anew; unstructured masks are per row and grow by the paper's cubic ramp.

    Args and returns as `sparsegpt`.
    """
    hessian, dead = damped(hessian)
    norm = hessian.diagonal().sqrt()
    scaled = hessian / (norm[:, None] * norm)
    scaled.diagonal().add_(DAMPING)
    identity = torch.eye(len(scaled), dtype=scaled.dtype, device=scaled.device)
    lower = torch.linalg.cholesky(scaled + RHO * identity)  # positive definite: eigenvalues from RHO on
    inverse = torch.cholesky_inverse(lower)
    rows = [len(weight) for weight in weights]
    dense = torch.cat([weight.float() for weight in weights]).masked_fill(dead, 0) * norm

    def choose(values: Tensor, share: float) -> Tensor:
        if n_of_m:
            return n_of_m_mask(values.abs(), *n_of_m)
        return row_mask(values.abs(), removed_of(values.shape[1], share))

    target = dense @ scaled
    mask = choose(dense, sparsity)
    allowed = dense * mask
    dual = dense - allowed
    for step in range(1, ITERATIONS + 1):
        free = torch.addmm(dual, target + RHO * (allowed - dual), inverse)
        if step <= FREE:
            mask = choose(free, sparsity * (1 - (1 - step / FREE) ** 3))
        allowed = free * mask
        dual = free - allowed
    return list((allowed / norm).add_(0).split(rows)), None  # -0.0 becomes 0, as in `sparsegpt`
