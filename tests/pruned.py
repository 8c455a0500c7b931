"""Models cut by hand, without a scorer: what is kept is drawn from a seed."""

import torch
from transformers import PreTrainedModel

from optimum_prune.binding import bind, named_linears
from optimum_prune.sizes import describe_
from optimum_prune.surgery import slice_

CHANNELS_REMOVED = (5, 9, 20)


def unevenly(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel:
    """Cut layers to different odd MLP widths, and to as many different KV-group counts as there are.

    Heads that are tied across a stack differ from stack to stack.
    """

    def kept(group):
        if group.unit == "mlp_channel":
            return group.num_units - CHANNELS_REMOVED[group.layer % 3]
        if group.group.tied:
            return group.num_units - (1 if group.declared.name == "encoder" else 3)
        return max(1, group.num_units - group.layer)

    return _cut(model, kept, seed)


def uniformly(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel:
    """Cut every layer to 8 MLP channels less and half of its KV groups: counts that the plain config can say.

    OPT and CLIP keep their heads: whatever their number, their classes divide hidden_size among them.
    """

    def kept(group):
        if group.unit == "mlp_channel":
            return group.num_units - 8
        derived = group.group.keep_global and "num_key_value_heads" not in group.group.counts
        return group.num_units if derived else -(-group.num_units // 2)

    return _cut(model, kept, seed)


@torch.no_grad()
def holes(model: PreTrainedModel, *, sparsity: float = 0.5, seed: int = 0) -> PreTrainedModel:
    """Set random weights of every linear of a block to zero, a fraction `sparsity` of them on average."""
    generator = torch.Generator().manual_seed(seed)
    for linear in named_linears(model).values():
        linear.weight.masked_fill_(torch.rand(linear.weight.shape, generator=generator) < sparsity, 0)
    return model


def _cut(model, kept, seed):
    generator = torch.Generator().manual_seed(seed)
    tied = {}
    for group in bind(model):
        drawn = torch.randperm(group.num_units, generator=generator)[: kept(group)].sort().values
        if group.group.tied == "units":
            drawn = tied.setdefault(group.stack, drawn)
        slice_(group, drawn)
    describe_(model)
    return model
