"""Recoveries that take a second: what the tests of training share."""

from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from optimum_prune.recovery.config import RecoveryConfig
from tests.models import llama
from tests.pruned import holes, unevenly
from tests.zeroed import bits

SEQ_LEN = 16
IDS = [[Random(f"{i} {j}").randrange(5, 13) for j in range(SEQ_LEN - i % 5)] for i in range(24)]
"""Rows of several lengths, of 8 of 96 tokens: something that is learned in a few steps."""


def config(**options: Any) -> RecoveryConfig:
    """Return a config by which the small models get better in a few steps."""
    small: dict[str, Any] = {"max_steps": 4, "evaluations": 2, "batch_size": 4, "seq_len": SEQ_LEN, "rank": 4}
    return RecoveryConfig(**{"dataset": IDS, "learning_rate": 1e-2, "num_samples": 20} | small | options)


LONG = {"max_steps": 8, "evaluations": 4, "dropout": 0.2}
"""A training that can be broken off, and goes on as if it had not been."""


def pruned() -> Any:
    """Return a Llama of uneven layers, with zeros."""
    return holes(unevenly(llama()))


def everything(model: Any) -> dict[str, Any]:
    """Return what a recovery that changes nothing must leave as it was: all bits, flags, modes and hooks."""
    return {
        "bits": bits(model),
        "parameters": {name: (id(p), p.requires_grad, p.grad is None) for name, p in model.named_parameters()},
        "modules": {
            name: (type(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "config": model.config.to_dict(),
    }


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors."""
    return float((a - b).abs().max())


def adapter(model: nn.Module) -> dict[str, Tensor]:
    """Copy the weights of an adapter."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" in name}


def valid_two_of_four(weight: Tensor) -> bool:
    """Tell whether exactly 2 of every 4 neighbours in a row are zero."""
    return bool(((weight != 0).view(-1, 4).sum(dim=1) == 2).all())


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator."""
    return torch.Generator().manual_seed(seed)
