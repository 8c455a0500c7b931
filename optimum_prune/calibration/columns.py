"""Columns of a dataset -> texts, token ids, pairs of either, chats, or images with text."""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, Literal

from optimum_prune.calibration.conversion import SPOKEN, STRINGS, conversions, questions_of
from optimum_prune.calibration.request import ModelKind
from optimum_prune.calibration.rows import reading, rows
from optimum_prune.calibration.turns import FURTHER, KEYS, PAIRS, Features, find_chats, inner
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.objectives import IGNORED

logger = logging.getLogger(__name__)

PEEK = 64  # rows that tell what the columns hold where no schema does (csv)
LISTS = ("List", "LargeList")
IMAGES = ("image", "images")
LABELS = "labels"


@dataclass(frozen=True)
class Source:
    """Data before it is tokenised or cut, read as `items` is iterated.

    A text is a string, token ids are a list; a pair is `(input, target)`; an image with text is `(image or list of
    images, text)`; a chat is a list of turns with `role` and `content`. Where the model reads images, and there are
    some that are not read, `advice` says how they would be.
    """

    kind: Literal["texts", "token ids", "text pairs", "token pairs", "images", "chats"]
    items: Iterable[Any]
    advice: str = ""


def from_columns(
    dataset: Any, config: CalibrationConfig, what: str, model: ModelKind = "decoder", training: bool = False
) -> Source:
    """Choose the columns of a dataset that hold tokens (with their mask), text, targets, chats or images.

    Where the config names no column, columns of the usual names are taken: token ids, chats (`turns.NAMES`), a question
    with its answer (`turns.PAIRS`), "text", or the only column of strings.

    Args:
        dataset: a `datasets.Dataset` or `datasets.IterableDataset`.
        config: its `text_column`, where set, is read even if there are tokens; it may be a column of chats.
        what: the dataset, in the words of an error message.
        model: whether "labels" are targets, and "image" is wanted, where the config names neither.
        training: "labels" that stand beside the token ids of a decoder are read too, one for each token; and chats
            come before token ids without labels, since their answers alone are trained on.

    Raises:
        CalibrationError: no such column, or not one alone; the columns are listed, with lines that convert some.
    """
    features = _features(dataset, what)
    types = {column: _described(feature) for column, feature in features.items()}
    decodes, tokens = model != "encoder-decoder", config.text_column is None and "input_ids" in types

    def read(kind: Any, columns: list[str], item: Any, advice: str = "") -> Source:
        return Source(kind, rows(dataset.select_columns(columns), item, what), advice)

    if config.image_column is not None or (model == "image-text" and types.get("image") in IMAGES):
        return _images(dataset, config, types, what)
    if training and decodes and tokens:
        labels = config.target_column or LABELS
        if labels != "input_ids" and types.get(labels) in LISTS:
            return read("token pairs", [*token_columns(types), labels], partial(_labelled, labels))
    if (target := _target_ids(types, config, model)) is not None:
        return read("token pairs", [*token_columns(types), target], partial(_token_pair, target))
    if config.target_column is not None:
        target = _named("target_column", config.target_column, types, STRINGS, "strings", what)
        text = _text_column(features, types, config, what, model, other_than=target)
        return read("text pairs", [text, target], partial(_both, text, target))
    advice = _unread_images(types) if model == "image-text" else ""
    if decodes and (training or not tokens) and (chats := find_chats(features, config.text_column)) is not None:
        columns, reader = chats
        logger.info("Reading %s of %s as chats.", " and ".join(map(repr, columns)), what)
        return read("chats", columns, reader, advice)
    if not tokens and config.text_column is None and (pair := _pair(types)) is not None:
        question, answer = pair
        asked = [question, *(name for name in FURTHER if name not in pair and types.get(name) in STRINGS)]
        logger.info("Reading %r of %s as the answers to %s.", answer, what, " and ".join(map(repr, asked)))
        return read("text pairs", [*asked, answer], partial(_asked, asked, answer), advice)
    if tokens:
        return read("token ids", token_columns(types), _unpadded, advice)
    text = _text_column(features, types, config, what, model, advice=advice)
    return read("texts", [text], lambda row: row[text], advice)


def _images(dataset: Any, config: CalibrationConfig, types: dict[str, str], what: str) -> Source:
    if config.target_column is not None:
        raise CalibrationError(
            f"target_column={config.target_column!r} has no meaning for images with text: the loss is that of all "
            "words. Leave it out."
        )
    image = _named("image_column", config.image_column or "image", types, IMAGES, "images", what)
    text = _text_column(dataset.features or {}, types, config, what, "image-text")
    # One row ahead: an image is decoded as its row is read.
    dataset = _undecoded(dataset.select_columns([image, text]))
    return Source("images", rows(dataset, partial(_both, image, text), what, ahead=1))


def _features(dataset: Any, what: str) -> Features:
    from datasets import Dataset

    with reading(what):
        return dataset.features or Dataset.from_list(list(dataset.take(PEEK))).features


def _described(feature: Any) -> str:
    """Return what a column holds, in words: one of `STRINGS`, `LISTS`, `IMAGES`, or another type."""
    from datasets import Image

    if isinstance(feature, Image):
        return "image"
    if isinstance(inner(feature), Image):
        return "images"
    return getattr(feature, "dtype", None) or type(feature).__name__


