"""Padding that is still in a model: units of zeros up to the widest layer, that no run may count as its own."""

import torch
from transformers import PreTrainedModel

from optimum_prune.binding import BoundGroup, bind
from optimum_prune.errors import UnsupportedModel


def is_padded(model: PreTrainedModel) -> bool:
    """Tell whether a model comes from a padded checkpoint, and still has padding: training may have filled it."""
    return says_padded(model) and any(used(group) < group.num_units for group in bind(model))


def says_padded(model: PreTrainedModel) -> bool:
    """Tell whether the config speaks of padding, which is all that there is of a skeleton."""
    record = getattr(model.config, "pruning_config", None) or {}
    return record.get("layout") == "padded"


def check_unpadded(model: PreTrainedModel) -> None:
    """Refuse to prune what is padded: the padding would go first, and be reported as removed.

    Raises:
        UnsupportedModel: with what to do.
    """
    if is_padded(model):
        raise UnsupportedModel(
            "The model is padded with units of zeros, which would be pruned first, and counted. Cut them before, by "
            "Pruner.unpad() or `optimum-cli prune convert DIR --output OTHER --layout compact`."
        )


@torch.no_grad()
def used(group: BoundGroup) -> int:
    """Count the units up to the last one that anything reads: a column is not zero.

    Biases of the readers belong to no unit: with one that is not zero, the group cannot be empty.
    """
    read = torch.zeros(group.num_units, dtype=torch.bool, device="cpu")
    for linear in group.readers:
        columns = (linear.weight != 0).any(dim=0)
        read |= columns.view(group.num_units, -1).any(dim=1).cpu()
        if linear.bias is not None and linear.bias.any():
            read[0] = True
    return int(read.nonzero().max()) + 1 if read.any() else 0
