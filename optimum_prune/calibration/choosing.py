"""Which items of a source are used: the first, or a seeded draw."""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from optimum_prune.calibration.request import Request
from optimum_prune.calibration.rows import Rows, Stream

T = TypeVar("T")

BUFFER = 10_000
"""Rows of a stream that a draw is made from, at least."""
PER_SAMPLE = 20
"""Rows of the buffer for each sample, where that is more."""
MEMORY = 1 << 27
"""Characters, bytes or token ids that the buffer holds; longer rows are fewer."""
BUFFERS = 10
"""How often the buffer is filled before a stream is given up: it may have no end, and nothing usable in it."""
CHARACTERS = 4
"""Characters that stand for a token where the length of a run of texts is estimated."""


def choose(items: Iterable[T], request: Request, last: Callable[[T], bool] = lambda _: False) -> list[T]:
    """Choose `num_samples` items, or all where there are fewer.

    Args:
        items: read no further than needed for the order "first", to the end for "random".
        request: says how many, in which order, by which seed.
        last: an item that is drawn only where there are not enough others.
    """
    count = request.config.num_samples
    if request.order == "first":
        return list(islice(items, count))
    # The head of a random permutation, of which no more than this head is ever held.
    draw = random.Random(request.config.seed).random
    return heapq.nsmallest(count, items, key=lambda item: (last(item), draw()))


def is_table(items: Iterable[Any]) -> bool:
    """Whether items are rows of a dataset, of which only those drawn need to be read or tokenised."""
    return isinstance(items, Rows | Stream)


def in_order(items: Iterable[Any], request: Request, usable: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield usable items in the order asked for, of which the caller takes what it needs.

    Rows are drawn without replacement from all rows where their number is known. Of a stream they are drawn from a
    buffer of its next rows (`BUFFER`, `PER_SAMPLE`, `MEMORY`), which is filled again, up to `BUFFERS` times, where it
    does not suffice.

    Args:
        items: a list, `Rows` or a `Stream`; of a list, no more than `num_samples` items are drawn.
        request: order, number and seed; counts the rows of the buffers as `buffered`, where the stream has more.
        usable: whether an item counts.
    """
    if request.order == "first":
        return filter(usable, items)
    if is_table(items):
        return filter(usable, (block[row] for block, order in _blocks(items, request) for row in order))
    return iter(choose(filter(usable, items), request))


def runs(texts: Iterable[str | None], request: Request) -> Iterator[str | None]:
    """Yield texts of a table for the draw of windows: runs of consecutive rows, from random rows on, none twice.

    A run is about as long as a window. Rows of a text that was cut into lines or paragraphs stay together that way.

    Args:
        texts: `Rows` or a `Stream`.
        request: see `in_order`.
    """
    length = CHARACTERS * request.seq_len
    for block, order in _blocks(texts, request):
        used: set[int] = set()
        for row in order:
            size = 0
            while row < len(block) and row not in used and size < length:
                used.add(row)
                text = block[row]
                size += len(text or "")
                yield text
                row += 1


def _blocks(items: Iterable[Any], request: Request) -> Iterator[tuple[Sequence[Any], Iterator[int]]]:
    """Yield blocks of rows, each with a random order of its indices: all rows at once, or buffers of a stream."""
    generator = torch.Generator().manual_seed(request.config.seed)

    def order(length: int) -> Iterator[int]:
        indices = torch.randperm(length, generator=generator, device="cpu")
        return chain.from_iterable(part.tolist() for part in indices.split(BUFFER))

    if isinstance(items, Rows):
        yield items, order(len(items))
        return
    stream = iter(items)
    for _ in range(BUFFERS):
        block = _buffer(stream, max(BUFFER, PER_SAMPLE * request.config.num_samples))
        following = list(islice(stream, 1))
        request.seen["buffered"] += len(block)
        if not following:
            request.seen["buffered"] = 0  # all rows of the stream took part
        yield block, order(len(block))
        if not following:
            return
        stream = chain(following, stream)


def _buffer(stream: Iterator[Any], rows: int) -> list[Any]:
    block, size = [], 0
    for item in islice(stream, rows):
        block.append(item)
        size += _size(item)
        if size >= MEMORY:
            break
    return block


def _size(item: Any) -> int:
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, list | tuple) and not (item and isinstance(item[0], int)):
        return sum(map(_size, item))
    return len(item) if hasattr(item, "__len__") else 1
