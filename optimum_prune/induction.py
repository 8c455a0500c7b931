"""Sparsity induction: masks are learned block by block, on top of a scorer's own.

A block is pruned by the scorer first. Then scales of its inputs are trained, which choose other masks: what the block
returns should be what the dense block returns of the same inputs, those of the pruned blocks before it. Some sequences
are held out; where the learned masks do no better on them, the scorer's own stay. The scales are gone afterwards: what
is left is weights with zeros, and biases.

Biases make up for the weights that go: `b + (W - W M) delta`, where delta stands for the input. It starts at the mean,
and is trained along with the scales; where the same masks do better on what is held out with the biases as they were,
those stay. Linears without a bias get one only with consent, since not every class can load it.

After Jiang et al. 2026, arXiv 2602.21652. The paper trains scales that are absorbed into the model; for a fixed mask
they change nothing (equation 3), so here they only choose it. The start (scales of 1, not equation 5), the training and
the choice are ours: the start by medians never beat the scorer's masks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.biases import add_, has_bias, remove_
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.devices import moved
from optimum_prune.config import InductionConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.layerwise import Batch, Step, calls, lockstep
from optimum_prune.scaling import Candidate, Found, Masks, Passes, Shared, output, train_, write_

Solve = Callable[[Sequence[str], Iterator[Tensor], Masks], None]
"""`(names of linears, their common input from every micro-batch, masks)`: sets their weights, zero where masked."""


@dataclass(frozen=True)
class Base:
    """The scorer on top of which masks are learned.

    Attributes:
        prune: as it does without induction.
        solve: of scorers that change what they keep: the same with given masks.
        by_inputs: whether its scores are products of weights and inputs, not of weights alone.
    """

    prune: Step
    solve: Solve | None
    by_inputs: bool


@dataclass(frozen=True)
class Gain:
    """What learning the masks of one block was worth.

    Attributes:
        block: module path.
        base: mean square difference to the dense block's output on held-out sequences, with the scorer's own masks.
        induced: the same with the learned ones.
        shifted: biases that were there, and shifted.
        created: biases that were not.
    """

    block: str
    base: float
    induced: float
    shifted: int = 0
    created: int = 0

    @property
    def kept(self) -> bool:
        """Whether the learned masks stayed. Where the loss is not finite, they did not."""
        return self.induced < self.base

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, which have no number that is not finite."""
        losses = {"base": self.base, "induced": self.induced}
        shown = {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
        biases = {"shifted": self.shifted, "created": self.created}
        return {"block": self.block, **shown, "kept": self.kept, **biases}


@dataclass(frozen=True)
class Sequences:
    """Micro-batches without padding; the last ones are held out."""

    batches: list[Batch]
    training: int

    def parts(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Cut what belongs to the micro-batches into that of the training and that of what is held out."""
        return values[: self.training], values[self.training :]


def split(data: CalibrationData, config: InductionConfig, seed: int) -> Sequences:
    """Draw what is held out, at least one sequence.

    Raises:
        CalibrationError: there are fewer than two sequences.
    """
    count = len(data.samples)
    if count < 2:
        raise CalibrationError(
            f"induction trains on some calibration sequences and holds out others; {data.source} gives {count}. Raise "
            "num_samples, or lower seq_len."
        )
    # On the CPU whatever the default device: transformers loads models under `torch.device("meta")`.
    order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    held_out = min(max(1, round(count * config.held_out)), count - 1)
    training, rest = (
        list(data.part(sorted(part)).even_batches(config.batch_size)) for part in (order[held_out:], order[:held_out])
    )
    return Sequences([*training, *rest], len(training))


def induce_(
    model: PreTrainedModel,
    candidates: Mapping[str, Candidate],
    groups: Sequence[Sequence[str]],
    sequences: Sequences,
    base: Base,
    config: InductionConfig,
    seed: int,
) -> list[Gain]:
    """Prune linears in place, block by block.

    Args:
        model: under `no_grad` and `modes.frozen`.
        candidates: by name; all that are in `groups`.
        groups: linears by their common input, as `layerwise.trace` found them.
        sequences: all that statistics are taken from.
        base: what prunes first.
        config: of the training.
        seed: of the order of the training.

    Returns:
        What it was worth, block by block.
    """
    parts = {block: list(own) for block, own in groupby(groups, key=lambda group: candidates[group[0]].block)}
    blocks = {name: model.get_submodule(name) for name in parts}
    gains: list[Gain] = []
    with tqdm(total=len(parts), desc="Induction", unit="block") as bar:
        batches = [moved(batch, model) for batch in sequences.batches]
        for name, given in calls(model, blocks, batches):
            passes = Passes(blocks[name], given, [output(blocks[name], call) for call in given])
            own = [{linear: candidates[linear] for linear in group} for group in parts[name]]
            gains.append(_prune_(passes, own, sequences, base, config, seed))
            bar.set_postfix(loss=f"{min(gains[-1].induced, gains[-1].base):.3g}")
            bar.update()
    return gains


def _prune_(
    passes: Passes,
    groups: Sequence[Mapping[str, Candidate]],
    sequences: Sequences,
    base: Base,
    config: InductionConfig,
    seed: int,
) -> Gain:
    """Prune one block the better way: by the scorer, or by what is learned, with biases or without."""
    training, held_out = (
        Passes(passes.block, *part)
        for part in zip(sequences.parts(passes.given), sequences.parts(passes.targets), strict=True)
    )
    members = [member for group in groups for member in group.values()]
    bare = [member.linear for member in members if config.allow_bias and not has_bias(member.linear)]
    for linear in bare:
        add_(linear)
    shared = _base_(passes, groups, base)
    before = held_out.loss()
    own = [(parameter, parameter.detach().clone()) for group in shared for parameter in group.parameters]
    best = train_(shared, training, held_out, before, config, seed) if 0 < before < math.inf else Found(before)
    after = best.loss
    if best.masks:
        write_(shared, best.masks, best.deltas)
        if base.solve is not None:
            _solve_(passes, shared, best.masks, base.solve)
            after = held_out.loss()
    if not after < before:
        for parameter, kept in own:
            parameter.copy_(kept)
    biases = sum(len(group.biases) for group in shared) if best.deltas and after < before else 0
    if not biases:
        for linear in bare:
            remove_(linear)
    created = min(biases, len(bare))
    return Gain(members[0].block, before, after, biases - created, created)


def _base_(passes: Passes, groups: Sequence[Mapping[str, Candidate]], base: Base) -> list[Shared]:
    """Let the scorer prune a block; return its linears as they were, with what they were given."""
    shared: list[Shared] = []

    def prune(names: Sequence[str], inputs: Iterator[Tensor]) -> None:
        members = groups[len(shared)]
        weights = {name: member.linear.weight.detach().clone() for name, member in members.items()}
        biases = {n: m.linear.bias.detach().clone() for n, m in members.items() if m.linear.bias is not None}
        moments = _Moments(inputs)
        base.prune(names, moments.watched)
        for _ in moments.watched:  # what a scorer of weights alone leaves
            pass
        root = moments.root if base.by_inputs else torch.ones_like(moments.root)
        # Solved weights make up for the mean themselves.
        shifted = {} if base.solve else biases
        shared.append(Shared(members, weights, shifted, root, moments.mean, moments.root))

    linears = {name: member.linear for group in groups for name, member in group.items()}
    lockstep(passes.block, passes.given, linears, [list(group) for group in groups], prune)
    return shared


def _solve_(passes: Passes, shared: Sequence[Shared], masks: Masks, solve: Solve) -> None:
    """Prune a block with given masks, by a scorer that changes what it keeps."""

    def step(names: Sequence[str], inputs: Iterator[Tensor]) -> None:
        solve(names, inputs, {name: masks[name] for name in names})

    for group in shared:
        group.restore_()
    linears = {name: member.linear for group in shared for name, member in group.members.items()}
    lockstep(passes.block, passes.given, linears, [list(group.members) for group in shared], step)


class _Moments:
    """Mean and root of the mean square of an input, measured while another one looks at it.

    Attributes:
        watched: the same inputs.
    """

    def __init__(self, inputs: Iterator[Tensor]):
        self.watched = self._watch(inputs)
        self._tokens, self._sum, self._squares = (
            0,
            *(torch.zeros((), dtype=torch.float32, device="cpu") for _ in range(2)),
        )

    @property
    def mean(self) -> Tensor:
        """`(d_in,) float32`."""
        return self._sum / self._tokens

    @property
    def root(self) -> Tensor:
        """`(d_in,) float32`."""
        return (self._squares / self._tokens).sqrt()

    def _watch(self, inputs: Iterator[Tensor]) -> Iterator[Tensor]:
        for x in inputs:
            tokens = x.reshape(-1, x.shape[-1]).float()  # (T, d_in); squares of float16 would overflow
            self._tokens += len(tokens)
            self._sum = self._sum.to(x.device) + tokens.sum(dim=0)
            self._squares = self._squares.to(x.device) + tokens.square().sum(dim=0)
            yield x
