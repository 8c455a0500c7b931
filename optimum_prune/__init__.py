"""Prune transformers models; load the result with `AutoModel*.from_pretrained`.

Importing this package costs milliseconds: public names are looked up on first use, and the plugin registers
itself with transformers when the models of transformers are first imported, before or after this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

__version__ = "0.1.0"

__all__ = [
    "CalibrationConfig",
    "CalibrationError",
    "CheckpointError",
    "InductionConfig",
    "InvalidConfig",
    "KeepMasks",
    "Plan",
    "Pruner",
    "PruningConfig",
    "PruningError",
    "PruningReport",
    "PublishError",
    "RecoveryConfig",
    "RecoveryReport",
    "UnsupportedArchitecture",
    "UnsupportedModel",
    "accelerate_2_4_",
    "apply_masks_",
    "equivalent_rescale_",
    "evaluate_checkpoint",
    "masks_of",
    "prune",
    "recover",
    "rescaling_sites",
]

if TYPE_CHECKING:
    from optimum_prune.callbacks import KeepMasks
    from optimum_prune.checkpoint_evaluation import evaluate_checkpoint
    from optimum_prune.config import CalibrationConfig, InductionConfig, PruningConfig
    from optimum_prune.errors import (
        CalibrationError,
        CheckpointError,
        InvalidConfig,
        PruningError,
        PublishError,
        UnsupportedArchitecture,
        UnsupportedModel,
    )
    from optimum_prune.pipeline import prune
    from optimum_prune.planning.plan import Plan
    from optimum_prune.pruner import Pruner
    from optimum_prune.recovery.config import RecoveryConfig
    from optimum_prune.recovery.recover import recover
    from optimum_prune.recovery.report import RecoveryReport
    from optimum_prune.report import PruningReport
    from optimum_prune.rescaling import equivalent_rescale_, rescaling_sites
    from optimum_prune.semi_structured import accelerate_2_4_
    from optimum_prune.sparsity import apply_masks_, masks_of

_HOMES = {
    "CalibrationConfig": "config",
    "InductionConfig": "config",
    "KeepMasks": "callbacks",
    "Plan": "planning.plan",
    "Pruner": "pruner",
    "PruningConfig": "config",
    "PruningReport": "report",
    "RecoveryConfig": "recovery.config",
    "RecoveryReport": "recovery.report",
    "accelerate_2_4_": "semi_structured",
    "apply_masks_": "sparsity",
    "equivalent_rescale_": "rescaling",
    "evaluate_checkpoint": "checkpoint_evaluation",
    "masks_of": "sparsity",
    "prune": "pipeline",
    "recover": "recovery.recover",
    "rescaling_sites": "rescaling",
}  # all others are errors


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"optimum_prune.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Not transformers.quantizers: that is imported halfway through modeling_utils, which the plugin needs whole.
@when_imported("transformers.modeling_utils")
def _register(_module: object) -> None:
    from optimum_prune.integrations.quantizer import register

    register()
