"""A Llama whose head count its own config refuses, as the Mistral that computes the same."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from optimum_prune.binding import adapter_for, stacks
from optimum_prune.configs import assign, make_plain_, stack_config
from optimum_prune.errors import InvalidConfig
from optimum_prune.sizes import LISTS, build_skeleton, measure

if TYPE_CHECKING:
    # Not at run time: importing transformers' models registers the plugin.
    from transformers import PreTrainedConfig, PreTrainedModel

FROM, TO = "Llama", "Mistral"
FLAGS = ("attention_bias", "mlp_bias")
"""Keys of the one config that the other lacks: its linears have no biases."""
DROPPED = (*FLAGS, "pretraining_tp", "model_type", "architectures")
"""Keys that do not go along; of tensor parallelism in pre-training, no code is left."""


def switched(model: PreTrainedModel) -> PreTrainedModel:
    """Build a skeleton of the other class that has the model's shapes, with a plain config.

    The two classes compute the same, to the bit, but Mistral's config takes any number of heads.

    Args:
        model: a Llama, or a LLaVA around one; left as it is. A skeleton will do.

    Returns:
        A model on the meta device, of the same names and shapes.

    Raises:
        InvalidConfig: it is no Llama, has biases that the other class lacks, or layers differ.
    """
    declared, sizes = [found.stack for found in stacks(model, adapter_for(model))], measure(model)
    config: Any = copy.deepcopy(model.config)
    make_plain_(config, declared)
    for stack in declared:
        counts = {name: count for name, count in sizes[stack.path][0].items() if name not in LISTS}
        own = stack_config(config, stack)
        if own.model_type != FROM.lower():
            assign([own], counts)
        elif stack.config:
            setattr(config, stack.config, _translated(own, counts))
        else:
            config = _translated(own, counts)
    if type(config) is type(model.config) and not any(_is_other(stack_config(config, stack)) for stack in declared):
        raise InvalidConfig(f"a {type(model).__name__} is not shaped like a {FROM} that {TO} could stand for")
    skeleton = _build(model, config)
    expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    for name, tensor in model.state_dict().items():
        if expected.pop(name, None) != tensor.shape:
            raise InvalidConfig(f"a {type(skeleton).__name__} of one size of layers has no {name} of that shape")
    if expected:
        raise InvalidConfig(f"a {type(skeleton).__name__} would have {next(iter(expected))}, which is missing")
    return skeleton


def switched_name(model: PreTrainedModel) -> str | None:
    """Name the class as which `switched` would write the language model, or None if it would not."""
    try:
        skeleton = switched(model)
    except InvalidConfig:
        return None
    return type(skeleton).__name__ if type(skeleton) is not type(model) else f"{type(model).__name__} with a {TO}"


def offer(name: str | None) -> str:
    """Word the way out for those who cannot have `"stock"` otherwise; empty where there is none.

    Args:
        name: what `switched_name` says.
    """
    return f"class_switch=True (it is saved as {name}, which computes the same), " if name else ""


def _is_other(config: PreTrainedConfig) -> bool:
    return config.model_type == TO.lower()


def _translated(own: Any, counts: dict[str, int]) -> Any:
    from transformers import AutoConfig

    if on := [flag for flag in FLAGS if getattr(own, flag, False)]:
        raise InvalidConfig(f"{TO} has no {on[0]}")
    kept = {name: value for name, value in own.to_dict().items() if name not in DROPPED}
    # Mistral attends to 4096 tokens only, where nothing else is said.
    return AutoConfig.for_model(TO.lower(), **kept | counts | {"sliding_window": None})


def _build(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    import transformers

    name = type(model).__name__
    model_class: Any = type(model)
    if type(config) is not type(model.config):
        model_class = getattr(transformers, name.replace(FROM, TO), None)
        if model_class is None or not name.startswith(FROM):
            raise InvalidConfig(f"transformers has no {TO} like {name}")
    return build_skeleton(model_class, config)
