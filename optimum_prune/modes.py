"""A model's mode and torch's defaults, changed for a while and given back on every way out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back."""
    training = [module for model in models for module in model.modules() if module.training]
    try:  # from the first change on: a user's Ctrl-C may come at any moment
        for model in models:
            model.eval()
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no parameter that requires a gradient, for a while."""
    with evaluating(model), keeping_requires_grad(model):
        model.requires_grad_(False)
        yield


@contextmanager
def keeping_requires_grad(model: nn.Module) -> Iterator[None]:
    """Whatever happens for a while, the parameters of now require a gradient, or none, as before."""
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, requires_grad in required:
            parameter.requires_grad_(requires_grad)


@contextmanager
def as_it_was(model: PreTrainedModel, checkpointing: bool) -> Iterator[None]:
    """Checkpoint activations if asked, and give back what a training changes about a model beside its weights."""
    config: Any = model.config
    cached, cache = hasattr(config, "use_cache"), getattr(config, "use_cache", None)
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters()}
    switch = checkpointing and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    try:
        if switch:
            _switch(model, "enable", {"use_reentrant": False})
            model.disable_input_require_grads()  # `attach` enables it, and what is enabled twice stays
        yield
    finally:
        if cached:
            config.use_cache = cache
        elif hasattr(config, "use_cache"):
            del config.use_cache
        if switch:
            _switch(model, "disable")
        for module, training in modes:
            module.training = training
        if len(devices) == 1:
            model.to(devices.pop())  # pyright: ignore[reportArgumentType] - a Trainer takes it to the first GPU


@contextmanager
def plain_defaults() -> Iterator[None]:
    """Restore torch's own defaults for a while: tensors are made on the CPU, in float32.

    For code of others that makes tensors without naming device and dtype. A user may have set both, by
    `torch.set_default_device` and `torch.set_default_dtype`.
    """
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _switch(model: PreTrainedModel, what: str, *options: Any) -> None:
    """Call a switch by the name that this version of transformers gives it."""
    newer, older = f"activation_checkpointing_{what}", f"gradient_checkpointing_{what}"
    getattr(model, newer if hasattr(model, newer) else older)(*options)
