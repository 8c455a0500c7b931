"""The report of a pruned checkpoint, from a folder or from the Hub, without its weights."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optimum_prune.errors import CheckpointError, PruningError
from optimum_prune.fetching import fetch, fetch_json, fetch_record
from optimum_prune.integrations.loading import REPORT, same_record
from optimum_prune.measurements import Evaluation, comparison
from optimum_prune.recovery.adapter import FILES, FOLDER
from optimum_prune.report import PruningReport

logger = logging.getLogger(__name__)

Measured = dict[str, Evaluation]


def open_report(name_or_path: str | os.PathLike[str], **hub_kwargs: Any) -> tuple[PruningReport, Measured]:
    """Read the report of a pruned checkpoint, and what was measured, by `"dense"` and `"pruned"`.

    Of a Hub repository only `config.json` and `pruning_report.json` are downloaded.

    Args:
        name_or_path: a local directory, or a Hub id.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder` or `force_download`.

    Raises:
        CheckpointError: it cannot be had, was not pruned by this package, or its report is of another pruning.
    """
    return _read(name_or_path, fetch_record(name_or_path, **hub_kwargs), **hub_kwargs)


def find_report(
    name_or_path: str | os.PathLike[str], record: dict[str, Any], **hub_kwargs: Any
) -> tuple[PruningReport | None, Measured]:
    """Read the report of a checkpoint, if there is one that speaks of the pruning that its config records."""
    try:
        return _read(name_or_path, record, **hub_kwargs)
    except CheckpointError as error:
        logger.info("No report comes with the model: %s", error)
        return None, {}


def copy_adapter(name_or_path: str | os.PathLike[str], **hub_kwargs: Any) -> TemporaryDirectory[str] | None:
    """Copy the adapter of a checkpoint into a folder; None where it has none beside its weights.

    Args:
        name_or_path: a local directory, or a Hub id.
        hub_kwargs: those of `HUB_KWARGS`.

    Raises:
        CheckpointError: it cannot be reached.
    """
    paths: list[Path] = []
    for name in FILES:
        path = fetch(name_or_path, f"{FOLDER}/{name}", **hub_kwargs)
        if path is None:
            return None
        paths.append(path)
    folder = TemporaryDirectory(prefix="optimum-prune-")
    for name, path in zip(FILES, paths, strict=True):
        shutil.copyfile(path, Path(folder.name, name))
    return folder


def _read(
    name_or_path: str | os.PathLike[str], record: dict[str, Any], **hub_kwargs: Any
) -> tuple[PruningReport, Measured]:
    data = fetch_json(name_or_path, REPORT, **hub_kwargs)
    with showing(name_or_path):
        report = PruningReport.from_dict(data)
        evaluations = {name: Evaluation.from_dict(values) for name, values in data["evaluations"].items()}
        _show(report, evaluations)  # what cannot be shown is no report
        belongs = same_record(report, record)
    if not belongs:
        raise CheckpointError(
            f"{REPORT} of {name_or_path} is of another pruning than its config.json records. Save the model again by "
            "the Pruner that pruned it."
        )
    return report, evaluations


def _show(report: PruningReport, evaluations: Measured) -> tuple[str, str | None]:
    return str(report), comparison(evaluations) if evaluations else None


@contextmanager
def showing(name_or_path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a stranger's report breaks, having other things than words and numbers in it, into one error."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, PruningError):
            raise
        raise CheckpointError(f"{REPORT} of {name_or_path} is damaged ({type(error).__name__}: {error}).") from error
