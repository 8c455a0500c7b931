"""Data files: which formats are read, which options a source takes, and the files of a folder by split."""

import glob
import os
from typing import Any

from optimum_prune.calibration.rows import reading
from optimum_prune.errors import CalibrationError

BUILDERS = {  # suffix -> builder of `datasets`
    ".txt": None,  # the whole file is one text
    ".md": None,
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
SUFFIXES = ", ".join(BUILDERS)
CARD = "README.md"
ABOUT = {"readme", "license", "licence", "copying", "notice", "citation", "dataset_card"}
"""Names of files that describe data, without suffix."""
COLUMNS = ("text_column", "target_column", "image_column")
SPLIT = "train"
"""Split of data that has no splits."""


def suffix(path: str) -> str:
    """Return the suffix of a file in lower case, that before `.gz` where it is compressed."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def is_text(path: str) -> bool:
    """Whether a file holds plain text, and so no columns."""
    return BUILDERS.get(suffix(path), "") is None


def folder_and_name(source: str) -> tuple[str, str | None] | None:
    """Return the folder that a source names and the configuration in it (`folder:name`); None for no folder."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return path, None
    path, _, name = path.rpartition(":")
    return (path, name) if name and os.path.isdir(path) else None


def options_of(source: Any) -> set[str]:
    """Return which of `split` and the names of columns can have an effect on a source."""
    if isinstance(source, list) or source == "self":
        return set()
    if not isinstance(source, str):
        return set(COLUMNS)
    if os.path.isfile(os.path.expanduser(source)):
        return set() if is_text(source) else set(COLUMNS)
    return {"split", *COLUMNS}


def data_files(folder: str, name: str | None = None) -> dict[str, list[str]]:
    """Find the data files of a folder by split, as `datasets.load_dataset(folder, name)` does.

    A dataset card that names configurations decides. Without one, names of files and of sub-folders do; where these
    name no split, all files are "train". Hidden files and files that describe the data (`ABOUT`) are left out.

    Args:
        folder: a local folder.
        name: configuration of a dataset card.

    Returns:
        Split -> paths in the order of their names; only files with a suffix of `BUILDERS`, and no empty split.

    Raises:
        CalibrationError: there is no such file, or no such configuration.
    """
    import datasets
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    base, hint = glob.escape(os.path.abspath(folder)), ""
    if configured := _names_configurations(folder):
        hint = f" (a configuration of its {CARD} is named '{folder}:NAME')"
    with reading(repr(folder) + hint):
        try:
            if configured or name is not None:
                found = datasets.load_dataset_builder(folder, name).config.data_files or {}
            else:
                found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
        except EmptyDatasetError:
            found = {}
    if not (splits := _readable(found)):
        files = [os.path.basename(file) for files in found.values() for file in files]
        others = f" (found: {', '.join(files[:3])})" if files else ""
        raise CalibrationError(
            f"Folder {folder!r} holds no file that can be read: {SUFFIXES}{others}. README, licence and hidden "
            "files are no data; where names of files or sub-folders name splits, only these files are."
        )
    return splits


def _names_configurations(folder: str) -> bool:
    from huggingface_hub import metadata_load

    card = os.path.join(folder, CARD)
    with reading(repr(card)):
        return os.path.isfile(card) and bool((metadata_load(card) or {}).get("configs"))


def _readable(found: Any) -> dict[str, list[str]]:
    splits = {str(split): sorted(set(filter(_is_data, map(str, files)))) for split, files in found.items()}
    return {split: files for split, files in splits.items() if files}


def _is_data(path: str) -> bool:
    stem = os.path.basename(path).lower().partition(".")[0]
    return suffix(path) in BUILDERS and stem not in ABOUT
