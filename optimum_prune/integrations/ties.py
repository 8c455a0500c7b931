"""Weights that a config ties and whose checkpoint holds different ones: they are loaded, counted and saved untied.

Transformers compares the two when it loads, and ties only equal ones. Its config goes on saying that they are tied.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from optimum_prune.configs import describe_ties_
from optimum_prune.layouts.headers import stored_shapes

_ROWS = 4096
"""Rows of an embedding that are compared at a time."""


def untie_(skeleton: PreTrainedModel, files: Iterable[Path]) -> None:
    """Give weights of their own to a skeleton where its checkpoint holds two that differ.

    Args:
        skeleton: on the meta device.
        files: safetensors of the checkpoint; only weights that are there twice are read.
    """
    places = {name: file for file in files for name in stored_shapes([file])}
    for target, source in dict(skeleton.all_tied_weights_keys or {}).items():
        names = [_name_on_disk(skeleton, name) for name in (target, source)]
        if places.keys() >= set(names) and not _are_equal(*((places[name], name) for name in names)):
            module, _, name = target.rpartition(".")
            weight = torch.empty_like(skeleton.get_parameter(source))
            setattr(skeleton.get_submodule(module), name, nn.Parameter(weight))
            del skeleton.all_tied_weights_keys[target]
    describe_ties_(skeleton)


def _name_on_disk(model: PreTrainedModel, name: str) -> str:
    return next(iter(revert_weight_conversion(model, {name: torch.empty(0, dtype=torch.float32, device="meta")})))


def _are_equal(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    with safe_open(one[0], framework="pt") as ours, safe_open(other[0], framework="pt") as theirs:
        weights = ours.get_slice(one[1]), theirs.get_slice(other[1])
        shapes = [tuple(weight.get_shape()) for weight in weights]
        parts = range(0, shapes[0][0], _ROWS)  # an embedding may not fit into memory twice
        return shapes[0] == shapes[1] and all(
            torch.equal(*(weight[start : start + _ROWS] for weight in weights)) for start in parts
        )
