"""AFR (adaptive feature retention): what a unit adds to the features, plus what the loss owes to it."""

from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from optimum_prune import checks
from optimum_prune.errors import InvalidConfig, unknown
from optimum_prune.objectives import ENERGY, LOSS
from optimum_prune.scorers.base import Part, Scorer, Statistics, Units, standardised

REFER = ("activation", "feature", "magnitude")
CHUNK = 512
"""Units whose weights are sorted at a time."""


def refer(weight: Tensor, statistics: Statistics, kind: str) -> Tensor:
    """Return r, `(d_out, d_in) float32`: how much a weight has to do with the features.

    Args:
        weight: `(d_out, d_in)`.
        statistics: of the linear.
        kind: `"feature"`: `|W dPhi/dW|`, `Phi = ||F||_F^2 / 2T` of the last hidden states; `"activation"`:
            `|W_ij| ||x_j||`; `"magnitude"`: `|W|`.
    """
    if kind == "feature":
        return (weight.float() * statistics.gradients[ENERGY.name]).abs()
    if kind == "magnitude":
        return weight.float().abs()
    assert statistics.norm is not None, "the driver measures the input of every scorer that asks for it"
    return weight.float().abs() * statistics.norm


def snip(weight: Tensor, statistics: Statistics) -> Tensor:
    """Return `c = W dL/dW`, `(d_out, d_in) float32`, with its sign."""
    return weight.float() * statistics.gradients[LOSS.name]


def score(weight: Tensor, statistics: Statistics, kind: str) -> Tensor:
    """Return `z(r) + z(|c|)`, `(d_out, d_in) float32`, each standardised inside the matrix."""
    r, c = refer(weight, statistics, kind), snip(weight, statistics).abs()
    return standardised([r.flatten()], False)[0].add_(standardised([c.flatten()], False)[0]).view(weight.shape)


def score_units(units: Units, kind: str, power: float, signed: bool, trim: tuple[float, float] | None) -> Tensor:
    """Return `R_u` and `S_u` of every unit, `(number, 2) float32`; a reconstruction, see `afr`."""
    c = _per_unit(units, snip)
    largest = c.abs().max()
    c = c.sign() * (c.abs() / torch.where(largest > 0, largest, 1)) ** power
    deviation = c.std(correction=0)
    c = c / torch.where(deviation > 0, deviation, 1)
    s = c.mean(dim=1).abs() if signed else c.abs().mean(dim=1)
    del c
    r = _per_unit(units, partial(refer, kind=kind))
    return torch.stack([r.mean(dim=1) if trim is None else _trimmed_mean(r, trim), s], dim=1)


def combine(scores: Sequence[Tensor], together: bool) -> list[Tensor]:
    """Return `I_u = z(R)_u + z(S)_u`, `(number,) float32` of each group."""
    return [terms.sum(dim=1) for terms in standardised(scores, together)]


def afr(refer: str = "activation", power: float = 2.0, signed: bool = True, trim: Any = None) -> Scorer:
    """Return the scorer.

    Structured AFR (Kobayashi et al., arXiv 2607.08027) prunes MLP channels by `I_u = z(R)_u + z(S)_u`. The paper
    publishes three repairs of the naive sum of AFR's weight scores; how they fit together is a reconstruction:
    `c~ = sign(c) (|c| / max|c|)^power`, scaled by its standard deviation in the group, `S_u = |mean of c~ over the
    unit|`, `R_u` = trimmed mean of r over the unit. z is taken over a layer's units, or over all where one ranking is
    made of them.

    Args:
        refer: r; see `refer`. The paper's is `"feature"`; `"activation"` was better on SmolLM2 and is the default.
        power: of the SNIP score; 1 is none.
        signed: mean of signed SNIP scores, absolute value after it; otherwise mean of absolute ones.
        trim: percentiles `(low, high)` outside of which values of r are left out of a unit's mean, e.g. `(2, 98)`.
    """
    if refer not in REFER:
        raise InvalidConfig(unknown("refer of afr", refer, REFER))
    power = checks.number(0)("power of afr", power)
    if not isinstance(signed, bool):
        raise InvalidConfig(f"signed of afr must be true or false, got {signed!r}.")
    options = {"kind": refer, "power": power, "signed": signed, "trim": _percentiles(trim)}
    return Scorer(
        name="afr",
        score=partial(score, kind=refer),
        score_units=partial(score_units, **options),
        combine=combine,
        patterns=("structured", "unstructured", "n:m"),
        objectives=(LOSS, ENERGY) if refer == "feature" else (LOSS,),
        inputs="norm" if refer == "activation" else None,
        reads="all",
        units=("mlp_channel",),
        seq_len=512,
        reference="AFR, structured: Kobayashi et al., arXiv 2607.08027; how its three repairs fit together is a "
        "reconstruction",
        configure=afr,
    )


def _per_unit(units: Units, score: Any) -> Tensor:
    """Return the scores of all weights of each unit, `(number, weights of a unit) float32`."""

    def rows(part: Part) -> Tensor:
        return score(part.weight, part.statistics).reshape(units.number, -1)

    def columns(part: Part) -> Tensor:
        return score(part.weight, part.statistics).t().reshape(units.number, -1)

    return torch.cat([*map(rows, units.writers), *map(columns, units.readers)], dim=1)


def _trimmed_mean(values: Tensor, trim: tuple[float, float]) -> Tensor:
    count = values.shape[1]
    low, high = round(count * trim[0] / 100), round(count * trim[1] / 100)
    high = max(high, low + 1)
    return torch.cat([part.sort(dim=1).values[:, low:high].mean(dim=1) for part in values.split(CHUNK)])


def _percentiles(trim: Any) -> tuple[float, float] | None:
    if trim is None:
        return None
    if not isinstance(trim, list | tuple) or len(trim) != 2 or not all(map(_is_number, trim)):
        raise InvalidConfig(f"trim of afr must be null or two percentiles, e.g. [2, 98], got {trim!r}.")
    if not 0 <= trim[0] < trim[1] <= 100:
        raise InvalidConfig(f"trim of afr must be two percentiles, 0 <= low < high <= 100, got {trim!r}.")
    return float(trim[0]), float(trim[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


SCORER = afr()
