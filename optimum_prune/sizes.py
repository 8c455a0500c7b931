"""The sizes of a model's blocks: measured on the modules, written into the config, read from it, applied to a skeleton.

What the plain config can say is said there, so that plain transformers loads it. Else a decoder's per-layer sizes live
in transformers' own `per_layer_config`, and those of other stacks in the checkpoint's `quantization_config`, as do the
biases that no class builds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimum_prune.adapters.base import Stack
from optimum_prune.batching import guard_batching_
from optimum_prune.biases import EXTRA, add_, extra, switches
from optimum_prune.binding import BoundGroup, BoundStack, adapter_for, bind, named_linears, stacks
from optimum_prune.configs import (
    COMPACT,
    METHOD,
    PER_LAYER,
    assign,
    block,
    block_method,
    describe_ties_,
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
"""Declared path of a stack -> layer -> config attribute -> count; and lists of names, see `LISTS`."""
LISTS = (SKIP, EXTRA)
"""What a layer has beside its counts: the sub-layers that are skipped, the linears with a bias of our own."""


def measure(model: PreTrainedModel) -> Sizes:
    """Measure every layer on the live modules: its counts, what is skipped in it, and which biases it has on top.

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
    on = switches(model)
    for group in bind(model):
        counts = sizes[group.declared.path][group.layer]
        if biased := extra(group, on):
            counts[EXTRA] = [*counts.get(EXTRA, ()), *biased]
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
    sizes = measure(model)
    forget_file_(model)
    describe_ties_(model)
    declared = _declared(model)
    make_plain_(model.config, declared)
    uniform = _uniform(declared, sizes)
    if uniform is not None and why_not_stock(model) is None:
        for stack in declared:
            assign(stack_configs(model, stack), uniform[stack.config] | _constants(model, stack))
        guard_batching_(model)
        return "stock"
    widest = _widest(model, declared, sizes)
    for stack in declared:
        assign(stack_configs(model, stack), _constants(model, stack) | widest[stack.config])
    plugin: dict[str, Any] = dict(COMPACT)
    for stack in declared:
        config = stack_config(model.config, stack)
        ours: dict[str, dict[str, Any]] = {}
        theirs: dict[int, dict[str, Any]] = {}
        for layer, counts in sizes[stack.path].items():
            for name, count in counts.items():
                if name not in LISTS and getattr(config, name) == count:
                    continue
                if _in_block(stack, name):
                    ours.setdefault(str(layer), {})[name] = count  # as JSON will have it
                else:
                    theirs.setdefault(layer, {})[name] = count
        if ours:
            plugin.setdefault(PER_LAYER, {})[stack.path] = ours
        if theirs:
            # In this order: with the flag unset, setting per-layer heads makes Llama's own validation raise.
            config.allow_global_per_layer_attribute_access = True
            config.per_layer_config = theirs
    model.config.quantization_config = plugin
    guard_batching_(model)
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
    try:
        skeleton = _built(model, declared, uniform)
    except Exception as error:  # a class may refuse a config in any way it likes; each one means "cannot say this"
        return refusal(error)
    expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    for name, tensor in model.state_dict().items():
        if expected.get(name) != tensor.shape:
            return f"{type(model).__name__} would give {name} the shape {list(expected.get(name, ()))}"
    return None


def resize_(model: PreTrainedModel) -> None:
    """Shrink a skeleton, as the class builds it, to the per-layer sizes in its config, and add biases that it lacks.

    No-op where already right.

    Raises:
        CheckpointError: the config asks for sizes that no slicing can give, skips what has to stay, or gives biases to
            what is no linear.
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
    _add_biases_as_told(model)
    guard_batching_(model)


def refusal(error: Exception) -> str:
    """Word, for the middle of a sentence, why a class refuses a config: the name of an exception in it says nothing."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\w*Error: ", "", lines[-1].strip()).rstrip(".")


def why_not_padded(model: PreTrainedModel) -> str | None:
    """Say why no plain config has room for the model's layers, or None where it may have: zeros fill no bias in."""
    biased = [
        f"{stack}.{layer}.{counts[EXTRA][0]}"
        for stack, layers in measure(model).items()
        for layer, counts in layers.items()
        if EXTRA in counts
    ]
    return f"no config gives {biased[0]} a bias" if biased else None


def build_skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model of `config` on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return model_class(config)


def _built(model: PreTrainedModel, declared: Sequence[Stack], counts: Mapping[str, dict[str, int]]) -> PreTrainedModel:
    """Build a skeleton of the model's class from its config, with other counts, by sub-config."""
    config = copy.deepcopy(model.config)
    make_plain_(config, declared)
    for stack in declared:
        assign([stack_config(config, stack)], counts[stack.config] | _constants(model, stack))
    return build_skeleton(type(model), type(config).from_dict(config.to_dict()))


