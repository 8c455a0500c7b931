"""Second moments of an input, over all tokens of all micro-batches."""

from collections.abc import Iterable

import torch
from torch import Tensor

from optimum_prune.errors import UnsupportedModel


def second_moment(name: str, inputs: Iterable[Tensor], *, full: bool) -> Tensor:
    """Return the mean over tokens of `x x^T`, or of `x^2` alone.

    Args:
        name: of the module that reads the input, for errors.
        inputs: `(..., d)` per micro-batch, without padding.
        full: the whole matrix, not its diagonal alone.

    Returns:
        `(d, d) float32`, or `(d,) float32`.

    Raises:
        UnsupportedModel: an input is not finite.
    """
    total, tokens = None, 0
    for x in inputs:
        x = x.detach().reshape(-1, x.shape[-1]).float()  # (T, d); squares of float16 would overflow
        if total is None:
            total = x.new_zeros((x.shape[1],) * (2 if full else 1))
        if full:
            total.addmm_(x.t(), x)
        else:
            total.add_(x.square().sum(dim=0))
        tokens += len(x)
    assert total is not None, "there is at least one micro-batch"
    check_finite(name, total)
    return total.div_(tokens)


def check_finite(name: str, values: Tensor) -> None:
    """Refuse an input of the module `name`, or sums of it, with NaN or infinite values."""
    if not torch.isfinite(values).all():
        raise UnsupportedModel(
            f"The input of {name} is not finite on the calibration data. Load the model in bfloat16 or float32, and "
            "check that it works on its own."
        )
