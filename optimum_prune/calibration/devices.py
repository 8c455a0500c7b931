"""Where a model wants its inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device to send inputs to: that of the first weight that is in memory.

    `model.device` is that of the first weight, "meta" where this one is offloaded; what is sent there is lost.
    """
    # Where all weights are offloaded, any device will do: the hooks that hold them move what they are given.
    return next((weight.device for weight in model.parameters() if not weight.is_meta), torch.device("cpu"))


def is_spread(model: PreTrainedModel) -> bool:
    """Tell whether parts of a model are on different devices, by accelerate's map."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def machine(model: PreTrainedModel) -> dict[str, Any]:
    """Return where a model runs, in general words: `device` ("cpu", or the model of the GPU), `threads`, `dtype`."""
    device = input_device(model)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def moved(batch: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the inputs on `input_device(model)`."""
    device = input_device(model)
    return {name: tensor.to(device) for name, tensor in batch.items()}
