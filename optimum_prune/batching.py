"""Continuous batching of transformers, refused where its cache does not fit a pruned model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from optimum_prune.binding import adapter_for, stacks
from optimum_prune.configs import stack_config
from optimum_prune.errors import UnsupportedModel

if TYPE_CHECKING:
    # Not at run time: importing transformers' models registers the plugin, and the plugin needs this file.
    from transformers import PreTrainedModel

ENTRY = "init_continuous_batching"
"""Method of a model by which all of transformers' ways to continuous batching begin, `generate_batch` among them."""


class _Refusal:
    """Stands for the method `ENTRY` of one model. An object of a module's class can be copied and pickled."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedModel(
            "Continuous batching (generate_batch) keeps keys and values of one size for all layers, by the number of "
            "heads in the config, and layers of this model have other numbers. Use generate(), save with "
            "layout='padded', or prune heads to a number that the class takes (allocation='uniform')."
        )


def guard_batching_(model: PreTrainedModel) -> None:
    """Refuse continuous batching where layers have other KV heads than the config says globally; else allow it.

    Transformers allocates one cache for all layers by the global number. The generation would fail in a thread, where
    the error is only logged, and return empty answers.

    Args:
        model: its config describes it.
    """
    if any(map(_differs, _configs(model))):
        setattr(model, ENTRY, _Refusal())
    else:
        model.__dict__.pop(ENTRY, None)


def _configs(model: PreTrainedModel) -> list[tuple[Any, set[str]]]:
    """Return the config of every stack whose keys and values are cached, with the attributes that count KV heads."""
    return [
        (
            stack_config(model.config, found.stack),
            {next(iter(group.counts)) for group in found.stack.groups if not isinstance(group, tuple) and group.cached},
        )
        for found in stacks(model, adapter_for(model))
    ]


def _differs(described: tuple[Any, set[str]]) -> bool:
    config, counts = described
    return bool(counts & (config.per_layer_attributes or set()))
