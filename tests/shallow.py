"""Models that lost blocks or sub-layers by hand, and the models that they have to equal."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from optimum_prune.binding import BoundStack, adapter_for, bind, stacks
from optimum_prune.sizes import describe_
from optimum_prune.surgery import drop_, skip_
from tests.models import IMAGE_TOKEN, VARIANTS

POST_NORM = {"opt-350m"}
"""Variants in which a block without weights is no identity: its norms come after the sum."""
STACKS = [
    (name, found.path)
    for name, build in VARIANTS.items()
    for model in [build()]
    for found in stacks(model, adapter_for(model))
    if found.stack.depth is not None
]
"""(variant, path) of every stack that can lose blocks."""
SUBLAYERS = [
    (name, found.path, kind)
    for name, build in VARIANTS.items()
    for model in [build()]
    for found in stacks(model, adapter_for(model))
    for kind in found.stack.sublayers
]
"""(variant, path, kind) of every kind of sub-layer that can be skipped."""


def build(name: str) -> PreTrainedModel:
    """Build a variant; a LLaVA writes no image tokens, of which it could not read its own text again."""
    model = VARIANTS[name]()
    if hasattr(model.config, "vision_config"):
        model.generation_config.suppress_tokens = [IMAGE_TOKEN]
    return model


def stack_of(model: PreTrainedModel, path: str | None = None) -> BoundStack:
    """Return a stack by its path; by default the only one that can lose blocks."""
    (found,) = (
        found
        for found in stacks(model, adapter_for(model))
        if found.stack.depth is not None and path in (None, found.path)
    )
    return found


def drop(model: PreTrainedModel, kept: Sequence[int], path: str | None = None) -> PreTrainedModel:
    """Drop all but some blocks, and make the config truthful."""
    drop_(model, stack_of(model, path), kept)
    describe_(model)
    return model


def skip(model: PreTrainedModel, kind: str, *layers: int, path: str | None = None) -> PreTrainedModel:
    """Skip sub-layers, and make the config truthful."""
    for layer in layers:
        skip_(model, stack_of(model, path), layer, kind)
    describe_(model)
    return model


def zero(model: PreTrainedModel, *names: str) -> PreTrainedModel:
    """Set to zero whatever writes to the residual stream in some blocks or sub-layers, by their paths."""
    readers = [
        reader
        for group in bind(model)
        if any(f"{group.name}.".startswith(f"{name}.") for name in names)
        for reader in group.readers
    ]
    assert readers
    for reader in readers:
        reader.weight.data.zero_()
        if reader.bias is not None:
            reader.bias.data.zero_()
    return model
