"""Adapters and scorers, found by file name: a new one is one new file.

``optimum_prune/<kind>/<name>.py`` exports ``ADAPTER`` or ``SCORER``. Other packages add theirs through
the entry-point groups ``optimum_prune.adapters`` and ``optimum_prune.scorers``: names of such objects.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

from optimum_prune.errors import InvalidConfig, UnsupportedArchitecture, unknown

_EXPORTS = {"adapters": "ADAPTER", "scorers": "SCORER"}


def available(kind: str) -> list[str]:
    """List the names of a kind, sorted, without importing anything.

    Args:
        kind: ``"adapters"`` or ``"scorers"``.
    """
    return sorted({*_files(kind), *_entry_points(kind).names})


def load(kind: str, name: str) -> Any:
    """Import the one file (or entry point) of that name and return what it exports.

    Args:
        kind: ``"adapters"`` or ``"scorers"``.
        name: a scorer's name, or a ``model_type`` of transformers.

    Raises:
        InvalidConfig: no such scorer.
        UnsupportedArchitecture: no such adapter.
    """
    file = name.replace("-", "_")  # a model_type may hold dashes, a module's name may not
    if file in _files(kind):
        return getattr(import_module(f"optimum_prune.{kind}.{file}"), _EXPORTS[kind])
    for entry in _entry_points(kind).select(name=name):
        return entry.load()
    if kind == "adapters":
        raise UnsupportedArchitecture(
            f"{unknown('architecture', name, available(kind), suggest=False)} An architecture is added by one file, "
            f"optimum_prune/adapters/{file}.py, or by another package's entry point in the group "
            "'optimum_prune.adapters' (README, Contributing)."
        )
    raise InvalidConfig(unknown("scorer", name, available(kind)))


def _files(kind: str) -> set[str]:
    folder = Path(__file__).parent / kind
    return {module.name for module in pkgutil.iter_modules([str(folder)])} - {"base"}


def _entry_points(kind: str) -> EntryPoints:
    return entry_points(group=f"optimum_prune.{kind}")
