"""Where calibration data comes from: lists, datasets, files, folders, dataset ids -> a `Source`."""

import gzip
import os
import re
import reprlib
from collections.abc import Callable, Iterator
from glob import escape
from itertools import chain
from typing import Any

from optimum_prune.calibration.columns import Source, from_columns
from optimum_prune.calibration.request import ModelKind
from optimum_prune.calibration.rows import guarded, reading
from optimum_prune.config import IN_MEMORY, CalibrationConfig
from optimum_prune.errors import CalibrationError, unknown

BUILDERS = {  # suffix -> builder of `datasets`
    ".txt": None,  # the whole file is one text
    ".md": None,
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
SUFFIXES = ", ".join(BUILDERS)
DATASET_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:\S+)?")

Columns = Callable[[Any, CalibrationConfig, str, ModelKind], Source]
"""`(dataset, config, the dataset in words, kind of model) -> Source`; see `from_columns`."""
Chosen = Callable[[Any, str], Source]
"""The same for one config and one kind of model."""


def open_source(config: CalibrationConfig, model: ModelKind = "decoder", columns: Columns = from_columns) -> Source:
    """Find what `config.source` means and open it.

    Args:
        config: names the source and, where it must, the columns.
        model: what columns of the usual names are taken for, where the config names none.
        columns: chooses the columns of a dataset.

    Raises:
        CalibrationError: it does not exist, cannot be read, or has no usable column. Damage further into
            a file is raised when the iteration gets there.
    """
    source = config.source
    if isinstance(source, list):
        _refuse_columns(config, "a list")
        return Source("texts" if isinstance(source[0], str) else "token ids", source)
    if not isinstance(source, str):
        return columns(source, config, "the dataset", model)
    if source.startswith(IN_MEMORY):
        raise CalibrationError(
            f"This config was written without its data ({source}): set calibration.source to the data again."
        )
    path = os.path.expanduser(source)

    def chosen(dataset: Any, what: str) -> Source:
        return columns(dataset, config, what, model)

    if os.path.isdir(path):
        return _from_folder(path, config, chosen)
    if os.path.exists(path):
        return _from_file(path, config, chosen)
    return _from_hub(source, config, chosen)


def _from_hub(source: str, config: CalibrationConfig, chosen: Chosen) -> Source:
    path, _, name = source.partition(":")
    if not DATASET_ID.fullmatch(source) or _suffix(path) in BUILDERS:
        raise CalibrationError(
            f"Calibration source {reprlib.repr(source)} does not exist. Give a file ({SUFFIXES}), a folder, "
            "a dataset id ('path' or 'path:name') or a list of texts."
        )
    import datasets

    with reading(f"dataset {source!r}, split {config.split!r} (no file or folder has this name)"):
        dataset = datasets.load_dataset(path, name or None, split=config.split)
    return chosen(dataset, f"dataset {source!r}")


def _from_folder(path: str, config: CalibrationConfig, chosen: Chosen) -> Source:
    """Open what `Dataset.save_to_disk` wrote, or else all supported files, in the order of their names."""
    with reading(repr(path)):
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    if "state.json" in names or "dataset_dict.json" in names:
        return _from_saved_dataset(path, config, chosen)
    files = [os.path.join(path, name) for name in names if _suffix(name) in BUILDERS]
    if not files:
        raise CalibrationError(f"Folder {path!r} holds no file that can be read: {SUFFIXES}.")
    sources = [_from_file(file, config, chosen) for file in files]
    if len(mixed := dict.fromkeys(source.kind for source in sources)) > 1:
        kinds = ", ".join(f"{os.path.basename(f)} {s.kind}" for f, s in zip(files, sources, strict=True))
        raise CalibrationError(f"Folder {path!r} mixes {' and '.join(mixed)}, give one of them: {kinds}.")
    advice = next((source.advice for source in sources if source.advice), "")
    return Source(sources[0].kind, chain.from_iterable(source.items for source in sources), advice)


def _from_saved_dataset(path: str, config: CalibrationConfig, chosen: Chosen) -> Source:
    import datasets

    with reading(repr(path)):
        dataset = datasets.load_from_disk(path)
    if isinstance(dataset, datasets.DatasetDict):
        if config.split not in dataset:
            raise CalibrationError(unknown("split", config.split, map(str, dataset)))
        dataset = dataset[config.split]
    return chosen(dataset, repr(path))


def _from_file(path: str, config: CalibrationConfig, chosen: Chosen) -> Source:
    suffix = _suffix(path)
    if suffix not in BUILDERS:
        raise CalibrationError(f"Cannot read {path!r}: its suffix must be one of {SUFFIXES}, or that and .gz.")
    if (builder := BUILDERS[suffix]) is None:
        _refuse_columns(config, repr(path))
        return Source("texts", guarded(_whole_file(path), repr(path)))
    import datasets

    with reading(repr(path)):
        # Streamed, since nothing is copied to a cache then. Escaped, since data_files are patterns.
        dataset = datasets.load_dataset(builder, data_files=escape(path), split="train", streaming=True)
    return chosen(dataset, repr(path))


def _refuse_columns(config: CalibrationConfig, what: str) -> None:
    for option in ("target_column", "image_column"):
        if (column := getattr(config, option)) is not None:
            raise CalibrationError(
                f"{option}={column!r} names a column, and {what} has none. Give a dataset or a table: "
                ".json, .jsonl, .csv, .parquet."
            )


def _whole_file(path: str) -> Iterator[str]:
    open_text = gzip.open if path.lower().endswith(".gz") else open
    with open_text(path, "rt", encoding="utf-8-sig") as file:
        yield file.read()


def _suffix(path: str) -> str:
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]
