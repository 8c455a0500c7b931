"""The closed set of errors, and the one place that words a wrong name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PruningError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidConfig(PruningError, ValueError):
    """A configuration that cannot be meant: unknown name, wrong type, out of range, in conflict."""


class UnsupportedArchitecture(PruningError, ValueError):
    """No adapter describes this kind of model."""


class UnsupportedModel(PruningError, RuntimeError):
    """The architecture is known, but this live model cannot be pruned as it is."""


class CalibrationError(PruningError, ValueError):
    """Calibration data that cannot be read, or has nothing usable in it."""


class CheckpointError(PruningError, RuntimeError):
    """A checkpoint that cannot be written or does not fit its own description."""


class PublishError(PruningError, RuntimeError):
    """The Hub did not take a checkpoint, which is still whole where it was saved."""


def unknown(kind: str, given: object, allowed: Iterable[str], *, suggest: bool = True) -> str:
    """Word the message about a name that does not exist.

    >>> unknown("scorer", "wandaa", ["ntk", "wanda"])
    "Unknown scorer 'wandaa'; supported: 'ntk', 'wanda'. Did you mean 'wanda'?"

    Args:
        kind: what the name is a name of.
        given: what the user wrote.
        allowed: the names that exist.
        suggest: whether the nearest name may be meant. Model types that are spelled alike are different models.
    """
    allowed = list(allowed)
    supported = ", ".join(map(repr, allowed)) or "none"
    nearest = get_close_matches(str(given).lower(), allowed, n=1) if suggest else []
    suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"Unknown {kind} {given!r}; supported: {supported}.{suggestion}"
