"""The sizes of a model's blocks: measured on the modules, written into the config, read from it, applied to a skeleton.

What the plain config can say is said there, so that plain transformers loads it. Else a decoder's per-layer sizes live
in transformers' own `per_layer_config`, and those of other stacks in the checkpoint's `quantization_config`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimum_prune.adapters.base import Stack
from optimum_prune.binding import BoundGroup, adapter_for, bind, stacks
from optimum_prune.configs import (
    COMPACT,
    METHOD,
    PER_LAYER,
    assign,
    block,
    block_method,
    forget_quantizer_,
    layer_types,
    make_plain_,
    stack_config,
    stack_configs,
)
from optimum_prune.errors import CheckpointError, UnsupportedModel
from optimum_prune.skipping import SKIP, skipped, why_not_skip
from optimum_prune.surgery import skip_, slice_

if TYPE_CHECKING:
    # Not at run time: importing transformers' models registers the plugin, and the plugin needs this file.
    from transformers import PreTrainedConfig, PreTrainedModel

Sizes = dict[str, dict[int, dict[str, Any]]]
"""Declared path of a stack -> layer -> config attribute -> count; under `SKIP`, the sub-layers that are skipped."""


def measure(model: PreTrainedModel) -> Sizes:
    """Measure every layer on the live modules: its counts, and what is skipped in it.

    Raises:
        UnsupportedModel: groups differ that have to keep the same number of units.
    """
    sizes: Sizes = {
        found.stack.path: {
            layer: {SKIP: kinds} if (kinds := skipped(found.stack, block)) else {}
            for layer, block in enumerate(found.blocks)
        }
        for found in stacks(model, adapter_for(model))
    }
    for group in bind(model):
        counts = sizes[group.declared.path][group.layer]
        for attribute, count in group.counts().items():
            if counts.setdefault(attribute, count) != count:
                raise UnsupportedModel(
                    f"{group.name} has {count} {group.unit}s, but another group of its block has {counts[attribute]}; "
                    f"the config counts both by {attribute}."
                )
        _check_tie(group, sizes[group.declared.path][0])
    return sizes


def describe_(model: PreTrainedModel) -> str:
    """Make the config say what the modules are; call it at the end of every surgery.

    Then every saver (`save_pretrained`, Trainer, PEFT's merge, `push_to_hub`) writes the truth without a hook.

    Returns:
        `"stock"` where plain transformers builds a model of these shapes from the config, else `"compact"`.
    """
    bound, sizes = bind(model), measure(model)
    forget_file_(model)
    declared = _declared(model)
    make_plain_(model.config, declared)
    uniform = _uniform(declared, sizes)
    if uniform is not None and why_not_stock(model) is None:
        for stack in declared:
            assign(stack_configs(model, stack), uniform[stack.config] | _unit_sizes(bound, stack))
        return "stock"
    widest = _widest(bound, sizes)
    for stack in declared:
        assign(stack_configs(model, stack), _unit_sizes(bound, stack) | widest[stack.config])
    plugin: dict[str, Any] = dict(COMPACT)
    for stack in declared:
        config = stack_config(model.config, stack)
        overrides = {
            layer: {name: count for name, count in counts.items() if name == SKIP or getattr(config, name) != count}
            for layer, counts in sizes[stack.path].items()
        }
        overrides = {layer: counts for layer, counts in overrides.items() if counts}
        if not overrides:
            continue
        if stack.layer_sizes == "quantization_config":
            layers = {str(layer): counts for layer, counts in overrides.items()}  # as JSON will have it
            plugin.setdefault(PER_LAYER, {})[stack.path] = layers
        else:
            # In this order: with the flag unset, setting per-layer heads makes Llama's own validation raise.
            config.allow_global_per_layer_attribute_access = True
            config.per_layer_config = overrides
    model.config.quantization_config = plugin
    return "compact"


def forget_file_(model: PreTrainedModel) -> None:
    """Drop the config's block of a quantizer: of plain weights it only describes the file they came from, a GGUF."""
    if block_method(model.config) not in (None, METHOD):
        delattr(model.config, "quantization_config")
        forget_quantizer_(model)


def why_not_stock(model: PreTrainedModel) -> str | None:
    """Say why a plain config cannot describe the model, or None if it can.

    The class is asked: it builds a skeleton from the plain config, on the meta device, and shapes are compared.
    """
    declared, sizes = _declared(model), measure(model)
    uniform = _uniform(declared, sizes)
    if uniform is None:
        return _why_uneven(declared, sizes)
    config = copy.deepcopy(model.config)
    make_plain_(config, declared)
    try:
        for stack in declared:
            assign([stack_config(config, stack)], uniform[stack.config] | _unit_sizes(bind(model), stack))
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
        CheckpointError: the config asks for sizes that no slicing can give, or skips what has to stay.
    """
    _skip_as_told(model)
    for group in bind(model):
        wanted = {name: _size(model.config, group.declared, group.layer, name) for name in group.group.counts}
        for name, count in wanted.items():
            if not isinstance(count, int):
                raise CheckpointError(f"config.json gives {group.name} {name}={count!r}, which is no number of units.")
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


def _skip_as_told(model: PreTrainedModel) -> None:
    for found in stacks(model, adapter_for(model)):
        kinds = layer_types(stack_config(model.config, found.stack))
        for layer, module in enumerate(found.blocks):
            told = _size(model.config, found.stack, layer, SKIP, [])
            if not isinstance(told, list | tuple):
                raise CheckpointError(f"config.json skips {told!r} of {found.path}.{layer}; it must be a list.")
            told = set(told)
            for kind in told.difference(skipped(found.stack, module)):
                if reason := why_not_skip(found.stack, kinds, layer, kind):
                    raise CheckpointError(
                        f"config.json skips the {kind} of {found.path}.{layer}, which is not possible: {reason}."
                    )
                skip_(model, found, layer, kind)


def _size(config: PreTrainedConfig, stack: Stack, layer: int, name: str, *default: Any) -> Any:
    """Read what the config says of a layer."""
    own: Any = stack_config(config, stack)
    if stack.layer_sizes == "per_layer_config":
        return getattr(own.per_layer_config[layer], name, *default)
    try:
        written = block(config).get(PER_LAYER, {}).get(stack.path, {}).get(str(layer), {})
    except AttributeError:
        raise CheckpointError(
            f"quantization_config.{PER_LAYER} of config.json must map {stack.path} to layers, and these to counts."
        ) from None
    return written[name] if name in written else getattr(own, name, *default)


def _declared(model: PreTrainedModel) -> list[Stack]:
    return [found.stack for found in stacks(model, adapter_for(model))]


def _check_tie(group: BoundGroup, first: Mapping[str, int]) -> None:
    attribute, count = next(iter(group.counts().items()))
    if group.group.tied and first[attribute] != count:
        raise UnsupportedModel(
            f"{group.name} has {count} {group.unit}s, but block 0 has {first[attribute]}: every block of "
            f"{group.stack} has to keep the same number, since they share what block 0 computes per head."
        )


def _uniform(declared: Sequence[Stack], sizes: Sizes) -> dict[str, dict[str, int]] | None:
    """Return the counts by sub-config, if all layers of all stacks that share one agree."""
    uniform: dict[str, dict[str, int]] = {}
    for stack in declared:
        counts = list(sizes[stack.path].values())
        if any(SKIP in other or other != uniform.setdefault(stack.config, counts[0]) for other in counts):
            return None
    return uniform


def _why_uneven(declared: Sequence[Stack], sizes: Sizes) -> str:
    """Say in which counts layers differ, and what is skipped in them."""
    seen: dict[tuple[str, str], set[int]] = {}
    skips: list[str] = []
    for stack in declared:
        for layer, counts in sizes[stack.path].items():
            skips += [f"the {kind} of {stack.path}.{layer} is skipped" for kind in counts.get(SKIP, ())]
            for name, count in counts.items():
                if name != SKIP:
                    seen.setdefault((stack.config, name), set()).add(count)
    differing = [name for (_, name), found in seen.items() if len(found) > 1]
    return "; ".join([f"layers differ in {', '.join(differing)}"] * bool(differing) + skips)


def _widest(bound: Sequence[BoundGroup], sizes: Sizes) -> dict[str, dict[str, int]]:
    """Return, by sub-config, the largest count of every attribute that may be written globally."""
    widest: dict[str, dict[str, int]] = {}
    for group in bound:
        counts = widest.setdefault(group.declared.config, {})
        if not group.group.keep_global:
            for name in group.group.counts:
                counts[name] = max(counts.get(name, 0), sizes[group.declared.path][group.layer][name])
    return widest


def _unit_sizes(bound: Sequence[BoundGroup], stack: Stack) -> dict[str, int]:
    members = [group for group in bound if group.declared is stack and group.group.unit_size_key]
    return {str(group.group.unit_size_key): group.unit_size for group in members}
