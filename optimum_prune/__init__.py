"""Prune transformers models; load the result with ``AutoModel*.from_pretrained``.

Importing this package costs milliseconds: public names are looked up on first use, and the plugin registers itself with
transformers at the moment transformers' models are first imported, before or after this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

__version__ = "0.1.0"

_HOMES = {
    "CalibrationConfig": "config",
    "CalibrationError": "errors",
    "CheckpointError": "errors",
    "InvalidConfig": "errors",
    "Pruner": "pruner",
    "PruningConfig": "config",
    "PruningError": "errors",
    "PruningReport": "report",
    "UnsupportedArchitecture": "errors",
    "UnsupportedModel": "errors",
    "prune": "pipeline",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from .config import CalibrationConfig, PruningConfig
    from .errors import (
        CalibrationError,
        CheckpointError,
        InvalidConfig,
        PruningError,
        UnsupportedArchitecture,
        UnsupportedModel,
    )
    from .pipeline import prune
    from .pruner import Pruner
    from .report import PruningReport


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


# Not transformers.quantizers: that is imported halfway through modeling_utils, which the plugin needs whole.
@when_imported("transformers.modeling_utils")
def _register(_module: object) -> None:
    from .integrations.quantizer import register

    register()
