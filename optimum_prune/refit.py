"""Compensation on a live model: the readers' weights of kept units make up for the units that go.

Before anything is sliced: afterwards the columns of the removed units are zero, so the model computes already what the
sliced one will.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.binding import BoundGroup, bind
from optimum_prune.calibration.devices import moved
from optimum_prune.calibration.inputs import input_moments
from optimum_prune.calibration.moments import check_finite, second_moment
from optimum_prune.compensation import bias_shift, least_squares, towards
from optimum_prune.errors import InvalidConfig, unknown
from optimum_prune.layerwise import Batch, trace, walk
from optimum_prune.modes import frozen
from optimum_prune.streams import Streams
from optimum_prune.surgery import cutting, positions

FEW, ENOUGH = 4, 10
"""Tokens per input of a reader: below the first, report and plan warn; the second is what they advise."""


@dataclass(frozen=True)
class Reader:
    """A linear that loses columns.

    Attributes:
        name: full module path.
        linear: left as it is until all is known.
        kept: sorted columns, int64, on the weight's device.
    """

    name: str
    linear: nn.Linear
    kept: Tensor

    def spread(self, weight: Tensor) -> Tensor:
        """Return weights of the kept columns, `(d_out, len(kept))`, among zeros for the others."""
        return torch.zeros_like(self.linear.weight).index_copy_(1, self.kept, weight)


@dataclass
class Refit:
    """What is known of the readers while data flows through the model; nothing is written to it.

    Attributes:
        readers: by name.
        weights: name -> new weights of the kept columns, in the linear's dtype; those without one keep theirs.
        biases: name -> new bias, in the linear's dtype.
        tokens: name -> how many the reader has seen.
        notes: for the report.
    """

    readers: Mapping[str, Reader]
    weights: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def hold(self, reader: Reader, weight: Tensor, note: str | None) -> None:
        """Hold new weights, `(d_out, len(kept)) float32`, aside, if they fit into the linear's dtype."""
        narrow = weight.to(reader.linear.weight.dtype)
        if torch.isfinite(narrow).all():
            self.weights[reader.name] = narrow
        else:
            note = f"the compensated weights do not fit into {narrow.dtype}; they are not compensated."
        if note:
            self.notes.append(f"{reader.name}: {note}")

    def write_(self) -> None:
        """Write everything to the model."""
        for name, reader in self.readers.items():
            linear = reader.linear
            linear.weight.copy_(reader.spread(self.weights.get(name, linear.weight[:, reader.kept])))
            if name in self.biases:
                assert linear.bias is not None, "only a bias that there is was shifted"
                linear.bias.copy_(self.biases[name])


def check_compensation(groups: Sequence[BoundGroup], method: str) -> None:
    """Refuse a method that could do nothing for these groups.

    Raises:
        InvalidConfig: an unknown method, or `"bias"` where no reader has one.
    """
    if method not in METHODS:
        raise InvalidConfig(unknown("compensation", method, METHODS))
    readers = {name: linear for group in groups for name, linear in group.named_readers}
    if method == "bias" and all(linear.bias is None for linear in readers.values()):
        raise InvalidConfig(
            "compensation='bias' shifts the biases of the linears that read the pruned units, and none of them has one "
            f"(e.g. {min(readers)}). Use compensation='least_squares'."
        )


@torch.no_grad()
def compensate_(
    model: PreTrainedModel,
    groups: Sequence[BoundGroup],
    kept: Mapping[str, Tensor],
    batches: Sequence[Batch],
    method: str,
) -> list[str]:
    """Let the kept units make up for those that will be sliced away, in place.

    Only readers change, and only those of groups that lose units. An error on the way leaves the model as it was.

    Args:
        model: any supported model.
        groups: those that are about to be sliced, of `model`.
        kept: name of a group -> sorted indices of its kept units, int64.
        batches: calibration data without padding, see `CalibrationData.even_batches`.
        method: `"least_squares"` (each reader on the dense model's inputs), `"sequential"` (each on the inputs that the
            model has that is compensated so far, towards the dense model's residual stream) or `"bias"`.

    Returns:
        Notes for the report.

    Raises:
        InvalidConfig: see `check_compensation`.
        CalibrationError: no sample passes through a reader.
        UnsupportedModel: an input is not finite.
    """
    check_compensation(groups, method)
    refit = Refit({reader.name: reader for group in groups for reader in _readers(group, kept[group.name])})
    if not refit.readers:
        return []
    with frozen(model):
        METHODS[method](model, refit, [moved(batch, model) for batch in batches])
    with cutting():
        refit.write_()
    return refit.notes


def _least_squares(model: PreTrainedModel, refit: Refit, batches: Sequence[Batch]) -> None:
    def step(names: Sequence[str], inputs: Iterator[Tensor]) -> None:
        reader = refit.readers[names[0]]
        moment = second_moment(reader.name, _counted(refit, reader, inputs), full=True)
        refit.hold(reader, *least_squares(reader.linear.weight.float(), moment, reader.kept))

    walk(model, _linears(refit.readers), batches, _order(model, refit.readers, batches[0]), step, "Compensation")
    _note_tokens(refit, batches)


def _bias(model: PreTrainedModel, refit: Refit, batches: Sequence[Batch]) -> None:
    def step(names: Sequence[str], inputs: Iterator[Tensor]) -> None:
        reader = refit.readers[names[0]]
        bias = reader.linear.bias
        mean = input_moments(reader.name, inputs, full=False).mean
        shift = bias_shift(reader.linear.weight.float(), mean, reader.kept)
        refit.biases[reader.name] = (bias.float() + shift).to(bias.dtype)

    biased = {name: reader for name, reader in refit.readers.items() if reader.linear.bias is not None}
    if without := sorted(refit.readers.keys() - biased):
        refit.notes.append(f"{len(without)} readers have no bias to shift, e.g. {without[0]}.")
    walk(model, _linears(biased), batches, _order(model, biased, batches[0]), step, "Compensation")


