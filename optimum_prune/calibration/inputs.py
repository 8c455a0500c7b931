"""What the linears of a model are given: statistics over all tokens of the calibration data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.devices import moved
from optimum_prune.calibration.moments import check_finite
from optimum_prune.layerwise import trace, walk
from optimum_prune.modes import frozen


@dataclass(frozen=True)
class InputMoments:
    """Moments of one input over all tokens.

    Attributes:
        mean: `(d,) float32`.
        variance: `(d,) float32`.
        norm: `(d,) float32`, root of the mean square.
        moment: `(d, d) float32`, mean of `x x^T`; None where it was not asked for.
    """

    mean: Tensor
    variance: Tensor
    norm: Tensor
    moment: Tensor | None


@torch.no_grad()
def measure_inputs(
    model: PreTrainedModel,
    linears: Mapping[str, nn.Module],
    data: CalibrationData,
    batch_size: int,
    full: set[str],
    use: Callable[[str, InputMoments], None],
) -> None:
    """Measure what linears are given in one forward of the model as it is.

    Args:
        model: left as it was.
        linears: by name.
        data: calibration samples.
        batch_size: samples a micro-batch; the moments do not depend on it (but for rounding).
        full: names of linears whose whole matrix of second moments is wanted.
        use: called with the name of each linear, in the order of the forward; nothing is held afterwards.

    Raises:
        CalibrationError: no sample passes through one of the linears.
        UnsupportedModel: an input is not finite.
    """

    def step(names: Sequence[str], inputs: Iterator[Tensor]) -> None:
        found = input_moments(names[0], inputs, full=not full.isdisjoint(names))
        for name in names:
            use(name, found)

    with frozen(model):
        groups = trace(model, linears, moved(next(data.even_batches(1)), model))
        batches = [moved(batch, model) for batch in data.even_batches(batch_size)]
        walk(model, linears, batches, groups, step, "Inputs")


def input_moments(name: str, inputs: Iterable[Tensor], *, full: bool) -> InputMoments:
    """Return the moments of `(..., d)` inputs over all tokens of all micro-batches.

    Means and variances are merged as Chan, Golub, LeVeque 1979 do, in float64: a variance that is a difference of two
    large means would be lost to rounding.

    Raises:
        UnsupportedModel: an input is not finite; `name` is the module that reads it.
    """
    tokens, mean, squares = 0, *(torch.zeros(1, dtype=torch.float64, device="cpu") for _ in range(2))
    moment = None
    for x in inputs:
        x = x.detach().reshape(-1, x.shape[-1]).float()  # (T, d); squares of float16 would overflow
        if tokens == 0:
            mean, squares = (x.new_zeros(x.shape[1], dtype=torch.float64) for _ in range(2))
            moment = x.new_zeros((x.shape[1],) * 2) if full else None
        here = x.mean(dim=0)
        apart = x - here
        off = apart.mean(dim=0)  # what rounding took of a large mean
        further = here.double() + off - mean
        squares += apart.sub_(off).square_().sum(dim=0).double()
        squares += further.square() * (tokens * len(x) / (tokens + len(x)))
        mean += further * (len(x) / (tokens + len(x)))
        tokens += len(x)
        if moment is not None:
            moment.addmm_(x.t(), x)
    check_finite(name, mean + squares)
    variance = squares / tokens
    norm = (variance + mean.square()).sqrt()
    return InputMoments(
        mean.float(), variance.float(), norm.float(), moment.div_(tokens) if moment is not None else None
    )
