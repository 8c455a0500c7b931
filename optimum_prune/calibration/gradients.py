"""Gradients of a scalar of the logits with respect to the weights, one block at a time.

A plain backward holds the gradients of all weights at once, which doubles the model. Here the inputs of every block are
saved in one forward, and the backward recomputes one block at a time, from the last to the first: the peak is the
weights, one block's gradients and the saved inputs. The operations and their order are those of the plain backward, so
on a CPU the gradients are equal bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.errors import UnsupportedModel
from optimum_prune.modes import frozen
from optimum_prune.scorers.base import Objective

HALF_SCALE = 2.0**14
"""On the objective of float16 models, whose smallest gradients would be flushed to zero; divided out again."""

Batch = Mapping[str, Tensor]


def stream_gradients(
    model: PreTrainedModel,
    blocks: Sequence[nn.Module],
    linears: Mapping[int, Sequence[nn.Linear]],
    batches: Sequence[Batch],
    objective: Objective,
    reduce: Callable[[int, dict[nn.Linear, Tensor]], None],
) -> None:
    """Hand the gradients of one block after the other to `reduce`, from the last block to the first.

    Args:
        model: any transformers model whose output has `logits (B, T, V)`; left as it was.
        blocks: the stack that the hidden states pass through, in order.
        linears: block index -> linears whose weights' gradients are wanted.
        batches: `input_ids (B, T) int64` and `attention_mask (B, T) int64`, right padded.
        objective: summed over samples; the gradient is divided by the number of samples.
        reduce: called with a block's index and the gradients `(d_out, d_in) float32` of its linears, under `no_grad`.

    Raises:
        UnsupportedModel: an activation or a gradient is not finite; the block is named.
    """
    samples = sum(len(batch["input_ids"]) for batch in batches)
    scale = HALF_SCALE if model.dtype == torch.float16 else 1.0
    lowest = min(linears)
    with frozen(model), torch.enable_grad():
        calls, upstream = _forward(model, blocks, batches, objective, scale / samples)
        for index in tqdm(range(len(blocks) - 1, lowest - 1, -1), desc="Backward", unit="block"):
            wanted = linears.get(index, ())
            gradients = _block_backward(blocks[index], calls.pop(), upstream, wanted, index > lowest)
            with torch.no_grad():
                _unscale_(gradients, scale, index)
                reduce(index, gradients)
            del gradients  # before the next block's come into being


class _Call:
    """One call of a block: its hidden states, and all other arguments as they came."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.by_position = bool(args)
        self.hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self.args, self.kwargs = args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states" or args}

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        if self.by_position:
            return _hidden(block(hidden, *self.args, **self.kwargs))
        return _hidden(block(hidden_states=hidden, **self.kwargs))


def _forward(
    model: PreTrainedModel, blocks: Sequence[nn.Module], batches: Sequence[Batch], objective: Objective, scale: float
) -> tuple[list[list[_Call]], list[Tensor]]:
    """Save every block's calls, and the gradient of the scaled objective with respect to the last block's output."""
    calls: list[list[_Call]] = [[] for _ in blocks]
    last: list[Tensor] = []

    def leaf(module: nn.Module, args: Any, output: Any) -> Any:
        # No parameter requires a gradient here, so the graph starts at this leaf: it spans the head alone.
        last[:] = [_hidden(output).detach().requires_grad_()]
        return (last[0], *output[1:]) if isinstance(output, tuple) else last[0]

    handles = [
        block.register_forward_pre_hook(
            lambda module, args, kwargs, saved=saved: saved.append(_Call(args, kwargs)), with_kwargs=True
        )
        for block, saved in zip(blocks, calls, strict=True)
    ]
    handles.append(blocks[-1].register_forward_hook(leaf))
    upstream = []
    try:
        for batch in tqdm(batches, desc="Forward", unit="batch"):
            logits = getattr(model(**_to(batch, model.device), use_cache=False), "logits", None)
            if logits is None or logits.dim() != 3:
                raise UnsupportedModel(
                    f"{type(model).__name__} gives no logits (batch, tokens, vocabulary) to take gradients of. "
                    "Load the model with its language-model head (AutoModelForCausalLM), or choose a scorer that "
                    "needs no data."
                )
            value = objective(logits, batch["attention_mask"].bool().to(logits.device))
            if not torch.isfinite(value):
                raise UnsupportedModel(
                    f"The output of {_first_not_finite(calls, last[0])} is not finite on a calibration batch. "
                    "Load the model in bfloat16 or float32, and check that it works on its own."
                )
            upstream += torch.autograd.grad(value * scale, last)
            del logits, value
    finally:
        for handle in handles:
            handle.remove()
    return calls, upstream


def _first_not_finite(calls: Sequence[Sequence[_Call]], last: Tensor) -> str:
    """Name the part of the model after which the latest batch held NaN or infinite values."""
    for index, hidden in enumerate([*(saved[-1].hidden for saved in calls), last]):
        if not torch.isfinite(hidden).all():
            return f"block {index - 1}" if index else "the embeddings"
    return "the head"


def _block_backward(
    block: nn.Module, calls: Sequence[_Call], upstream: list[Tensor], linears: Sequence[nn.Linear], further: bool
) -> dict[nn.Linear, Tensor]:
    """Recompute one block for every batch; replace `upstream` by the gradients of its inputs where `further` is set."""
    weights = [linear.weight.requires_grad_() for linear in linears]
    totals: dict[nn.Linear, Tensor] = {}

    def take(linear: nn.Linear, gradient: Tensor) -> Tensor:
        # As soon as it is there: autograd.grad holds all gradients until it returns, a second block's worth. It
        # gets a stand-in without memory of its own.
        totals[linear] = totals[linear].add_(gradient) if linear in totals else gradient.float()
        return gradient.new_zeros(()).expand_as(gradient)

    handles = [linear.weight.register_hook(partial(take, linear)) for linear in linears]
    try:
        for i, call in enumerate(calls):
            hidden = call.hidden.detach().requires_grad_(further)
            output = call.run(block, hidden)
            inputs = [hidden, *weights] if further else weights
            gradients = torch.autograd.grad(output, inputs, upstream[i].to(output.device))
            if further:
                upstream[i] = gradients[0]
    finally:
        for handle in handles:
            handle.remove()
    for weight in weights:
        weight.requires_grad_(False)
    return totals


def _unscale_(gradients: Mapping[nn.Linear, Tensor], scale: float, index: int) -> None:
    for linear, gradient in gradients.items():
        if not torch.isfinite(gradient).all():
            raise UnsupportedModel(
                f"A gradient of block {index} ({tuple(linear.weight.shape)}) is not finite. Load the model in bfloat16 "
                "or float32."
            )
        gradient.div_(scale)


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _to(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
