"""A model's mode, changed for a while and given back on every way out."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
