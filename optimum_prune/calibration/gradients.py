"""Gradients of a scalar of the outputs with respect to weights and activations, one block at a time.

A plain backward holds the gradients of all weights at once, which doubles the model. Here the inputs of every block are
saved in one forward, and the backward recomputes one block at a time, from the last to the first: the peak is the
weights, one block's gradients and the saved inputs. The operations and their order are those of the plain backward, so
on a CPU the gradients are equal bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.calibration.devices import moved
from optimum_prune.errors import CalibrationError, UnsupportedModel
from optimum_prune.modes import frozen
from optimum_prune.objectives import IGNORED, Objective, Outputs

HALF_SCALE = 2.0**14
"""On the objective of float16 models, whose smallest gradients would be flushed to zero; divided out again."""

Batch = Mapping[str, Tensor]
Place = tuple[int, int]
"""Index of a stack, in the order of the data, and index of a block in it."""


@dataclass(frozen=True)
class Wanted:
    """What gradients are taken of, and with respect to what.

    Attributes:
        objective: a scalar of the outputs.
        weights: (stack, block) -> linears whose weights' gradients are wanted.
        gates: (stack, block) -> linears for whose inputs x the products `x dL/dx` are wanted.
    """

    objective: Objective
    weights: Mapping[Place, Sequence[nn.Linear]] = field(default_factory=dict)
    gates: Mapping[Place, Sequence[nn.Linear]] = field(default_factory=dict)

    @property
    def places(self) -> set[Place]:
        """Blocks of which anything is wanted."""
        return {*self.weights, *self.gates}


@dataclass(frozen=True)
class Gradients:
    """Gradients of one objective in one block.

    Attributes:
        weights: linear -> `(d_out, d_in) float32`.
        gates: linear -> `(N, d_in) float32`: `sum over tokens of x dL/dx` of every sample, or of every picture.
    """

    weights: dict[nn.Linear, Tensor] = field(default_factory=dict)
    gates: dict[nn.Linear, Tensor] = field(default_factory=dict)


def stream_gradients(
    model: PreTrainedModel,
    stacks: Mapping[str, Sequence[nn.Module]],
    batches: Sequence[Batch],
    labels: Sequence[Tensor],
    wanted: Sequence[Wanted],
    reduce: Callable[[Place, dict[str, Gradients]], None],
) -> None:
    """Hand the gradients of one block after the other to `reduce`, from the last block to the first.

    Args:
        model: any transformers model whose output has `logits (B, T, V)`; left as it was.
        stacks: path -> the blocks that the hidden states pass through, in the order of the data. Whatever lies
            between two stacks (T5's norm behind the encoder, LLaVA's projector) is found by autograd.
        batches: inputs of the model, with an `attention_mask (B, T) int64` of them, or `decoder_attention_mask`.
        labels: `(B, T) int64` of each batch, what each position should predict, or `IGNORED`.
        wanted: one for each objective.
        reduce: called under `no_grad` with a block's place and its gradients, by name of the objective.

    Raises:
        UnsupportedModel: an activation or a gradient is not finite; the block is named.
        CalibrationError: no batch passes through a block that is wanted.
    """
    half = HALF_SCALE if model.dtype == torch.float16 else 1.0
    places = set[Place]().union(*(request.places for request in wanted))
    lowest = min(places)
    blocks, names = {}, {}
    for s, (path, stack) in enumerate(stacks.items()):
        if s >= lowest[0]:  # nothing before it is wanted
            blocks |= {(s, b): block for b, block in enumerate(stack)}
            names |= {(s, b): f"{path}.{b}" for b in range(len(stack))}
    counts = {
        "sample": sum(len(batch["input_ids"]) for batch in batches),
        "token": sum(int((row != IGNORED).sum()) for row in labels),
    }
    with frozen(model), torch.enable_grad():
        passes = [
            _forward(model, blocks, names, batches, labels, request.objective, half / counts[request.objective.per])
            for request in wanted
        ]
        for place in sorted(places):
            if not any(place in done.calls for done in passes[0]):
                raise CalibrationError(
                    f"No calibration sample passes through {names[place]}, so it cannot be scored. A vision tower "
                    "needs samples with images: a dataset with an image column."
                )
        for place in tqdm(sorted(blocks, reverse=True), desc="Backward", unit="block"):
            if place < lowest:
                break
            found = {}
            for request, done in zip(wanted, passes, strict=True):
                gradients = _block_backward(place, blocks[place], done, request, further=place > lowest)
                _unscale_(gradients, half, names[place])
                found[request.objective.name] = gradients
            with torch.no_grad():
                reduce(place, found)
            del found, gradients  # before the next block's come into being


class _Call:
    """One call of a block, cut out of the graph.

    Attributes:
        hidden: the hidden states that it was given.
        outer: other tensors among its arguments that depend on an earlier stack, by position or name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        self.first: int | str = 0 if args else "hidden_states"
        self.hidden: Tensor = self.arguments[self.first]
        self.outer = {
            key: value
            for key, value in self.arguments.items()
            if isinstance(value, Tensor) and value.requires_grad and key != self.first
        }

    def given(self, replaced: Mapping[int | str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments, some of them replaced."""
        arguments = self.arguments | dict(replaced)
        args = tuple(arguments[key] for key in arguments if isinstance(key, int))
        return args, {key: value for key, value in arguments.items() if isinstance(key, str)}

    def detached(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments without the graph that they hang on."""
        tensors = {self.first: self.hidden} | self.outer
        return self.given({key: tensor.detach() for key, tensor in tensors.items()})


class _Pass:
    """One batch on its way: what every block was given, and the gradients of what every block returned.

    Attributes:
        calls: place -> the call of the block; a block that was not called has none.
        outputs: place -> its hidden states as a leaf, of which everything outside the blocks is computed.
        upstream: place -> gradient of its output, once something depends on it.
        held: tensors from earlier stacks with their gradients so far, by identity: all blocks of a stack share them.
    """

    def __init__(self) -> None:
        self.calls: dict[Place, _Call] = {}
        self.outputs: dict[Place, Tensor] = {}
        self.upstream: dict[Place, Tensor] = {}
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def hold(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Keep the gradient of a tensor until all blocks of its stack have added theirs."""
        if tensor.requires_grad and gradient is not None:
            _, so_far = self.held.get(id(tensor), (tensor, 0))
            self.held[id(tensor)] = tensor, so_far + gradient

    def release(self) -> None:
        """Hand on what is held, to the outputs that it was computed of."""
        tensors, gradients = zip(*self.held.values(), strict=True) if self.held else ((), ())
        self.held.clear()
        self.backward(tensors, gradients)

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
        """Find which outputs the tensors were computed of, and add to the gradients of those."""
        if not tensors or not self.outputs:
            return
        found = torch.autograd.grad(tensors, list(self.outputs.values()), gradients, allow_unused=True)
        for place, gradient in zip(self.outputs, found, strict=True):
            if gradient is not None:
                self.upstream[place] = self.upstream[place] + gradient if place in self.upstream else gradient


def _forward(
    model: PreTrainedModel,
    blocks: Mapping[Place, nn.Module],
    names: Mapping[Place, str],
    batches: Sequence[Batch],
    labels: Sequence[Tensor],
    objective: Objective,
    scale: float,
) -> list[_Pass]:
    """Run every batch; no graph is built inside a block."""
    passes: list[_Pass] = []

    def enter(place: Place, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if place in passes[-1].calls:
            raise UnsupportedModel(f"{names[place]} runs more than once a forward, so its gradients are not streamed.")
        call = passes[-1].calls[place] = _Call(args, kwargs)
        return call.detached()

    def leave(place: Place, module: nn.Module, args: Any, output: Any) -> Any:
        leaf = passes[-1].outputs[place] = _hidden(output).detach().requires_grad_()
        return (leaf, *output[1:]) if isinstance(output, tuple) else leaf

    handles = []
    try:
        for place, block in blocks.items():
            handles.append(block.register_forward_pre_hook(partial(enter, place), with_kwargs=True))
            # Before the hooks of transformers, which collect the hidden states that LLaVA takes from its tower.
            handles.append(block.register_forward_hook(partial(leave, place), prepend=True))
        for batch, wanted in zip(tqdm(batches, desc="Forward", unit="batch"), labels, strict=True):
            passes.append(_Pass())
            value = objective.value(_outputs(model, batch, wanted))
            if not torch.isfinite(value):
                raise UnsupportedModel(
                    f"The output of {_first_not_finite(passes[-1], names)} is not finite on a calibration batch. "
                    "Load the model in bfloat16 or float32, and check that it works on its own."
                )
            passes[-1].backward([value * scale])
            del value
    finally:
        for handle in handles:
            handle.remove()
    return passes


def check_head(model: PreTrainedModel) -> None:
    """Refuse a model without a language-model head, whose outputs gradients are taken of.

    Args:
        model: a skeleton will do.

    Raises:
        UnsupportedModel: naming the class.
    """
    if model.get_output_embeddings() is None:
        raise _no_logits(model)


def _no_logits(model: PreTrainedModel) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__} gives no logits (batch, tokens, vocabulary) to take gradients of: it has no "
        "language-model head. Choose a scorer that needs no gradients, e.g. 'wanda' or 'magnitude'."
    )


def _outputs(model: PreTrainedModel, batch: Batch, labels: Tensor) -> Outputs:
    head, states = model.get_output_embeddings(), []
    handle = head.register_forward_pre_hook(lambda _, args: states.append(args[0])) if head is not None else None
    try:
        logits = getattr(model(**moved(batch, model), use_cache=False), "logits", None)
    finally:
        if handle is not None:
            handle.remove()
    if logits is None or logits.dim() != 3 or not states:
        raise _no_logits(model)
    mask = batch.get("decoder_attention_mask", batch["attention_mask"])
    return Outputs(logits, states[0], mask.bool().to(logits.device), labels.to(logits.device))


def _first_not_finite(done: _Pass, names: Mapping[Place, str]) -> str:
    """Name the part of the model after which the latest batch held NaN or infinite values."""
    if any(not torch.isfinite(call.hidden).all() for (_, block), call in done.calls.items() if block == 0):
        return "the embeddings"
    for place, output in done.outputs.items():
        if not torch.isfinite(output).all():
            return names[place]
    return "the head"


def _block_backward(
    place: Place, block: nn.Module, passes: Sequence[_Pass], wanted: Wanted, further: bool
) -> Gradients:
    """Recompute one block for every batch; hand the gradients of its inputs on where `further` is set."""
    linears, gated = wanted.weights.get(place, ()), wanted.gates.get(place, ())
    weights = [linear.weight.requires_grad_() for linear in linears]
    found, gates = Gradients(), {linear: list[Tensor]() for linear in gated}

    def take(linear: nn.Linear, gradient: Tensor) -> Tensor:
        # As soon as it is there: autograd.grad holds all gradients until it returns, a second block's worth. It
        # gets a stand-in without memory of its own.
        totals = found.weights
        totals[linear] = totals[linear].add_(gradient) if linear in totals else gradient.float()
        return gradient.new_zeros(()).expand_as(gradient)

    handles = [linear.weight.register_hook(partial(take, linear)) for linear in linears]
    try:
        for done in passes:
            call, upstream = done.calls.pop(place, None), done.upstream.pop(place, None)
            done.outputs.pop(place, None)
            if call is not None and upstream is not None:
                with _inputs(gated) as inputs:
                    products = _call_backward(place, block, done, call, upstream, weights, inputs, further)
                for linear, product in products.items():
                    gates[linear].append(product)
    finally:
        for handle in handles:
            handle.remove()
    for weight in weights:
        weight.requires_grad_(False)
    # A block that nothing depends on (the last one of LLaVA's tower) has no influence on the objective.
    for linear in linears:
        found.weights.setdefault(linear, torch.zeros_like(linear.weight, dtype=torch.float32))
    for linear, rows in gates.items():
        nothing = linear.weight.new_zeros((1, linear.weight.shape[1]), dtype=torch.float32)
        found.gates[linear] = torch.cat(rows) if rows else nothing
    return found


@contextmanager
def _inputs(linears: Sequence[nn.Linear]) -> Iterator[dict[nn.Linear, Tensor]]:
    """Collect what linears are given."""
    given: dict[nn.Linear, Tensor] = {}

    def keep(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        given[linear] = args[0]  # pyright: ignore[reportArgumentType]

    handles = [linear.register_forward_pre_hook(keep) for linear in linears]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def _call_backward(
    place: Place,
    block: nn.Module,
    done: _Pass,
    call: _Call,
    upstream: Tensor,
    weights: Sequence[Tensor],
    inputs: Mapping[nn.Linear, Tensor],
    further: bool,
) -> dict[nn.Linear, Tensor]:
    """Run one batch through a block and back; return the gates, `(B, d_in) float32`, of the linears in `inputs`."""
    leaves = {key: tensor.detach().requires_grad_() for key, tensor in call.outer.items() if further}
    hidden = call.hidden.detach().requires_grad_()
    args, kwargs = call.given(leaves | {call.first: hidden})
    output = _hidden(block(*args, **kwargs))
    onwards = [*([hidden] if further else ()), *leaves.values()]
    gradients = torch.autograd.grad(
        output, [*onwards, *inputs.values(), *weights], upstream.to(output.device), allow_unused=True
    )
    gates = {
        # Some blocks flatten samples and tokens (OPT's MLP).
        linear: (x.detach().float() * gradient.float()).reshape(len(hidden), -1, x.shape[-1]).sum(dim=1)
        for (linear, x), gradient in zip(inputs.items(), gradients[len(onwards) :], strict=False)
        if gradient is not None
    }
    if not further:
        return gates
    for tensor, gradient in zip(call.outer.values(), gradients[1:], strict=False):
        done.hold(tensor, gradient)
    if place[1] > 0:
        done.backward([call.hidden], gradients[:1])
    else:  # the first block of its stack: what it was given may share a graph with what all others were given
        done.hold(call.hidden, gradients[0])
        done.release()
    return gates


def _unscale_(gradients: Gradients, scale: float, name: str) -> None:
    for linear, gradient in [*gradients.weights.items(), *gradients.gates.items()]:
        if not torch.isfinite(gradient).all():
            raise UnsupportedModel(
                f"A gradient of {name} ({tuple(linear.weight.shape)}) is not finite. Load the model in bfloat16 or "
                "float32."
            )
        gradient.div_(scale)


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
