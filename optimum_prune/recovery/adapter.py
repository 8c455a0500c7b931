"""Adapters that were written apart from their model: put on for a while, or merged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from optimum_prune.errors import CheckpointError
from optimum_prune.modes import keeping_requires_grad, plain_defaults

FOLDER = "adapter"
"""Folder beside the weights of a checkpoint, in which its adapter is."""
CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What is in it."""


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


@contextmanager
def adapted(model: PreTrainedModel, folder: str | Path) -> Iterator[None]:
    """Let a model compute with an adapter for a while; its weights are as they were afterwards.

    Args:
        model: the one that the adapter was trained on.
        folder: what `recover(adapter=...)` wrote.
    """
    with keeping_requires_grad(model):
        tuned = _put_on(model, folder)
        try:
            yield
        finally:
            tuned.base_model.unload()


def merge_adapter_(model: PreTrainedModel, folder: str | Path) -> None:
    """Merge an adapter into the weights of its model."""
    with keeping_requires_grad(model):
        _put_on(model, folder).merge_and_unload()


@plain_defaults()
def _put_on(model: PreTrainedModel, folder: str | Path) -> Any:
    """Let PEFT wrap a model.

    Raises:
        CheckpointError: the adapter is damaged, or of another model; the modules of this one are as they were.
    """
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # a stranger's files break PEFT in any way they like
        wrapped: Any
        for name, wrapped in list(model.named_modules()):
            if hasattr(wrapped, "get_base_layer"):
                model.set_submodule(name, wrapped.get_base_layer())
        vars(model).pop("peft_config", None)
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"The adapter beside the weights does not go with them, or is damaged ({type(error).__name__}: {reason}). "
            "Delete the folder 'adapter' of the checkpoint, or recover again."
        ) from error
