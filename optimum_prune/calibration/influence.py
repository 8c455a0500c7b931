"""What blocks and sub-layers do to the residual stream, observed by hooks in one forward over the calibration data.

The hidden states that a model returns would not do: its last entry comes after the final norm.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.binding import BoundStack
from optimum_prune.calibration.devices import moved
from optimum_prune.errors import UnsupportedModel
from optimum_prune.modes import evaluating

Measure = Callable[[Tensor, Tensor], Tensor]
"""`(before (T, d), after (T, d)) -> (T,) float32`."""
Stream = dict[str, tuple[Tensor, Tensor]]
"""Sub-layer, or "" for the whole block -> the residual stream `(B, T, d)` before and after it."""


@torch.no_grad()
def mean_influence(
    model: PreTrainedModel,
    stacks: Iterable[BoundStack],
    batches: Sequence[Mapping[str, Tensor]],
    measure: Measure,
) -> dict[str, float]:
    """Measure what every block, and every sub-layer that can be skipped, does to the residual stream.

    Args:
        model: left as it was.
        stacks: of `model`.
        batches: inputs of the model, with the masks that the stacks name.
        measure: applied to the tokens of a batch that are no padding.

    Returns:
        Full path of a block or sub-layer -> the mean over all tokens.

    Raises:
        UnsupportedModel: the measure of a layer is not finite; the first such layer is named.
    """
    sums: dict[str, float] = {}
    tokens: dict[str, int] = {}
    batch: Mapping[str, Tensor] = {}

    def observe(found: BoundStack, layer: int, stream: Stream) -> None:
        for path, (before, after) in stream.items():
            name = f"{found.path}.{layer}.{path}".rstrip(".")
            if found.stack.mask is not None:
                kept = batch[found.stack.mask].bool().to(before.device)
                before, after = before[kept], after[kept]
            values = measure(before.flatten(0, -2), after.flatten(0, -2))
            sums[name] = sums.get(name, 0.0) + float(values.double().sum())
            tokens[name] = tokens.get(name, 0) + len(values)

    with evaluating(model), _observed(stacks, observe):
        for batch in tqdm(batches, desc="Influence", unit="batch"):
            model.base_model(**moved(batch, model), use_cache=False)  # without the head, whose logits nobody reads
    means = {name: total / tokens[name] for name, total in sums.items()}
    for name, mean in means.items():
        if not math.isfinite(mean):
            raise UnsupportedModel(
                f"The hidden states of {name} are not finite on the calibration data. Load the model in bfloat16 or "
                "float32, and check that it works on its own."
            )
    return means


@contextmanager
def _observed(stacks: Iterable[BoundStack], observe: Callable[[BoundStack, int, Stream], None]) -> Iterator[None]:
    """Call `observe` after every call of every block, for a while."""
    handles: list[RemovableHandle] = []
    try:
        for found in stacks:
            for layer, block in enumerate(found.blocks):
                observer = _Observer({*found.stack.sublayers.values()}, partial(observe, found, layer))
                handles.append(block.register_forward_pre_hook(observer.enter, with_kwargs=True))
                handles.append(block.register_forward_hook(observer.leave))
                for name, child in block.named_children() if found.stack.sublayers else ():
                    hook = partial(observer.enter_child, name)
                    handles.append(child.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Observer:
    """Follows the residual stream through one block.

    What a sub-layer adds to the stream is not always its output (Gemma has norms behind it). But in front of it is a
    norm, and what that one is given is the stream.
    """

    def __init__(self, sublayers: set[str], observe: Callable[[Stream], None]):
        self.sublayers = sublayers
        self.observe = observe

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = _hidden_states(args, kwargs)
        self.before = {"": self.given}

    def enter_child(self, name: str, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in self.sublayers:
            self.before[name] = self.given
        else:
            self.given = _hidden_states(args, kwargs)

    def leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        end = output[0] if isinstance(output, tuple) else output
        _start, *following = self.before.values()
        after = [end, *following[1:], end]  # the last one is left over where the block has no sub-layers
        self.observe({name: (self.before[name], state) for name, state in zip(self.before, after, strict=False)})
        del self.before, self.given  # else every block would hold on to its states until the next batch


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]
