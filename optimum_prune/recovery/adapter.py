"""Adapters that were written apart from their model: put on for a while, or merged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from optimum_prune.errors import CheckpointError

FOLDER = "adapter"
"""Folder beside the weights of a checkpoint, in which its adapter is."""


FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What is in it."""


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds an adapter."""
    return (folder / "adapter_config.json").is_file()


@contextmanager
def adapted(model: PreTrainedModel, folder: str | Path) -> Iterator[None]:
    """Let a model compute with an adapter for a while; its weights are as they were afterwards.

    Args:
        model: the one that the adapter was trained on.
        folder: what `recover(adapter=...)` wrote.
    """
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    tuned = _put_on(model, folder)
    try:
        yield
    finally:
        tuned.base_model.unload()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(required[name])


def merge_adapter_(model: PreTrainedModel, folder: str | Path) -> None:
    """Merge an adapter into the weights of its model."""
    _put_on(model, folder).merge_and_unload()


def _put_on(model: PreTrainedModel, folder: str | Path) -> Any:
    """Let PEFT wrap a model.

    Raises:
        CheckpointError: the adapter is damaged, or of another model; this one is as it was.
    """
    from peft import PeftModel

    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # a stranger's files break PEFT in any way they like
        wrapped: Any
        for name, wrapped in list(model.named_modules()):
            if hasattr(wrapped, "get_base_layer"):
                model.set_submodule(name, wrapped.get_base_layer())
        vars(model).pop("peft_config", None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(required[name])
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"The adapter beside the weights does not go with them, or is damaged ({type(error).__name__}: {reason}). "
            "Delete the folder 'adapter' of the checkpoint, or recover again."
        ) from error
