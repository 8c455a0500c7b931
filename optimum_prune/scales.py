"""Scales of a linear's inputs that choose its mask: the scaled metric, and how a loss depends on the scales.

Pure functions of tensors. `theta = log s`, `(d_in,) float32`, is shared by the linears that read one input; `root` is
the root of the diagonal of `E[x x^T]` of that input, `(d_in,) float32`, or ones for scores that ignore inputs.
"""

import torch
from torch import Tensor

TINY = 1e-30
"""Scores below have this logarithm: that of a weight of 0 is not finite."""


def metric(weight: Tensor, root: Tensor, theta: Tensor) -> Tensor:
    """Return `|W_ij| sqrt(H_jj) s_j`, `(d_out, d_in) float32` (Jiang et al. 2026, arXiv 2602.21652, equation 11).

    New scales cost `d_in` products and one look at the weights; the diagonal of H is never measured again.
    """
    return weight.float().abs() * (root * theta.exp())


def soft_mask(weight: Tensor, root: Tensor, theta: Tensor, mask: Tensor, pool: int, temperature: float) -> Tensor:
    """Return `sigmoid((log metric - log threshold) / temperature)`, `(d_out, d_in) float32`, differentiable in theta.

    The threshold lies half-way between the lowest score kept and the highest removed. As scores change, it moves so
    that as much is kept as before: a score that rises pushes out others, most of all those next to the threshold. (With
    a fixed threshold every scale would gain by rising; with one that follows the two scores next to it, the gradients
    of a whole row would fall on these two.) In logarithms, no scale that all inputs have in common changes anything.

    Args:
        weight: `(d_out, d_in)`.
        root: see above.
        theta: see above.
        mask: the hard mask, chosen by the same metric.
        pool: consecutive weights that are ranked together: m, a row, or all.
        temperature: in logarithms of scores.
    """
    logs = metric(weight, root, theta).clamp_min(TINY).log().view(-1, pool)
    values, kept = logs.detach(), mask.view(-1, pool)
    lowest = values.masked_fill(~kept, torch.inf).amin(dim=1, keepdim=True)
    highest = values.masked_fill(kept, -torch.inf).amax(dim=1, keepdim=True)
    threshold = (lowest + highest) / 2
    soft = torch.sigmoid((values - threshold) / temperature)
    slope = soft * (1 - soft)
    share = slope / slope.sum(dim=1, keepdim=True).clamp_min(TINY)
    threshold = threshold + ((logs - values) * share).sum(dim=1, keepdim=True)
    return torch.sigmoid((logs - threshold) / temperature).view(weight.shape)


def penalty(parts: list[tuple[Tensor, Tensor]], alpha: float, power: float) -> Tensor:
    """Return `exp(-alpha sum_l ||W_l S_l||_p)` (equation 8), with Schatten norms; `parts`: weights and their theta.

    A reconstruction: the paper publishes neither alpha nor p. It rewards large norms without bound, so the caller keeps
    the geometric mean of the scales at 1.
    """
    norms = [
        torch.linalg.svdvals(weight.float() * theta.exp()).pow(power).sum().pow(1 / power) for weight, theta in parts
    ]
    return torch.exp(-alpha * torch.stack(norms).sum())
