"""Adapters that were written apart from their model: put on for a while, or merged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

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
    from peft import PeftModel

    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    tuned: Any = PeftModel.from_pretrained(model, str(folder))
    try:
        yield
    finally:
        tuned.base_model.unload()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(required[name])


def merge_adapter_(model: PreTrainedModel, folder: str | Path) -> None:
    """Merge an adapter into the weights of its model."""
    from peft import PeftModel

    tuned: Any = PeftModel.from_pretrained(model, str(folder))
    tuned.merge_and_unload()
