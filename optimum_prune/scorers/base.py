"""What a scorer is: a pure function of tensors, plus the facts that decide where its scores mean something."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from optimum_prune.errors import InvalidConfig, unknown
from optimum_prune.objectives import Objective

Solve = Callable[[Sequence[Tensor], Tensor, float, tuple[int, int] | None], tuple[list[Tensor], str | None]]


@dataclass(frozen=True)
class Statistics:
    """What a scorer may look at besides the weight.

    Attributes:
        generator: seeded, for scorers that draw.
        gradients: `(d_out, d_in) float32` by name of the objective, accumulated (signed) over all samples.
        gates: `(N, d_in) float32` by name of the objective: for each sample (or picture) the sum over tokens of
            `x dL/dx`, x the linear's input.
        norm: `(d_in,) float32`, root of the mean square of each input over all tokens.
        variance: `(d_in,) float32`, of each input over all tokens.
        moment: `(d_in, d_in) float32`, mean of `x x^T` over all tokens.
    """

    generator: torch.Generator
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    gates: Mapping[str, Tensor] = field(default_factory=dict)
    norm: Tensor | None = None
    variance: Tensor | None = None
    moment: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """One linear of a coupled group: its weight `(d_out, d_in)`, and what is known about it."""

    weight: Tensor
    statistics: Statistics


@dataclass(frozen=True)
class Units:
    """A coupled group, as tensors.

    Attributes:
        writers: linears whose rows fall into `number` equal blocks.
        readers: linears whose columns do.
        number: units of the group.
    """

    writers: Sequence[Part]
    readers: Sequence[Part]
    number: int


def no_weights(weight: Tensor, statistics: Statistics) -> Tensor:
    """Stand in for `Scorer.score` where a scorer has no scores of single weights; never called."""
    raise NotImplementedError("This scorer has no scores of single weights.")


@dataclass(frozen=True)
class Scorer:
    """A score of weights, of units, or of whole layers (blocks and sub-layers); larger = keep.

    Attributes:
        name: as in `PruningConfig.scorer`.
        score: `(weight (d_out, d_in), Statistics) -> (d_out, d_in) float32`.
        reference: authors, year, arXiv id, equation; says so where it is a reconstruction.
        patterns: those of `PruningConfig.pattern` for which it can be used.
        score_units: `Units -> (number,) float32`, or `(number, terms)` for `combine`; by default the sum of `score`
            over all weights of a unit.
        combine: `(scores of all groups of a kind, is one ranking made of them) -> (number,) float32 each`: for scores
            that are standardised. Groups that have to keep the same units are summed before.
        objectives: what gradients of weights are taken of.
        gates: what gradients of the readers' inputs are taken of.
        inputs: what of a linear's input it looks at: its `"norm"`, its `"variance"`, or its second moments, the
            `"hessian"`.
        reads: whose inputs those are: the `"readers"` of a group, or of `"all"` its linears.
        influence: `(before (T, d), after (T, d)) -> (T,) float32`: what a layer does to the residual stream at each
            token; the mean over all tokens is the score of the layer.
        draw: `Generator -> () float32`: the score of a layer for which no data is looked at.
        solve: `(weights, hessian (d, d), sparsity, (n, m) or None) -> (pruned weights, what to note of it)`: for
            scorers that change what they keep.
        solve_masked: `(weights, hessian (d, d), masks) -> weights`: the same with given masks.
        comparable: across what scores may be ranked: one `"row"`, one `"matrix"` (of units: one layer), or the whole
            `"model"`.
        scope: across what single weights are ranked where nothing else is asked.
        allocation: what `allocation="auto"` means for this scorer.
        units: kinds of unit that go where a config names none; None for all.
        seq_len: recommended calibration length in tokens; None leaves it to the model.
        configure: makes the same scorer with other options; their names and defaults are its keyword arguments.
    """

    name: str
    score: Callable[[Tensor, Statistics], Tensor]
    reference: str
    patterns: tuple[str, ...] = ("structured",)
    score_units: Callable[[Units], Tensor] | None = None
    combine: Callable[[Sequence[Tensor], bool], list[Tensor]] | None = None
    objectives: tuple[Objective, ...] = ()
    gates: Objective | None = None
    inputs: Literal["norm", "variance", "hessian"] | None = None
    reads: Literal["readers", "all"] = "readers"
    influence: Callable[[Tensor, Tensor], Tensor] | None = None
    draw: Callable[[torch.Generator], Tensor] | None = None
    solve: Solve | None = None
    solve_masked: Callable[[Sequence[Tensor], Tensor, Sequence[Tensor]], list[Tensor]] | None = None
    comparable: Literal["row", "matrix", "model"] = "model"
    scope: Literal["row", "matrix"] = "matrix"
    allocation: Literal["uniform", "global", "gamma"] = "uniform"
    units: tuple[str, ...] | None = None
    seq_len: int | None = None
    configure: "Callable[..., Scorer] | None" = None

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward has to run."""
        return bool(self.objectives) or self.gates is not None

    @property
    def predicts(self) -> bool:
        """Whether it looks at predictions of next tokens, which samples of one token do not have."""
        return any(objective.per == "token" for objective in (*self.objectives, self.gates) if objective is not None)

    @property
    def needs_data(self) -> bool:
        """Whether calibration has to run."""
        return self.needs_gradients or self.influence is not None or self.inputs is not None

    def with_options(self, options: Mapping[str, Any] | None) -> "Scorer":
        """Return the same scorer with other options.

        Raises:
            InvalidConfig: it has no such option, or not that value of it.
        """
        if not options:
            return self
        if self.configure is None:
            raise InvalidConfig(f"scorer {self.name!r} has no options; scorer_options={dict(options)} was given.")
        names = list(inspect.signature(self.configure).parameters)
        for name in options:
            if name not in names:
                raise InvalidConfig(unknown(f"option of scorer {self.name!r}", name, names))
        return self.configure(**options)