def _skip_as_told(model: PreTrainedModel) -> None:
    for found in stacks(model, adapter_for(model)):
        kinds = layer_types(stack_config(model.config, found.stack))
        for layer, module in enumerate(found.blocks):
            told = _told(model, found, layer, SKIP)
            for kind in told.difference(skipped(found.stack, module)):
                if reason := why_not_skip(found.stack, kinds, layer, kind):
                    raise CheckpointError(
                        f"config.json skips the {kind} of {found.path}.{layer}, which is not possible: {reason}."
                    )
                skip_(model, found, layer, kind)


def _add_biases_as_told(model: PreTrainedModel) -> None:
    linears = named_linears(model)
    for found in stacks(model, adapter_for(model)):
        for layer in range(len(found.blocks)):
            for path in sorted(_told(model, found, layer, EXTRA)):
                name = f"{found.path}.{layer}.{path}"
                if name not in linears:
                    raise CheckpointError(
                        f"config.json gives {name} a bias, but there is no linear of that name in the block. The "
                        "config does not belong to these weights, or was edited."
                    )
                add_(linears[name])


def _told(model: PreTrainedModel, found: BoundStack, layer: int, kind: str) -> set[str]:
    """Read one of the `LISTS` of a layer."""
    told = _size(model.config, found.stack, layer, kind, [])
    if not isinstance(told, list | tuple):
        raise CheckpointError(f"config.json gives {found.path}.{layer} {kind}={told!r}; it must be a list of names.")
    return set(told)


def _in_block(stack: Stack, name: str) -> bool:
    """Tell whether what a layer has of that name is written in our block of the config, and not in transformers' own.

    There, whatever one layer has, all have to have, or the class.
    """
    return name == EXTRA or stack.layer_sizes == "quantization_config"


def _size(config: PreTrainedConfig, stack: Stack, layer: int, name: str, *default: Any) -> Any:
    """Read what the config says of a layer."""
    own: Any = stack_config(config, stack)
    if not _in_block(stack, name):
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
        expected = uniform.setdefault(stack.config, counts[0])
        if any(other != expected or not other.keys().isdisjoint(LISTS) for other in counts):
            return None
    return uniform


def _why_uneven(declared: Sequence[Stack], sizes: Sizes) -> str:
    """Say in which counts layers differ, and what their lists hold."""
    seen: dict[tuple[str, str], set[int]] = {}
    skips: list[str] = []
    biased: list[str] = []
    for stack in declared:
        for layer, counts in sizes[stack.path].items():
            skips += [f"the {kind} of {stack.path}.{layer} is skipped" for kind in counts.get(SKIP, ())]
            biased += [f"{stack.path}.{layer}.{name}" for name in counts.get(EXTRA, ())]
            for name, count in counts.items():
                if name not in LISTS:
                    seen.setdefault((stack.config, name), set()).add(count)
    differing = [name for (_, name), found in seen.items() if len(found) > 1]
    reasons = [f"layers differ in {', '.join(differing)}"] * bool(differing) + skips
    if biased:
        reasons.append(f"no config gives {biased[0]} a bias ({len(biased)} linears have one of their own)")
    return "; ".join(reasons)


def _widest(model: PreTrainedModel, declared: Sequence[Stack], sizes: Sizes) -> dict[str, dict[str, int]]:
    """Return, by sub-config, the largest count of every attribute that may be written globally.

    Of head counts, a class may refuse many. One on which all layers agree is written where the class takes it, since
    transformers sizes the cache of continuous batching by it.
    """
    widest: dict[str, dict[str, int]] = {}
    equal: dict[str, dict[str, int]] = {}
    for group in bind(model):
        layers = sizes[group.declared.path].values()
        own, agreed = group.declared.config, equal.setdefault(group.declared.config, {})
        counts = widest.setdefault(own, {})
        for name in group.group.counts:
            found = {layer[name] for layer in layers if name in layer}
            if not group.group.keep_global:
                counts[name] = agreed[name] = max(counts.get(name, 0), *found)
            elif group.group.cached and len(found) == 1:
                agreed[name] = max(found)
    return equal if equal != widest and _builds_cached(model, declared, equal) else widest


def _builds_cached(model: PreTrainedModel, declared: Sequence[Stack], counts: Mapping[str, dict[str, int]]) -> bool:
    """Tell whether the class takes these counts, and builds the groups whose keys and values are cached as they are."""
    try:
        skeleton = _built(model, declared, counts)
    except Exception:  # a class may refuse a config in any way it likes
        return False
    live, built = (
        {group.name: [linear.weight.shape for linear in group.linears] for group in bind(some) if group.group.cached}
        for some in (model, skeleton)
    )
    return live.items() <= built.items()


def _constants(model: PreTrainedModel, stack: Stack) -> dict[str, int | bool]:
    """Return what the config of a stack has to say of all its layers: the sizes of units, and which biases are on."""
    members = [group for group in bind(model) if group.declared == stack and group.group.unit_size_key]
    sizes = {str(group.group.unit_size_key): group.unit_size for group in members}
    return sizes | {name: value for (own, name), value in switches(model).items() if own == stack.config}