def _sequential(model: PreTrainedModel, refit: Refit, batches: Sequence[Batch]) -> None:
    """Run every micro-batch twice in lockstep, through the dense model and through the compensated one.

    Both are the same modules. They differ in what was compensated so far, and of that a flow meets only the last reader
    when it goes on: so this one weight is put in place for whichever flow goes on next.
    """
    streams = Streams(bind(model))
    streams.look(model, batches[0])
    dense = {name: reader.linear.weight.data for name, reader in refit.readers.items()}
    doubled = [batch for batch in batches for _ in range(2)]
    passed: tuple[nn.Linear, dict[bool, Tensor]] | None = None  # the last reader; compensated or not -> its weight

    def step(names: Sequence[str], inputs: Iterator[Tensor]) -> None:
        nonlocal passed
        reader = refit.readers[names[0]]
        weight = reader.linear.weight.float()

        def reach(compensated: bool) -> tuple[Tensor, Tensor | float]:
            """Let a flow go on to the reader; return its input and the stream there, `(T, d)`."""
            if passed is not None:
                linear, either = passed
                linear.weight.data = either[compensated]
            x = next(inputs).flatten(0, -2)
            return x, 0.0 if streams.latest is None else streams.latest.flatten(0, -2).to(x.device).float()

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            """Yield targets `(T, d_out) float32` and kept inputs `(T, len(kept)) float32`."""
            for _ in batches:
                x, stream = reach(compensated=False)
                target = x.float() @ weight.t() + stream
                x, stream = reach(compensated=True)
                yield target - stream, x[:, reader.kept].float()

        own = weight[:, reader.kept]
        refit.hold(reader, *towards(own, *_moments(refit, reader, pairs())))
        new = reader.spread(refit.weights.get(reader.name, own.to(reader.linear.weight.dtype)))
        passed = reader.linear, {False: dense[reader.name], True: new}

    try:
        with streams.followed():
            walk(
                model, _linears(refit.readers), doubled, _order(model, refit.readers, batches[0]), step, "Compensation"
            )
    finally:
        for name, weight in dense.items():
            refit.readers[name].linear.weight.data = weight
    _note_tokens(refit, batches)


METHODS: dict[str, Callable[[PreTrainedModel, Refit, Sequence[Batch]], None]] = {
    "least_squares": _least_squares,
    "sequential": _sequential,
    "bias": _bias,
}


def _moments(refit: Refit, reader: Reader, pairs: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return `E[a a^T]` and `E[t a^T]`, over pairs of a target t and inputs a."""
    width = len(reader.kept)
    moment = torch.zeros(width, width, dtype=torch.float32, device=reader.kept.device)
    cross = torch.zeros(len(reader.linear.weight), width, dtype=torch.float32, device=reader.kept.device)
    tokens = 0
    for target, x in pairs:
        moment.addmm_(x.t(), x)
        cross.addmm_(target.t(), x)
        tokens += len(x)
    check_finite(reader.name, moment)
    check_finite(reader.name, cross)
    refit.tokens[reader.name] = tokens
    return moment.div_(tokens), cross.div_(tokens)


def _readers(group: BoundGroup, kept: Tensor) -> Iterator[Reader]:
    if len(kept) == group.num_units:
        return
    for name, linear in group.named_readers:
        columns = positions(kept.cpu(), group.num_units, linear.weight.shape[1])
        yield Reader(name, linear, columns.to(linear.weight.device))


def _linears(readers: Mapping[str, Reader]) -> dict[str, nn.Linear]:
    return {name: reader.linear for name, reader in readers.items()}


def _order(model: PreTrainedModel, readers: Mapping[str, Reader], batch: Batch) -> list[list[str]]:
    """Return the readers in the order of calls, each alone."""
    return [[name] for names in trace(model, _linears(readers), batch) for name in names]


def _counted(refit: Refit, reader: Reader, inputs: Iterator[Tensor]) -> Iterator[Tensor]:
    for x in inputs:
        refit.tokens[reader.name] = refit.tokens.get(reader.name, 0) + x[..., 0].numel()
        yield x


def _note_tokens(refit: Refit, batches: Sequence[Batch]) -> None:
    """Note where there is too little data, of the reader that has least for its width."""
    widths = {name: reader.linear.weight.shape[1] for name, reader in refit.readers.items()}
    name = min(widths, key=lambda name: refit.tokens[name] / widths[name])
    samples = sum(len(batch["input_ids"]) for batch in batches)
    refit.notes += few_tokens(refit.tokens[name], widths[name], samples)


def few_tokens(tokens: int, inputs: int, samples: int) -> list[str]:
    """Return a warning where a reader gets fewer than `FEW` calibration tokens for each input; else nothing.

    Args:
        tokens: of all samples together.
        inputs: of the reader.
        samples: number of samples.
    """
    if tokens >= FEW * inputs:
        return []
    enough = math.ceil(ENOUGH * inputs * samples / tokens)
    return [
        f"{tokens:,} calibration tokens for readers of {inputs:,} inputs: least squares gains from more. {ENOUGH} "
        f"tokens for each input are {enough:,} samples of this length (num_samples={enough})."
    ]
