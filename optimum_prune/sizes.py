"""The sizes of a model's blocks: measured on the modules, written into the config, read from it, applied to a skeleton.

A decoder's per-layer sizes live in transformers' own `per_layer_config`; what the plain config can say is said
there instead, so that plain transformers loads it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimum_prune.binding import BoundGroup, bind
from optimum_prune.errors import CheckpointError
from optimum_prune.surgery import slice_

if TYPE_CHECKING:
    # Not at run time: importing transformers' models registers the plugin, and the plugin needs this file.
    from transformers import PreTrainedConfig, PreTrainedModel

METHOD = "optimum_prune"
COMPACT = {
    "quant_method": METHOD,
    "version": 1,
    "layout": "compact",
    "hint": "pip install optimum-prune, then `import optimum_prune` before from_pretrained",
}
"""The `quantization_config` block of a compact checkpoint: it makes transformers call the plugin, and says no more."""

Sizes = dict[int, dict[str, int]]
"""Layer -> config attribute -> count."""


def measure(model: PreTrainedModel) -> Sizes:
    """Measure the counts of every layer on the live modules."""
    sizes: Sizes = {}
    for group in bind(model):
        sizes.setdefault(group.layer, {}).update(group.counts())
    return sizes


def describe_(model: PreTrainedModel) -> str:
    """Make the config say what the modules are; call it at the end of every surgery.

    Then every saver (`save_pretrained`, Trainer, PEFT's merge, `push_to_hub`) writes the truth without a hook.

    Returns:
        `"stock"` where plain transformers builds a model of these shapes from the config, else `"compact"`.
    """
    bound, sizes = bind(model), measure(model)
    if block_method(model.config) not in (None, METHOD):
        # The weights are plain (`bind` has seen to it), so the block speaks of the file that they came from: a GGUF.
        delattr(model.config, "quantization_config")
        forget_quantizer_(model)
    _plain_(model.config)
    uniform = _uniform(sizes)
    if uniform is not None and why_not_stock(model) is None:
        _set(model.config.get_text_config(), uniform | _unit_sizes(bound))
        return "stock"
    config = model.config.get_text_config()
    _set(config, _unit_sizes(bound) | _widest(bound, sizes))
    overrides = {
        layer: {name: count for name, count in counts.items() if getattr(config, name) != count}
        for layer, counts in sizes.items()
    }
    # In this order: with the flag unset, setting per-layer heads makes Llama's own validation of its config raise.
    config.allow_global_per_layer_attribute_access = True
    config.per_layer_config = {layer: counts for layer, counts in overrides.items() if counts}
    model.config.quantization_config = dict(COMPACT)
    return "compact"


def why_not_stock(model: PreTrainedModel) -> str | None:
    """Say why a plain config cannot describe the model, or None if it can.

    The class is asked: it builds a skeleton from the plain config, on the meta device, and shapes are compared.
    """
    sizes = measure(model)
    uniform = _uniform(sizes)
    if uniform is None:
        return "layers differ in " + ", ".join(_differing(sizes))
    config = copy.deepcopy(model.config)
    _plain_(config)
    try:
        _set(config.get_text_config(), uniform | _unit_sizes(bind(model)))
        skeleton = build_skeleton(type(model), type(config).from_dict(config.to_dict()))
    except Exception as error:  # a class may refuse a config in any way it likes; each one means "cannot say this"
        return str(error).strip().splitlines()[-1]
    expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    for name, tensor in model.state_dict().items():
        if expected.get(name) != tensor.shape:
            return f"{type(model).__name__} would give {name} the shape {list(expected.get(name, ()))}"
    return None


def resize_(model: PreTrainedModel) -> None:
    """Shrink a skeleton, as the class builds it, to the per-layer sizes in its config. No-op where already right.

    Raises:
        CheckpointError: the config asks for sizes that no slicing can give.
    """
    layers = model.config.get_text_config().per_layer_config
    for group in bind(model):
        wanted = {name: getattr(layers[group.layer], name) for name in group.group.counts}
        units = next(iter(wanted.values()))
        if 0 < units < group.num_units:
            slice_(group, range(units))
        if group.counts() != wanted:
            raise CheckpointError(
                f"config.json gives {group.name} {wanted}, but a {type(model).__name__} of this config can only be cut "
                f"to {group.counts()}. The config does not belong to these weights, or was edited."
            )


def build_skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model of `config` on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return model_class(config)


def forget_quantizer_(model: PreTrainedModel) -> None:
    """Make a model whose weights are plain an ordinary one again; `config.quantization_config` is left alone.

    With `hf_quantizer` kept, `save_pretrained(state_dict=...)` would silently ignore the dict it is given.
    """
    for attribute in ("hf_quantizer", "quantization_method"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    setattr(model, "is_quantized", False)  # noqa: B010 - an attribute that transformers declares nowhere
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config.__dict__.pop("_is_quantized", None)


def block_method(config: PreTrainedConfig) -> str | None:
    """Name of the method in `config.quantization_config`, a dict or an object, if there is one."""
    block = getattr(config, "quantization_config", None)
    return block.get("quant_method") if isinstance(block, dict) else getattr(block, "quant_method", None)


def _uniform(sizes: Sizes) -> dict[str, int] | None:
    first = next(iter(sizes.values()))
    return first if all(counts == first for counts in sizes.values()) else None


def _differing(sizes: Sizes) -> list[str]:
    return [name for name in sizes[0] if len({counts[name] for counts in sizes.values()}) > 1]


def _widest(bound: Sequence[BoundGroup], sizes: Sizes) -> dict[str, int]:
    names = {name for group in bound if not group.group.keep_global for name in group.group.counts}
    return {name: max(counts[name] for counts in sizes.values()) for name in names}


def _unit_sizes(bound: Sequence[BoundGroup]) -> dict[str, int]:
    return {group.group.unit_size_key: group.unit_size for group in bound if group.group.unit_size_key}


def _plain_(config: PreTrainedConfig) -> None:
    """Take everything compact out of a config; its global counts are read and written freely after this."""
    text = config.get_text_config()
    text.per_layer_config = None
    text.__dict__.pop("allow_global_per_layer_attribute_access", None)
    if block_method(config) == METHOD:
        delattr(config, "quantization_config")


def _set(config: PreTrainedConfig, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)