def _target_ids(types: dict[str, str], config: CalibrationConfig, model: ModelKind) -> str | None:
    """Return the column of target ids, if there is one that goes with `input_ids`."""
    if config.text_column is not None or "input_ids" not in types:
        return None
    column = config.target_column or ("labels" if model == "encoder-decoder" else "")
    return column if column != "input_ids" and types.get(column) in LISTS else None


def token_columns(types: dict[str, str]) -> list[str]:
    """Return the column of token ids, and that of their mask where there is one."""
    return [column for column in ("input_ids", "attention_mask") if column in types]


def _unread_images(types: dict[str, str]) -> str:
    """Say how images would be read that are there and are not; nothing where there are none."""
    if columns := [repr(column) for column, dtype in types.items() if dtype in IMAGES]:
        return f"Set image_column to a column of images: {' or '.join(columns)}."
    if types.get("file_name") in STRINGS:  # how `datasets` describes a folder of pictures
        return (
            "Its column 'file_name' seems to name pictures: give datasets.load_dataset('imagefolder', data_dir=..., "
            "split='train') as the source, or the folder of its save_to_disk, and set image_column='image'."
        )
    return ""


def _text_column(
    features: Features,
    types: dict[str, str],
    config: CalibrationConfig,
    what: str,
    model: ModelKind,
    other_than: str | None = None,
    advice: str = "",
) -> str:
    """Choose the column named in the config, or "text", or the only other one that holds strings."""
    if config.text_column is not None:
        return _named("text_column", config.text_column, types, STRINGS, "strings", what)
    strings = [column for column, dtype in types.items() if dtype in STRINGS and column != other_than]
    if "text" in strings:
        return "text"
    # What is said is in such a column, and hardly in another one beside it.
    spoken = any(inner(feature) is not None for column, feature in features.items() if column in SPOKEN)
    if len(strings) != 1 or spoken:
        besides = "" if other_than is None else f" besides {other_than!r}"
        raise CalibrationError(
            " ".join(
                [
                    f"Of the columns of {what}{besides}, {len(strings)} hold strings, none of these called 'text'; "
                    f"its columns: {_listed(types)}.",
                    *(["Set text_column to one of strings."] if strings else []),
                    *([advice] if advice else []),
                    *_questions(features, config, model),
                    *conversions(config, features),
                ]
            )
        )
    return strings[0]


def _questions(features: Features, config: CalibrationConfig, model: ModelKind) -> list[str]:
    """Say how an encoder-decoder reads a column of chats."""
    if model != "encoder-decoder" or (chats := find_chats(features)) is None:
        return []
    column = chats[0][-1]
    keys = next((pair for pair in KEYS if set(pair) <= (inner(features[column]) or {}).keys()), KEYS[0])
    line = questions_of(config, column, keys)
    return [f"An encoder-decoder reads questions with answers, not chats as in {column!r}; convert them: {line}"]


def _named(option: str, column: str, types: dict[str, str], allowed: Collection[str], kind: str, what: str) -> str:
    """Return the column that an option names, if there is one and it holds what it must."""
    if types.get(column) not in allowed:
        raise CalibrationError(
            f"{option} {column!r} is no column of {kind} in {what}; its columns: {_listed(types)}. "
            f"Set {option} to one of {kind}."
        )
    return column


def _listed(types: dict[str, str]) -> str:
    return ", ".join(f"{column!r} ({dtype})" for column, dtype in types.items()) or "none"


def _undecoded(dataset: Any) -> Any:
    """Let a stream pass by without decoding what is not used; the rows of a table are read one by one anyway."""
    import datasets

    return dataset.decode(False) if isinstance(dataset, datasets.IterableDataset) and dataset.features else dataset


def _pair(types: dict[str, str]) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if all(types.get(name) in STRINGS for name in pair)), None)


def _asked(asked: list[str], answer: str, row: dict[str, Any]) -> tuple[str, Any]:
    """Return the question, a line for each of its columns that is not blank, and the answer."""
    return "\n".join(text for name in asked if (text := row[name]) and text.strip()), row[answer]


def _labelled(column: str, row: dict[str, Any]) -> tuple[Any, Any]:
    """Return token ids and their labels, without those that are masked."""
    ids, labels, mask = row["input_ids"], row[column], row.get("attention_mask")
    if ids is None or labels is None:
        return None, None
    if len({len(ids), len(labels), len(ids if mask is None else mask)}) > 1:
        raise ValueError(f"a row has {len(ids)} input_ids, but not as many {column} and values in its attention_mask")
    return (ids, labels) if mask is None else (list(compress(ids, mask)), list(compress(labels, mask)))


def _both(first: str, second: str, row: dict[str, Any]) -> tuple[Any, Any]:
    return row[first], row[second]


def _token_pair(target: str, row: dict[str, Any]) -> tuple[Any, Any]:
    labels = row[target]
    return _unpadded(row), labels if labels is None else [token for token in labels if token != IGNORED]


def _unpadded(row: dict[str, Any]) -> Any:
    """Drop masked tokens, on whichever side they are."""
    ids, mask = row["input_ids"], row.get("attention_mask")
    if mask is None:
        return ids
    if len(ids) != len(mask):
        raise ValueError(f"a row has {len(ids)} input_ids, but {len(mask)} values in its attention_mask")
    return list(compress(ids, mask))
