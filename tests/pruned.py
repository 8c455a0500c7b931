"""Models cut by hand, without a scorer: what is kept is drawn from a seed."""

import torch
from transformers import PreTrainedModel

from optimum_prune.binding import bind
from optimum_prune.sizes import describe_
from optimum_prune.surgery import slice_

CHANNELS_REMOVED = (5, 9, 20)


def unevenly(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel:
    """Cut three layers to three odd MLP widths, and to as many different KV-group counts as there are."""

    def kept(group):
        if group.unit == "mlp_channel":
            return group.num_units - CHANNELS_REMOVED[group.layer]
        return max(1, group.num_units - group.layer)

    return _cut(model, kept, seed)


def uniformly(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel:
    """Cut every layer to 8 MLP channels less and half of its KV groups: counts that the plain config can say.

    OPT keeps its heads: whatever their number, its class divides hidden_size among them.
    """

    def kept(group):
        if group.unit == "mlp_channel":
            return group.num_units - 8
        return group.num_units if model.config.model_type == "opt" else -(-group.num_units // 2)

    return _cut(model, kept, seed)


def _cut(model, kept, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in bind(model):
        slice_(group, torch.randperm(group.num_units, generator=generator)[: kept(group)].sort().values)
    describe_(model)
    return model
