"""LoRA of pruned models through PEFT: attached, merged with zeros kept, or taken off again."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.binding import bind, check_prunable, matches, named_linears, select
from optimum_prune.errors import InvalidConfig, UnsupportedModel, unknown
from optimum_prune.recovery.config import MERGING, RecoveryConfig
from optimum_prune.recovery.masked_linear import masked_layer, updated
from optimum_prune.sizes import forget_file_
from optimum_prune.sparsity import pruned_linears

if TYPE_CHECKING:
    from peft import PeftModel

_FROZEN = "_frozen_before"
"""Attribute of a PEFT model: names of the parameters that required no gradient before."""
_PRUNED = "_pruned_before"
"""Attribute of a PEFT model: names of the linears whose zeros pruning made."""


class Update(NamedTuple):
    """What an adapter adds to a linear: `scale * B A`, with A `(rank, d_in)` and B `(d_out, rank)`."""

    linear: nn.Linear
    A: Tensor
    B: Tensor
    scale: float


def target_modules(model: PreTrainedModel, config: RecoveryConfig) -> list[str]:
    """Name the linears to train, by full module paths. Embeddings and heads are none, tied or not.

    Args:
        model: a transformers model of a supported architecture, with plain weights.
        config: its `target_modules` narrow what is pruned by default, as `PruningConfig.include` does; the last parts
            of paths will do too (`q_proj`, `mlp.down_proj`).

    Raises:
        InvalidConfig: a pattern matches nothing.
        UnsupportedModel: the modules are not those of the adapter, or not plain.
    """
    names = [name for group in select(bind(model)) for name in group.linear_names]
    if config.target_modules is None:
        return names
    matched = {pattern: [name for name in names if _matches(name, pattern)] for pattern in config.target_modules}
    for pattern, found in matched.items():
        if not found:
            raise InvalidConfig(unknown("module pattern", pattern, _examples(names, pattern)))
    chosen = {name for found in matched.values() for name in found}
    return [name for name in names if name in chosen]


def attach(model: PreTrainedModel, config: RecoveryConfig) -> "PeftModel":
    """Put a fresh LoRA adapter on a pruned model, which is the only thing that trains then.

    With `merge="masked"` zeros stay as they are in training already. The adapter is an ordinary one all the same:
    loaded by plain PEFT, it updates zeros too.

    Args:
        model: changed in place: modules are wrapped, weights stay as they are. `merge_` and `unload_` give it back.
        config: how it is trained.

    Raises:
        InvalidConfig: a pattern of `target_modules` matches nothing.
        UnsupportedModel: adapters are attached already, or weights are quantised, not in memory, shared, not finite,
            or float16 on a CPU.
    """
    _check_unwrapped(model)
    names = target_modules(model, config)
    _check_trainable(model, names)
    forget_file_(model)  # a Trainer would take what came from a GGUF for quantised, and its weights are plain
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] - any number will do
        lora_dropout=config.dropout,
        target_modules=names,
        task_type=_task(model),
    )
    pruned = pruned_linears(model)
    if config.merge == "masked":
        build: Any = partial(masked_layer, {*pruned.values()})
        lora._register_custom_module({nn.Linear: build})
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    slices = getattr(model.config, "pretraining_tp", None)
    with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU; to seed all devices would change the user's
        torch.default_generator.manual_seed(config.seed)
        tuned: Any = get_peft_model(model, lora)
    if slices is not None:
        model.config.pretraining_tp = slices  # PEFT sets it to 1, for classes that once read it
    setattr(tuned, _FROZEN, frozen)
    setattr(tuned, _PRUNED, {*pruned})
    return tuned


@contextmanager
def attached(model: PreTrainedModel, config: RecoveryConfig) -> Iterator["PeftModel"]:
    """Attach an adapter for a while; where it was not merged by then, the model is as it was."""
    tuned = attach(model, config)
    try:
        yield tuned
    finally:
        if hasattr(model, "peft_config"):
            unload_(tuned)


@torch.no_grad()
def merge_(peft_model: "PeftModel", how: str) -> PreTrainedModel:
    """Add an adapter's update to the weights, in float32 or wider, and take PEFT off.

    Args:
        peft_model: as from `attach`.
        how: `"masked"` or `"remask"`, by which zeros that pruning made stay exactly zero, or `"plain"`, by which they
            are lost. The first two differ in training alone: if that was masked too, the merged model computes what the
            adapter did.

    Returns:
        The model that was given to `attach`, with its names and flags as before.

    Raises:
        InvalidConfig: another `how`.
        UnsupportedModel: an update is not finite. Nothing is changed then.
    """
    if how not in MERGING:
        raise InvalidConfig(unknown("merge", how, MERGING))
    updates = _updates(peft_model)
    for name, (_, A, B, _) in updates.items():
        if not (A.isfinite().all() and B.isfinite().all()):
            raise UnsupportedModel(
                f"The update of {name} holds NaN or infinite values: training diverged. Train again with a lower "
                "learning_rate."
            )
    pruned: set[str] = getattr(peft_model, _PRUNED)
    for name, (linear, A, B, scale) in tqdm(updates.items(), desc="Merging", unit="linear", delay=2):
        linear.weight.copy_(updated(linear.weight, A, B, scale, masked=how != "plain" and name in pruned))
    return unload_(peft_model)


def unload_(peft_model: "PeftModel") -> PreTrainedModel:
    """Take an adapter off without merging.

    Args:
        peft_model: as from `attach`.

    Returns:
        The model that was given to `attach`, as it was.
    """
    model: Any = peft_model.base_model.unload()  # pyright: ignore[reportCallIssue]
    model.disable_input_require_grads()  # enabled by PEFT and transformers where activations are checkpointed
    frozen = getattr(peft_model, _FROZEN)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


def _matches(name: str, pattern: str) -> bool:
    return matches(name, pattern) or matches(name, f"*.{pattern}")


def _examples(names: list[str], pattern: str) -> list[str]:
    """Return what a pattern might have meant: whole paths if it has a dot, else their last parts."""
    paths = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return list(paths if "." in pattern else dict.fromkeys(path.rpartition(".")[2] for path in paths))


def _task(model: PreTrainedModel) -> str | None:
    """Name the kind of model in PEFT's words; None for one without a language-model head."""
    if not model.can_generate():
        return None
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def _check_unwrapped(model: PreTrainedModel) -> None:
    if hasattr(model, "peft_config"):
        raise UnsupportedModel(
            f"{type(model).__name__} has PEFT adapters already ({', '.join(model.peft_config)}). Merge them or unload "  # pyright: ignore[reportCallIssue, reportArgumentType]
            "them (merge_and_unload() or unload() of the PeftModel), and pass the plain model."
        )


def _check_trainable(model: PreTrainedModel, names: list[str]) -> None:
    """Refuse weights that cannot be trained and merged, by name."""
    check_prunable(model, [group for group in bind(model) if set(names) & set(group.linear_names)])
    linears = named_linears(model)
    for name in names:
        weight = linears[name].weight
        if weight.dtype == torch.float16 and weight.device.type == "cpu":
            raise UnsupportedModel(
                f"{name}.weight is float16 on a CPU, where training in float16 overflows and is slow. Load the model "
                "in bfloat16 or float32 (dtype=), or move it to a GPU."
            )


def _updates(peft_model: "PeftModel") -> dict[str, Update]:
    """Find the update of every linear that has one, by the linear's path."""
    from peft.tuners.lora import LoraLayer

    found = {}
    for name, layer in peft_model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            (adapter,) = layer.active_adapters
            linear: Any = layer.get_base_layer()
            A: Any = layer.lora_A[adapter].weight
            B: Any = layer.lora_B[adapter].weight
            found[name] = Update(linear, A, B, layer.scaling[adapter])
    return found
