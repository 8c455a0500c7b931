"""Where calibration data comes from: lists, datasets, files, folders, dataset ids -> a `Source`."""

import gzip
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from itertools import chain
from typing import Any

from optimum_prune.calibration.columns import Source, from_columns
from optimum_prune.calibration.files import (
    BUILDERS,
    COLUMNS,
    SPLIT,
    SUFFIXES,
    data_files,
    folder_and_name,
    is_text,
    options_of,
    suffix,
)
from optimum_prune.calibration.request import ModelKind
from optimum_prune.calibration.rows import Stream, guarded, reading
from optimum_prune.config import IN_MEMORY, CalibrationConfig
from optimum_prune.errors import CalibrationError, unknown
from optimum_prune.fetching import unreachable

DATASET_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:\S+)?")

Chosen = Callable[[Any, str], Source]
"""`(dataset, the dataset in words) -> Source`; see `from_columns`."""


def open_source(config: CalibrationConfig, model: ModelKind = "decoder", training: bool = False) -> Source:
    """Find what `config.source` means and open it.

    Args:
        config: names the source and, where it must, the columns.
        model: what columns of the usual names are taken for, where the config names none.
        training: whether labels beside token ids are read; see `from_columns`.

    Raises:
        CalibrationError: it does not exist, cannot be read, or has no usable column. Damage further into
            a file is raised when the iteration gets there.
    """
    source = config.source
    if isinstance(source, str) and source.startswith(IN_MEMORY):
        raise CalibrationError(
            f"This config was written without its data ({source}): set calibration.source to the data again."
        )
    check_options(config)
    if isinstance(source, list):
        return Source("texts" if isinstance(source[0], str) else "token ids", source)

    def chosen(dataset: Any, what: str) -> Source:
        return from_columns(dataset, config, what, model, training)

    if not isinstance(source, str):
        return chosen(source, "the dataset")
    if (folder := folder_and_name(source)) is not None:
        return _from_folder(*folder, config, chosen)
    path = os.path.expanduser(source)
    if os.path.exists(path):
        return _from_file(path, chosen)
    return _from_hub(source, config, chosen)


def check_options(config: CalibrationConfig) -> None:
    """Refuse a split or a column that is set and cannot have an effect on the source.

    Raises:
        CalibrationError: naming the option.
    """
    source, allowed = config.source, options_of(config.source)
    if source == "self":
        what = "text that the model writes itself (source 'self')"
    elif isinstance(source, str):
        what = repr(source)
    else:
        what = "a list" if isinstance(source, list) else "the dataset"
    for option in COLUMNS:
        if option not in allowed:
            _refuse_column(config, option, what)
    if "split" not in allowed and config.split not in (SPLIT, str(getattr(source, "split", None))):
        raise CalibrationError(
            f"split={config.split!r} has no effect on {what}, which has no splits. Leave it out, or give a folder, a "
            "dataset id, or that split itself."
        )


def _from_hub(source: str, config: CalibrationConfig, chosen: Chosen) -> Source:
    path, _, name = source.partition(":")
    if not DATASET_ID.fullmatch(source) or suffix(path) in BUILDERS:
        raise CalibrationError(
            f"Calibration source {reprlib.repr(source)} does not exist. Give a file ({SUFFIXES}), a folder, "
            "a dataset id ('path' or 'path:name') or a list of texts."
        )
    import datasets

    silent = unreachable()
    with reading(f"dataset {source!r}, split {config.split!r} (no file or folder has this name)"):
        try:
            with _offline(silent is not None):
                dataset = datasets.load_dataset(path, name or None, split=config.split)
        except ConnectionError:
            if silent is None:
                raise
            raise ConnectionError(f"the Hub cannot be reached ({silent}), and the cache does not hold it") from None
    return chosen(dataset, f"dataset {source!r}")


@contextmanager
def _offline(on: bool) -> Iterator[None]:
    """Let `datasets` read its cache alone, as HF_DATASETS_OFFLINE does, which it reads only when it is imported."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or on
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _from_folder(path: str, name: str | None, config: CalibrationConfig, chosen: Chosen) -> Source:
    """Open what `Dataset.save_to_disk` wrote, or else the data files of the split; see `data_files`."""
    with reading(repr(path)):
        names = os.listdir(path)
    if "state.json" in names or "dataset_dict.json" in names:
        return _from_saved_dataset(path, config, chosen)
    splits = data_files(path, name)
    _check_split(config.split, splits, path)
    files = splits[config.split]
    for option in COLUMNS:  # a table beside a text may have the text column
        text = next(filter(is_text, files), None)
        if text is not None and (option != "text_column" or all(map(is_text, files))):
            _refuse_column(config, option, repr(text))
    sources = [_from_file(file, chosen) for file in files]
    if len(mixed := dict.fromkeys(source.kind for source in sources)) > 1:
        kinds = ", ".join(f"{os.path.basename(f)} {s.kind}" for f, s in zip(files, sources, strict=True))
        raise CalibrationError(f"Folder {path!r} mixes {' and '.join(mixed)}, give one of them: {kinds}.")
    advice = next((source.advice for source in sources if source.advice), "")
    items = chain.from_iterable(source.items for source in sources)
    return Source(sources[0].kind, items if all(map(is_text, files)) else Stream(items), advice)


def _from_saved_dataset(path: str, config: CalibrationConfig, chosen: Chosen) -> Source:
    import datasets

    with reading(repr(path)):
        dataset = datasets.load_from_disk(path)
    if isinstance(dataset, datasets.DatasetDict):
        _check_split(config.split, map(str, dataset), path)
        return chosen(dataset[config.split], repr(path))
    _check_split(config.split, {SPLIT, str(dataset.split or SPLIT)}, path)
    return chosen(dataset, repr(path))


def _check_split(split: str, splits: Iterable[str], path: str) -> None:
    if split not in (splits := list(splits)):
        raise CalibrationError(f"{unknown('split', split, splits)} These are the splits of {path!r}.")


def _from_file(path: str, chosen: Chosen) -> Source:
    if suffix(path) not in BUILDERS:
        raise CalibrationError(f"Cannot read {path!r}: its suffix must be one of {SUFFIXES}, or that and .gz.")
    if (builder := BUILDERS[suffix(path)]) is None:
        return Source("texts", guarded(_whole_file(path), repr(path)))
    import datasets

    with reading(repr(path)):
        # Streamed, since nothing is copied to a cache then. Escaped, since data_files are patterns.
        dataset = datasets.load_dataset(builder, data_files=escape(path), split=SPLIT, streaming=True)
    return chosen(dataset, repr(path))


def _refuse_column(config: CalibrationConfig, option: str, what: str) -> None:
    if (column := getattr(config, option)) is not None:
        raise CalibrationError(
            f"{option}={column!r} names a column, and {what} has none. Give a dataset or a table: "
            ".json, .jsonl, .csv, .parquet."
        )


def _whole_file(path: str) -> Iterator[str]:
    open_text = gzip.open if path.lower().endswith(".gz") else open
    with open_text(path, "rt", encoding="utf-8-sig") as file:
        yield file.read()
