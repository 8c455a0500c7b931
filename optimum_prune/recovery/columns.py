"""Columns of a dataset -> what a model is trained on: what calibration reads, and answers and chats besides."""

import logging
from functools import partial
from itertools import compress
from typing import Any

from optimum_prune.calibration.columns import (
    IMAGES,
    LISTS,
    STRINGS,
    Source,
    column_types,
    from_columns,
    token_columns,
)
from optimum_prune.calibration.request import ModelKind
from optimum_prune.calibration.rows import rows
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError

logger = logging.getLogger(__name__)

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
)
"""Usual names of columns of questions and of their answers."""
FURTHER = ("input", "context")
"""Usual names of columns that belong to the question."""
CHATS = "messages"
LABELS = "labels"


def training_columns(dataset: Any, config: CalibrationConfig, what: str, model: ModelKind) -> Source:
    """Choose the columns of a dataset that a model is trained on; see `from_columns`, which does the rest.

    Where the config names no columns, those of the usual names are taken: "messages", or a question and its answer. For
    a decoder, "labels" stand beside "input_ids", one for each token, as transformers has it.

    Raises:
        CalibrationError: as `from_columns`; or an answer is asked for where there are images.
    """
    types = column_types(dataset, what)
    decodes, unnamed = model != "encoder-decoder", config.text_column is None and config.target_column is None
    if config.image_column is not None or (model == "image-text" and types.get("image") in IMAGES):
        if config.target_column is not None:
            raise CalibrationError(
                f"target_column={config.target_column!r} has no meaning for images with text: the loss is that of all "
                "words. Leave it out."
            )
        return from_columns(dataset, config, what, model)
    if decodes and config.text_column is None and "input_ids" in types:
        labels = config.target_column or LABELS
        if labels != "input_ids" and types.get(labels) in LISTS:
            dataset = dataset.select_columns([*token_columns(types), labels])
            return Source("token pairs", rows(dataset, partial(_labelled, labels), what))
    if decodes and unnamed and types.get(CHATS) in LISTS:
        return Source("chats", rows(dataset.select_columns([CHATS]), _worded, what))
    if unnamed and "input_ids" not in types and (pair := _pair(types)) is not None:
        question, answer = pair
        asked = [question, *(name for name in FURTHER if name not in pair and types.get(name) in STRINGS)]
        logger.info("Training on the answers in column %r of %s to %s.", answer, what, " and ".join(map(repr, asked)))
        return Source(
            "text pairs", rows(dataset.select_columns([*asked, answer]), partial(_asked, asked, answer), what)
        )
    return from_columns(dataset, config, what, model)


def _pair(types: dict[str, str]) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if all(types.get(name) in STRINGS for name in pair)), None)


def _asked(asked: list[str], answer: str, row: dict[str, Any]) -> tuple[str, Any]:
    """Return the question, a line for each of its columns that is not blank, and the answer."""
    return "\n".join(text for name in asked if (text := row[name]) and text.strip()), row[answer]


def _worded(row: dict[str, Any]) -> Any:
    """Return a chat whose contents are words, where they are lists of parts that are."""
    return [
        turn | {"content": "".join(map(_words, turn["content"]))}
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        else turn
        for turn in row[CHATS] or []
    ]


def _words(part: Any) -> str:
    """Return the words of a part of a turn, `{"type": "text", "text": ...}`."""
    if not isinstance(part, dict):
        part = {"type": "text" if isinstance(part, str) else type(part).__name__, "text": part}
    if part.get("type") != "text":
        raise ValueError(
            f"a chat holds a part of type {part.get('type')!r}, and words are of type 'text'; leave it out"
        )
    return part.get("text") or ""


def _labelled(column: str, row: dict[str, Any]) -> tuple[Any, Any]:
    """Return token ids and their labels, without those that are masked."""
    ids, labels, mask = row["input_ids"], row[column], row.get("attention_mask")
    if ids is None or labels is None:
        return None, None
    if len({len(ids), len(labels), len(ids if mask is None else mask)}) > 1:
        raise ValueError(f"a row has {len(ids)} input_ids, but not as many {column} and values in its attention_mask")
    return (ids, labels) if mask is None else (list(compress(ids, mask)), list(compress(labels, mask)))
