"""Columns of a dataset -> texts or token ids, read as they are asked for."""

import logging
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any, Literal

from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError

PEEK = 64  # rows that tell what the columns hold where no schema does (csv)
BATCH = 256  # rows read at a time


@dataclass(frozen=True)
class Source:
    """Data before it is tokenised or cut: texts, or lists of token ids, read as `items` is iterated."""

    kind: Literal["texts", "token ids"]
    items: Iterable[Any]


def from_columns(dataset: Any, config: CalibrationConfig, what: str) -> Source:
    """Choose the columns of a dataset that hold tokens (with their mask) or text.

    Args:
        dataset: a `datasets.Dataset` or `datasets.IterableDataset`.
        config: its `text_column`, where set, is read even if there are tokens.
        what: the dataset, in the words of an error message.

    Raises:
        CalibrationError: no such column, or not one alone; the columns are listed.
    """
    types = _column_types(dataset, what)
    if config.text_column is None and "input_ids" in types:
        columns = [column for column in ("input_ids", "attention_mask") if column in types]
        rows = dataset.select_columns(columns)
        return Source("token ids", guarded(map(_unpadded, rows), what))
    column = _text_column(types, config.text_column, what)
    rows = dataset.select_columns([column])
    return Source("texts", guarded((row[column] for row in rows), what))


def _column_types(dataset: Any, what: str) -> dict[str, str]:
    from datasets import Dataset

    with reading(what):
        features = dataset.features or Dataset.from_list(list(dataset.take(PEEK))).features
    return {column: getattr(f, "dtype", None) or type(f).__name__ for column, f in features.items()}


def _text_column(types: dict[str, str], wanted: str | None, what: str) -> str:
    """Choose the column named in the config, or "text", or the only one that holds strings."""
    strings = [column for column, dtype in types.items() if dtype in ("string", "large_string")]
    if wanted is not None:
        candidates = [column for column in strings if column == wanted]
        problem = f"text_column {wanted!r} is no column of strings in {what}"
    else:
        candidates = ["text"] if "text" in strings else strings
        problem = f"Of the columns of {what}, {len(strings)} hold strings, none of these called 'text'"
    if len(candidates) != 1:
        columns = ", ".join(f"{column!r} ({dtype})" for column, dtype in types.items()) or "none"
        raise CalibrationError(f"{problem}; its columns: {columns}. Set text_column to one of strings.")
    return candidates[0]


def _unpadded(row: dict[str, Any]) -> Any:
    """Drop masked tokens, on whichever side they are."""
    ids, mask = row["input_ids"], row.get("attention_mask")
    if mask is None:
        return ids
    if len(ids) != len(mask):
        raise ValueError(f"a row has {len(ids)} input_ids, but {len(mask)} values in its attention_mask")
    return list(compress(ids, mask))


def guarded(items: Iterable[Any], what: str) -> Iterator[Any]:
    """Iterate, a batch ahead, with the errors of the reader turned into ours."""
    items = iter(items)
    while True:
        with reading(what):
            batch = list(islice(items, BATCH))
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
        reason = "it is empty" if isinstance(error, StopIteration) else _reason(error)
        raise CalibrationError(f"Cannot read {what}: {reason}.") from error
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """Return the message of an error and of its cause, which often knows more; else the error's name."""
    messages = (textwrap.shorten(str(e), 300) for e in (error, error.__cause__) if e is not None)
    return ": ".join(filter(None, messages)).rstrip(".") or type(error).__name__
