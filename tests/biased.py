"""Models that were given biases by hand."""

import torch
from transformers import PreTrainedModel

from optimum_prune.biases import add_, complete_, has_bias
from optimum_prune.binding import named_linears
from optimum_prune.sizes import describe_

SWITCHED = {
    "llama-gqa": {"attention_bias": True, "mlp_bias": True},
    "llama-tied-biased": {"attention_bias": True, "mlp_bias": True},
    "llava": {"attention_bias": True, "mlp_bias": True},
    "opt": {"enable_bias": True},
}
"""Variant -> what its config says where every linear has a bias. No other class has words for that."""


@torch.no_grad()
def biased(model: PreTrainedModel, share: float = 1.0, *, seed: int = 0) -> PreTrainedModel:
    """Give random biases to a share of the linears that have none, as pruning would, and make the config truthful."""
    generator = torch.Generator().manual_seed(seed)
    for linear in named_linears(model).values():
        if not has_bias(linear) and torch.rand((), generator=generator) < share:
            add_(linear)
            linear.bias.normal_(std=0.3, generator=generator)
    complete_(model)
    describe_(model)
    return model
