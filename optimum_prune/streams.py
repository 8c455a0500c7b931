"""The residual stream in front of every reader, in each of several forwards that run in turn."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from optimum_prune.binding import BoundGroup

TOLERANCE = 1e-3
"""Of the norm of a block's output; the sums are the model's own, in its own order, and mostly equal to the bit."""


class Streams:
    """Adds up what a block was given and what its readers returned, in every greenlet on its own.

    Where that is the residual stream is not declared but seen (`look`): only where it equals what the block returns.
    Blocks with norms behind their sub-layers (Gemma, OPT-350M) do not add their readers' outputs as they are.

    Args:
        groups: all groups of a model.

    Attributes:
        latest: the stream, `(..., d)`, in front of the reader that was reached last; None where it is not known.
        unknown: blocks that return something else.
    """

    def __init__(self, groups: Iterable[BoundGroup]):
        self._readers: dict[nn.Module, list[nn.Linear]] = {}
        for group in groups:
            self._readers.setdefault(group.block, []).extend(group.readers)
        self._streams: dict[greenlet, Tensor | None] = {}
        self.latest: Tensor | None = None
        self.unknown: set[nn.Module] = set()

    def look(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
        """Run one batch, to see which blocks are `unknown`."""
        handles = [block.register_forward_hook(self._compare) for block in self._readers]
        try:
            with self.followed():
                model.base_model(**batch, use_cache=False)  # without the head, whose logits nobody reads
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the forwards for a while."""
        handles: list[RemovableHandle] = []
        try:
            for block, readers in self._readers.items():
                handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
                for reader in readers:
                    handles.append(reader.register_forward_pre_hook(self._reach))
                    handles.append(reader.register_forward_hook(self._add))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._streams.clear()
            self.latest = None

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        self._streams[getcurrent()] = None if block in self.unknown else given

    def _reach(self, reader: nn.Module, args: tuple[Any, ...]) -> None:
        self.latest = self._streams[getcurrent()]

    def _add(self, reader: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        stream = self._streams[getcurrent()]
        if stream is not None:
            # OPT's MLP flattens the batch.
            self._streams[getcurrent()] = stream.to(output.device) + output.view(stream.shape)

    def _compare(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        returned = (output[0] if isinstance(output, tuple) else output).float()
        stream = self._streams[getcurrent()]
        if stream is None or not (returned - stream.float()).norm() <= TOLERANCE * returned.norm():
            self.unknown.add(block)
