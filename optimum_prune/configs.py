"""A model's configs: which describes a stack, and what the plugin writes into them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optimum_prune.adapters.base import Stack

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
"""The `quantization_config` block of a compact checkpoint: it makes transformers call the plugin."""
PER_LAYER = "per_layer"
"""Key in that block: path of a stack -> layer -> config attribute -> count; and lists of names, see `sizes.LISTS`."""
LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Config attributes with an entry for every layer. By name, since a list of end tokens may happen to be as long."""
FIRST_LAYERS = ("max_window_layers",)
"""Config attributes that count the layers at the start of a stack which differ from the others (Qwen2, Qwen3)."""
PERIODS = ("sliding_window_pattern", "_sliding_window_pattern")
"""Config attributes with the period of full attention among sliding attention (Gemma 3)."""


def stack_config(config: PreTrainedConfig, stack: Stack) -> Any:
    """Return the (sub)config that describes a stack."""
    return getattr(config, stack.config) if stack.config else config


def stack_configs(model: PreTrainedModel, stack: Stack) -> list[PreTrainedConfig]:
    """Return all config objects that describe a stack: the model's own, and the copies that T5's stacks hold."""
    own = stack_config(model.config, stack)
    models: list[Any] = [module for module in model.modules() if hasattr(module, "base_model_prefix")]
    copies = {id(part.config): part.config for part in models if type(part.config) is type(own)}
    return list(({id(own): own} | copies).values())


def own_configs_(model: PreTrainedModel) -> None:
    """Replace the configs of a model by equal ones of its own: another live model may hold the same objects.

    Modules that held one object hold one object again, so that what is written into a config reaches all of them.
    """
    from transformers import GenerationConfig, PreTrainedConfig

    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig | GenerationConfig):
                vars(module)[name] = copy.deepcopy(value, copies)


def assign(configs: Iterable[PreTrainedConfig], values: Mapping[str, Any]) -> None:
    """Set attributes of several configs."""
    for config in configs:
        for name, value in values.items():
            setattr(config, name, value)


def layer_types(config: Any, kept: Sequence[int] | None = None) -> list[str] | None:
    """Return the config's kinds of attention by layer, of all layers or of those kept; None where all are alike."""
    kinds = getattr(config, "layer_types", None)
    return kinds if kinds is None or kept is None else [kinds[layer] for layer in kept]


def keep_layers_(configs: Iterable[PreTrainedConfig], stack: Stack, kept: Sequence[int]) -> None:
    """Make configs describe those layers of a stack that are kept: their number, and all that goes by layers."""
    for config in configs:
        setattr(config, str(stack.depth), len(kept))
        for name in LISTS:
            if (entries := getattr(config, name, None)) is not None:
                setattr(config, name, [entries[layer] for layer in kept])
        for name in FIRST_LAYERS:
            if (first := getattr(config, name, None)) is not None:
                setattr(config, name, sum(layer < first for layer in kept))
        for name in PERIODS:
            if (period := getattr(config, name, None)) is not None:
                setattr(config, name, _period(config.layer_types, period))  # pyright: ignore[reportAttributeAccessIssue]


def _period(kinds: Sequence[str], before: int) -> int | None:
    """Return the period of full attention, by which layer i has it where `i + 1` is a multiple; None without one.

    Several may fit a short list: then the one from before is kept.
    """
    full = [kind == "full_attention" for kind in kinds]
    fitting = (p for p in (before, *range(1, len(kinds) + 2)) if full == [i % p == 0 for i in range(1, len(kinds) + 1)])
    return next(fitting, None)


def kinds_follow_rule(config: Any) -> bool:
    """Tell whether a config's class would derive the same `layer_types` from its other attributes.

    Readers that know no `layer_types` go by that rule: older versions of transformers, converters, some servers.
    """
    kinds = layer_types(config)
    if kinds is None:
        return True
    names = ("num_hidden_layers", "use_sliding_window", "sliding_window", *FIRST_LAYERS)
    given = {name: getattr(config, name) for name in names if hasattr(config, name)}
    periods = {getattr(config, name) for name in PERIODS if hasattr(config, name)}
    if None in periods:
        return False
    if periods:
        given["sliding_window_pattern"] = periods.pop()
    derived = layer_types(type(config)(**given))
    return derived is None or derived == kinds


def irregular(path: str, how: str) -> str:
    """Warn of readers that derive each layer's kind of attention; `how`: "no longer" or "may no longer"."""
    return (
        f"The kinds of attention in {path} {how} follow the rule of the model's class. Readers that do not know "
        "layer_types (older versions of transformers, converters) compute something else."
    )


def make_plain_(config: PreTrainedConfig, declared: Sequence[Stack]) -> None:
    """Take everything compact out of a config; its global counts are read and written freely after this."""
    for stack in declared:
        own = stack_config(config, stack)
        own.per_layer_config = None
        own.__dict__.pop("allow_global_per_layer_attribute_access", None)
    if block_method(config) == METHOD:
        delattr(config, "quantization_config")


def describe_ties_(model: PreTrainedModel) -> None:
    """Make the config say `tie_word_embeddings=False` where the head has a weight of its own.

    T5's config cannot say so: its class ties weights that are equal, whatever the config says.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    config: Any = model.config
    if not getattr(config, "tie_word_embeddings", False) or head is None or head.weight is table.weight:
        return
    if not type(config)(tie_word_embeddings=False).tie_word_embeddings:
        config.tie_word_embeddings = False


def block_method(config: PreTrainedConfig) -> str | None:
    """Name of the method in `config.quantization_config`, a dict or an object, if there is one."""
    return block(config).get("quant_method")


def block(config: PreTrainedConfig) -> Mapping[str, Any]:
    """Return `config.quantization_config`, a dict or an object, as a mapping of what is read of it here."""
    found = getattr(config, "quantization_config", None) or {}
    if isinstance(found, Mapping):
        return found
    return {key: getattr(found, key) for key in ("quant_method", PER_LAYER) if hasattr(found, key)}


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
