"""Columns of a dataset -> texts, token ids, pairs of either, or images with text."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, Literal

from optimum_prune.calibration.request import ModelKind
from optimum_prune.calibration.rows import reading, rows
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError

PEEK = 64  # rows that tell what the columns hold where no schema does (csv)
STRINGS = ("string", "large_string")
LISTS = ("List", "LargeList")
IMAGES = ("image", "images")
IGNORED = -100  # how labels say that a token is none


@dataclass(frozen=True)
class Source:
    """Data before it is tokenised or cut, read as `items` is iterated.

    A text is a string, token ids are a list; a pair is `(input, target)`; an image with text is `(image or list of
    images, text)`; a chat is a list of turns with `role` and `content`, which only training asks for. Where the model
    reads images, and there are some that are not read, `advice` says how they would be.
    """

    kind: Literal["texts", "token ids", "text pairs", "token pairs", "images", "chats"]
    items: Iterable[Any]
    advice: str = ""


def from_columns(dataset: Any, config: CalibrationConfig, what: str, model: ModelKind = "decoder") -> Source:
    """Choose the columns of a dataset that hold tokens (with their mask), text, targets or images.

    Args:
        dataset: a `datasets.Dataset` or `datasets.IterableDataset`.
        config: its `text_column`, where set, is read even if there are tokens.
        what: the dataset, in the words of an error message.
        model: whether "labels" are targets, and "image" is wanted, where the config names neither.

    Raises:
        CalibrationError: no such column, or not one alone; the columns are listed.
    """
    types = column_types(dataset, what)
    if config.image_column is not None or (model == "image-text" and types.get("image") in IMAGES):
        image = _named("image_column", config.image_column or "image", types, IMAGES, "images", what)
        text = _text_column(types, config.text_column, what)
        # One row ahead: an image is decoded as its row is read.
        dataset = _undecoded(dataset.select_columns([image, text]))
        return Source("images", rows(dataset, partial(_both, image, text), what, ahead=1))
    if (target := _target_ids(types, config, model)) is not None:
        dataset = dataset.select_columns([*token_columns(types), target])
        return Source("token pairs", rows(dataset, partial(_token_pair, target), what))
    if config.target_column is not None:
        target = _named("target_column", config.target_column, types, STRINGS, "strings", what)
        text = _text_column(types, config.text_column, what, other_than=target)
        return Source("text pairs", rows(dataset.select_columns([text, target]), partial(_both, text, target), what))
    advice = _unread_images(types) if model == "image-text" else ""
    if config.text_column is None and "input_ids" in types:
        return Source("token ids", rows(dataset.select_columns(token_columns(types)), _unpadded, what), advice)
    text = _text_column(types, config.text_column, what, advice=advice)
    return Source("texts", rows(dataset.select_columns([text]), lambda row: row[text], what), advice)


def column_types(dataset: Any, what: str) -> dict[str, str]:
    """Return what each column of a dataset holds, in words: one of `STRINGS`, `LISTS`, `IMAGES`, or another type."""
    from datasets import Dataset, Image

    with reading(what):
        features = dataset.features or Dataset.from_list(list(dataset.take(PEEK))).features
    types: dict[str, str] = {}
    for column, feature in features.items():
        if isinstance(feature, Image):
            types[column] = "image"
        elif isinstance(getattr(feature, "feature", None), Image):
            types[column] = "images"
        else:
            types[column] = getattr(feature, "dtype", None) or type(feature).__name__
    return types


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
    types: dict[str, str], wanted: str | None, what: str, other_than: str | None = None, advice: str = ""
) -> str:
    """Choose the column named in the config, or "text", or the only other one that holds strings."""
    if wanted is not None:
        return _named("text_column", wanted, types, STRINGS, "strings", what)
    strings = [column for column, dtype in types.items() if dtype in STRINGS and column != other_than]
    if "text" in strings:
        return "text"
    if len(strings) != 1:
        besides = "" if other_than is None else f" besides {other_than!r}"
        raise CalibrationError(
            f"Of the columns of {what}{besides}, {len(strings)} hold strings, none of these called 'text'; "
            f"its columns: {_listed(types)}. Set text_column to one of strings. {advice}".rstrip()
        )
    return strings[0]


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
