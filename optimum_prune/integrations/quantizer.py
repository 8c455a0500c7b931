"""Hooks into transformers' loading, called by a checkpoint (sizes, packed weights) or by a user (pruning)."""

import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from optimum_prune.config import PruningConfig
from optimum_prune.configs import COMPACT, METHOD, PER_LAYER, forget_quantizer_
from optimum_prune.errors import CheckpointError
from optimum_prune.layouts import packing
from optimum_prune.layouts.headers import check_model
from optimum_prune.layouts.packing import STORAGE, STORAGES
from optimum_prune.sizes import resize_

LAYOUTS = ("compact", "stock")
"""What the block may say; `"stock"` where the plugin is called for packed weights alone."""


class CheckpointConfig(QuantizationConfigMixin):
    """The `quantization_config` block of a checkpoint: calls the plugin; holds sizes of no other place."""

    def __init__(self, **block: Any):
        super().__init__(METHOD)  # pyright: ignore[reportArgumentType]
        # Kept as attributes in the order of the file, so that saving again writes the same bytes.
        self.__dict__.update(COMPACT | block)


class PruningQuantizer(HfQuantizer):
    """Shrinks the skeleton to the checkpoint's sizes before weights are loaded, and leaves an ordinary model.

    Where a user calls it with a `PruningConfig`, it prunes after the weights are loaded.
    """

    # True would refuse checkpoints that are not pruned yet, before any hook of ours runs.
    requires_calibration = False
    is_trainable = property(lambda self: True)  # pyright: ignore
    is_compileable = property(lambda self: True)  # pyright: ignore

    def __init__(self, quantization_config: Any, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            self.quantization_config: Any = as_config(quantization_config)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        if not self.pre_quantized:
            _at_load().check_before(model, checkpoint_files or ())
            return model
        self._check_version()
        resize_(model)
        if checkpoint_files:
            check_model(model, checkpoint_files, packed=self._is_packed)
        return model

    def get_weight_conversions(self) -> list[Any]:
        """Tell transformers how to load packed weights."""
        return [packing.converter()] if self._is_packed else []

    @property
    def _is_packed(self) -> bool:
        return getattr(self.quantization_config, STORAGE, "dense") == "packed"

    def _check_version(self) -> None:
        block = self.quantization_config.to_dict()
        version, layout, storage = block["version"], block["layout"], block.get(STORAGE, "dense")
        if version != COMPACT["version"] or layout not in LAYOUTS or storage not in STORAGES:
            raise CheckpointError(
                f"The checkpoint has layout {layout!r}, storage {storage!r}, version {version!r}; this optimum_prune "
                f"reads layouts {LAYOUTS}, storages {STORAGES}, version {COMPACT['version']}. Update it."
            )
        if unknown := sorted(block.keys() - {*COMPACT, PER_LAYER, STORAGE}):
            warnings.warn(
                f"Unknown keys {unknown} in the quantization_config of this checkpoint, perhaps of a newer "
                "optimum_prune. They are kept and not used.",
                stacklevel=2,
            )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        forget_quantizer_(model)
        if self._is_packed:
            packing.finish_(model)
        if not self.pre_quantized:
            delattr(model.config, "quantization_config")
            _at_load().prune_loaded_(model, self.quantization_config)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """What was loaded is written by plain `save_pretrained`: compact, and dense."""
        return True


def _at_load() -> ModuleType:
    # Here, since it loads what else belongs to a model, and loading needs this file.
    from optimum_prune.integrations import at_load

    return at_load


def as_config(given: PruningConfig | CheckpointConfig) -> PruningConfig:
    """Return the config by which a user prunes while loading: as given, or from the dict that became a block.

    Raises:
        InvalidConfig: the dict holds no such config.
    """
    if isinstance(given, PruningConfig):
        return given
    filled_in = COMPACT.keys() - {"version"}  # a config has a version too
    return PruningConfig.from_dict({name: value for name, value in vars(given).items() if name not in filled_in})


def register() -> None:
    """Tell transformers about the plugin. Idempotent; called once by `import optimum_prune`."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(CheckpointConfig)
        register_quantizer(METHOD)(PruningQuantizer)
