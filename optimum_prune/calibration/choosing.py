"""Which items of a source are used: the first, or a seeded draw."""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch

from optimum_prune.calibration.request import Request
from optimum_prune.calibration.rows import Rows

T = TypeVar("T")


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


def in_order(items: Iterable[Any], request: Request, usable: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield usable items in the order asked for, of which the caller takes what it needs.

    Where the source knows its length, only what is taken is read, in either order. A stream must be read to its end for
    a draw; it yields `num_samples` items then.
    """
    if request.order == "first":
        return filter(usable, items)
    if isinstance(items, Rows):
        generator = torch.Generator().manual_seed(request.config.seed)
        return filter(usable, map(items.__getitem__, torch.randperm(len(items), generator=generator).tolist()))
    return iter(choose(filter(usable, items), request))
