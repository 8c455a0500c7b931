"""Rows of a dataset, read as they are asked for, with the errors of their readers in one sentence."""

import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from optimum_prune.errors import CalibrationError

BATCH = 256  # rows read at a time


class Rows(Sequence[Any]):
    """The rows of a dataset whose length is known, each as one item, in any order.

    Args:
        dataset: a `datasets.Dataset`.
        item: makes an item of a row.
        what: the dataset, in the words of an error message.
        ahead: rows read at a time where all are read in order.
    """

    def __init__(self, dataset: Any, item: Callable[[dict[str, Any]], Any], what: str, ahead: int = BATCH):
        self.dataset, self.item, self.what, self.ahead = dataset, item, what, ahead

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with reading(self.what):
            return self.item(self.dataset[index])

    def __iter__(self) -> Iterator[Any]:
        return guarded(map(self.item, self.dataset), self.what, self.ahead)


class Stream:
    """Items of unknown number, which can only be read in order, and once.

    Args:
        items: read as the stream is iterated.
    """

    def __init__(self, items: Iterable[Any]):
        self.items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self.items


def rows(dataset: Any, item: Callable[[dict[str, Any]], Any], what: str, ahead: int = BATCH) -> Iterable[Any]:
    """Return the rows of a dataset as items; those of a streamed one can only be read in order, and once."""
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        return Stream(guarded(map(item, dataset), what, ahead))
    return Rows(dataset, item, what, ahead)


def guarded(items: Iterable[Any], what: str, ahead: int = BATCH) -> Iterator[Any]:
    """Iterate, some items ahead, with the errors of the reader turned into ours."""
    items = iter(items)
    while True:
        with reading(what):
            batch = list(islice(items, ahead))
        if not batch:
            return
        yield from batch


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever a reader raises into one sentence, and keep `datasets` from logging it as well."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # datasets, pyarrow, pandas, gzip and the network share no base class
        # A StopIteration is how datasets says that a file has no rows.
        reason = "it is empty" if isinstance(error, StopIteration) else reason_of(error)
        raise CalibrationError(f"Cannot read {what}: {reason}.") from error
    finally:
        logger.setLevel(level)


def reason_of(error: BaseException) -> str:
    """Return the message of an error and of its cause, which often knows more; else the error's name."""
    messages = (textwrap.shorten(str(e), 300) for e in (error, error.__cause__) if e is not None)
    return ": ".join(filter(None, messages)).rstrip(".") or type(error).__name__
