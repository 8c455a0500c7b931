"""What a scorer is: a pure function of tensors, plus the facts that decide where its scores mean something."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor], Tensor]
"""`(logits (B, T, V), mask (B, T) bool) -> ()`: summed over samples; only its gradient is used."""


Solve = Callable[[Sequence[Tensor], Tensor, float, tuple[int, int] | None], tuple[list[Tensor], str | None]]


@dataclass(frozen=True)
class Statistics:
    """What a scorer may look at besides the weight.

    Attributes:
        gradient: `(d_out, d_in) float32`, of the scorer's objective, accumulated (signed) over all samples.
        norm: `(d_in,) float32`, root of the mean square of each input over all tokens.
        generator: seeded, for scorers that draw.
    """

    generator: torch.Generator
    gradient: Tensor | None = None
    norm: Tensor | None = None


def no_weights(weight: Tensor, statistics: Statistics) -> Tensor:
    """Stand in for `Scorer.score` where a scorer ranks whole layers, or solves for the weights; never called."""
    raise NotImplementedError("This scorer has no scores of single weights.")


@dataclass(frozen=True)
class Scorer:
    """A score of weights, or of whole layers (blocks and sub-layers); larger = keep.

    Attributes:
        name: as in `PruningConfig.scorer`.
        score: `(weight (d_out, d_in), Statistics) -> (d_out, d_in) float32`, never negative.
        reference: authors, year, arXiv id, equation; says so where it is a reconstruction.
        patterns: those of `PruningConfig.pattern` for which it can be used.
        finish: applied to a unit's sum of scores over all its weights.
        objective: what the gradient is of; None for scorers that need no gradient.
        influence: `(before (T, d), after (T, d)) -> (T,) float32`: what a layer does to the residual stream at each
            token; the mean over all tokens is the score of the layer.
        draw: `Generator -> () float32`: the score of a layer for which no data is looked at.
        inputs: what of a linear's input it looks at: its `"norm"`, or its second moments, the `"hessian"`.
        solve: `(weights, hessian (d, d), sparsity, (n, m) or None) -> (pruned weights, what to note of it)`: for
            scorers that change what they keep.
        comparable: across what scores may be ranked: one `"row"`, one `"matrix"`, or the whole `"model"`.
        scope: across what single weights are ranked where nothing else is asked.
        allocation: what `allocation="auto"` means for this scorer.
        seq_len: recommended calibration length in tokens; None leaves it to the model.
    """

    name: str
    score: Callable[[Tensor, Statistics], Tensor]
    reference: str
    patterns: tuple[str, ...] = ("structured",)
    finish: Callable[[Tensor], Tensor] = lambda total: total
    objective: Objective | None = None
    influence: Callable[[Tensor, Tensor], Tensor] | None = None
    draw: Callable[[torch.Generator], Tensor] | None = None
    inputs: Literal["norm", "hessian"] | None = None
    solve: Solve | None = None
    comparable: Literal["row", "matrix", "model"] = "model"
    scope: Literal["row", "matrix"] = "matrix"
    allocation: Literal["uniform", "global", "gamma"] = "uniform"
    seq_len: int | None = None

    @property
    def needs_data(self) -> bool:
        """Whether calibration has to run."""
        return any(wanted is not None for wanted in (self.objective, self.influence, self.inputs))


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
        start=torch.zeros(num_units, device=writers[0].device),
    )
