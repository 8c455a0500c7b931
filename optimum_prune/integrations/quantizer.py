"""Hooks into transformers' loading: a compact checkpoint names the plugin, and the plugin shrinks the skeleton in time."""

import warnings
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from optimum_prune.errors import InvalidConfig
from optimum_prune.integrations.headers import check_blocks
from optimum_prune.sizes import COMPACT, METHOD, forget_quantizer_, resize_


class CheckpointConfig(QuantizationConfigMixin):
    """The `quantization_config` block of a compact checkpoint. It triggers the plugin; sizes are in `per_layer_config`."""

    def __init__(self, **block: Any):
        super().__init__(METHOD)  # pyright: ignore[reportArgumentType]
        unknown = sorted(block.keys() - COMPACT.keys())
        if unknown:
            warnings.warn(
                f"Unknown keys {unknown} in the quantization_config of this checkpoint: it was saved by a newer "
                "optimum_prune. They are kept and not used.",
                stacklevel=2,
            )
        # Kept as attributes in the order of the file, so that saving again writes the same bytes.
        self.__dict__.update(COMPACT | block)


class PruningQuantizer(HfQuantizer):
    """Shrinks the skeleton to the checkpoint's sizes before weights are loaded, then leaves an ordinary model behind."""

    # True would refuse checkpoints that are not pruned yet, before any hook of ours runs.
    requires_calibration = False
    is_trainable = property(lambda self: True)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_compileable = property(lambda self: True)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what this version cannot do."""
        if not self.pre_quantized:
            raise InvalidConfig(
                "Pruning while loading is not available in this version. Load the model first: "
                "Pruner.from_pretrained(name).prune(config)."
            )

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        resize_(model)
        if checkpoint_files:
            check_blocks(model, checkpoint_files)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        forget_quantizer_(model)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Compact checkpoints are written by plain `save_pretrained`."""
        return True


def register() -> None:
    """Tell transformers about the plugin. Idempotent; called once by `import optimum_prune`."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(CheckpointConfig)
        register_quantizer(METHOD)(PruningQuantizer)