def weighted_units(score: Callable[[Tensor, Statistics], Tensor], units: Units) -> Tensor:
    """Sum scores of weights into scores of units, `(number,) float32`, over all linears of a coupled group."""
    writers, readers = (
        [score(part.weight, part.statistics) for part in parts] for parts in (units.writers, units.readers)
    )
    return unit_scores(writers, readers, units.number)


def unit_scores(writers: Sequence[Tensor], readers: Sequence[Tensor], num_units: int) -> Tensor:
    """Sum scores of weights into scores of units, over all linears of a coupled group.

    Args:
        writers: scores `(rows, d_in) float32`; the rows fall into `num_units` equal blocks.
        readers: scores `(d_out, columns) float32`; the columns fall into `num_units` equal blocks.
        num_units: units of the group.

    Returns:
        `(num_units,) float32`.
    """
    # One order of summation for every caller: streamed and whole-model gradients must give equal bits.
    return sum(
        (
            *(score.sum(dim=1).view(num_units, -1).sum(dim=1) for score in writers),
            *(score.sum(dim=0).view(num_units, -1).sum(dim=1) for score in readers),
        ),
        start=torch.zeros(num_units, dtype=torch.float32, device=(*writers, *readers)[0].device),
    )


def standardised(scores: Sequence[Tensor], together: bool) -> list[Tensor]:
    """Return z-scores: of each group by itself, or of all together; what does not vary is 0.

    Args:
        scores: `(number, ...) float32` of each group; every further axis is standardised by itself.
        together: one mean and standard deviation for all groups.
    """
    pools = [torch.cat(list(scores))] * len(scores) if together else scores
    return [_z(score, pool) for score, pool in zip(scores, pools, strict=True)]


def _z(scores: Tensor, pool: Tensor) -> Tensor:
    deviation = pool.std(dim=0, correction=0)
    return torch.where(deviation > 0, (scores - pool.mean(dim=0)) / deviation, 0)


def sum_readers(units: Units, columns: Callable[[Part], Tensor]) -> Tensor:
    """Sum scores of the readers' columns, `(..., d_in)` each, into scores of units, `(..., number)`."""
    sums = [columns(reader).unflatten(-1, (units.number, -1)).sum(dim=-1) for reader in units.readers]
    return torch.stack(sums).sum(dim=0)
