"""Packed storage: of a weight with many zeros, a checkpoint holds the other numbers, and bits that say where they go.

The format, version 1. For a packed weight `name` of shape `(rows, columns)` there are two tensors:

- `name`: 1-D, in the dtype of the weight: the numbers that are stored, in row-major order.
- `name.packed_bitmap`: `(ceil(rows * columns / 8),) uint8`. Weight `i`, counted in row-major order, is stored if bit
  `i % 8` of byte `i // 8` is set; bit 0 is the one of value 1. Bits that are left over are 0.

All other weights are +0.0; -0.0 is a number that is stored, so that loading gives the same bits. The shape is that of
the model which the config builds. A checkpoint whose `quantization_config` says `"storage": "packed"` may hold any of
its weights so, and holds all others as always; its `layout` is independent of it.

The numbers have the name of the weight itself on purpose: what does not know the format finds a tensor of the wrong
shape and stops, where it would fill a weight that it does not find with random numbers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.utils import logging

from optimum_prune.binding import named_linears
from optimum_prune.configs import COMPACT
from optimum_prune.errors import CheckpointError, UnsupportedModel
from optimum_prune.layouts.ordering import in_order

STORAGES = ("dense", "packed")
STORAGE = "storage"
"""Key in the `quantization_config` block; absent where the storage is dense."""
BITMAP = ".packed_bitmap"
"""Ends the name of a bitmap; before it stands the name of the weight."""

_BITS = (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1
_COUNT = _BITS.sum(dim=1, dtype=torch.int32)
"""Byte -> how many of its bits are set."""
_RANK = _BITS.cumsum(dim=1).where(_BITS.bool(), torch.iinfo(torch.int32).min).int()
"""Byte -> for each of its 8 bits: its place among those that are set, from 1 on; the least number if it is not set."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Take a weight apart.

    Args:
        weight: any shape, 16 to 64 bits.

    Returns:
        The numbers that are not +0.0, and the bitmap, as the format describes them.
    """
    flat = weight.detach().contiguous().view(-1)
    stored = flat.view(_WORDS[flat.element_size()]) != 0
    bits = functional.pad(stored, (0, -len(stored) % 8)).view(-1, 8).to(torch.uint8)
    values = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return flat[stored], (bits * values).sum(dim=1, dtype=torch.uint8)


def unpack(numbers: Tensor, bitmap: Tensor, shape: torch.Size) -> Tensor:
    """Put a weight together again: the inverse of `pack`.

    Args:
        numbers: 1-D, any dtype.
        bitmap: `(ceil(weights / 8),) uint8` on the same device.
        shape: of the weight.

    Raises:
        CheckpointError: the bitmap marks more or fewer weights than there are numbers.
    """
    octets = bitmap.int()
    count = _COUNT.to(bitmap.device).index_select(0, octets)
    ends = count.cumsum(dim=0, dtype=torch.int32)
    marked = int(ends[-1]) if len(ends) else 0
    if marked != len(numbers):
        raise CheckpointError(f"its bitmap marks {marked:,} weights, but {len(numbers):,} are stored")
    # Where each weight is found behind a zero put first. Several times faster than `masked_scatter`, which branches.
    places = _RANK.to(bitmap.device).index_select(0, octets).add_((ends - count)[:, None]).clamp_(min=0)
    numbers = torch.cat([numbers.new_zeros(1), numbers])
    return numbers.index_select(0, places.view(-1)[: shape.numel()]).view(shape)


def save_packed(model: PreTrainedModel, folder: Path, layout: str, **kwargs: Any) -> bool:
    """Write a checkpoint with those linears packed that get smaller by it; the model and its config stay as they are.

    Args:
        model: its config describes it.
        folder: to write to.
        layout: as which the config describes it: `"stock"` or `"compact"`.
        kwargs: for transformers' `save_pretrained`; a `state_dict` among them is what is packed.

    Returns:
        Whether anything was packed. If not, nothing was written.

    Raises:
        UnsupportedModel: a weight is not in memory.
    """
    state = dict(kwargs.pop("state_dict", None) or model.state_dict())
    names = logging.tqdm(named_linears(model), desc="Packing weights")
    packed = [name for name in names if _pack_(state, f"{name}.weight")]
    if packed:
        with _said_to_be_packed(model.config, layout):
            model.save_pretrained(folder, state_dict=in_order(state), **kwargs)
    return bool(packed)


def shapes_unpacked(stored: Mapping[str, Sequence[int]], expected: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the shapes that tensors will have when they are unpacked.

    Args:
        stored: name -> shape, as in the files.
        expected: name -> shape, as the model has it. What cannot be unpacked to it is returned as it is stored.
    """
    shapes = {name: tuple(shape) for name, shape in stored.items()}
    for name in [name for name in shapes if name.endswith(BITMAP)]:
        weight = name.removesuffix(BITMAP)
        if weight not in expected or len(shapes.get(weight, ())) != 1:
            continue
        if shapes[name] == (math.ceil(math.prod(expected[weight]) / 8),):
            shapes[weight] = expected[weight]
            del shapes[name]
    return shapes


class Unpack(ConversionOps):
    """Unpacks weights while transformers loads them; those that are not packed pass.

    Attributes:
        damaged: what was found wrong. transformers would turn an error raised here into a page of its own.
    """

    def __init__(self) -> None:
        self.damaged: list[str] = []

    def __deepcopy__(self, memo: Any) -> "Unpack":
        return self  # transformers copies the converter for every weight; the list is one

    @torch.no_grad()
    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_dict: dict[str, list[Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Return the weight by its name; `source_patterns` are those of `converter`."""
        bitmaps, numbers = (input_dict.get(pattern) for pattern in source_patterns)
        if bitmaps is None or numbers is None:
            return {full_layer_name: (numbers or bitmaps or [])[0]}
        shape = model.get_parameter(full_layer_name).shape
        if numbers[0].is_meta:
            return {full_layer_name: numbers[0].new_empty(shape)}
        try:
            return {full_layer_name: unpack(numbers[0], bitmaps[0], shape)}
        except CheckpointError as error:
            self.damaged.append(f"{full_layer_name} is damaged: {error}.")
            return {full_layer_name: numbers[0].new_zeros(shape)}


def converter() -> WeightConverter:
    """Return what transformers needs to load packed weights."""
    return WeightConverter([rf"weight\{BITMAP}", "weight"], "weight", [Unpack()])


def finish_(model: PreTrainedModel) -> None:
    """Make a model that was loaded from packed weights say nothing of it: it is dense, and saved dense.

    Raises:
        CheckpointError: a weight was damaged.
    """
    used = getattr(model, "_weight_conversions", None) or []
    ours = [op for conversion in used for op in getattr(conversion, "operations", ()) if isinstance(op, Unpack)]
    if damaged := [reason for op in ours for reason in op.damaged]:
        raise CheckpointError(f"{damaged[0]} ({len(damaged)} damaged weights in all.) Get the checkpoint again.")
    if ours:  # saving inverts all conversions that are left here
        others: Any = [c for c in used if not set(ours) & set(getattr(c, "operations", ()))]
        model._weight_conversions = others
    block = model.config.quantization_config
    if block.layout == "stock":
        delattr(model.config, "quantization_config")
    else:
        delattr(block, STORAGE)


def _pack_(state: dict[str, Tensor], name: str) -> bool:
    """Pack one weight of a state dict, if that makes it smaller; return whether it did."""
    weight = state.get(name)
    if weight is None:
        return False
    if weight.is_meta:
        raise UnsupportedModel(
            f"{name} is not in memory (meta device: offloaded, or never loaded), so it cannot be packed. Save with "
            "storage='dense', or load with a device_map that keeps every layer on a CPU or GPU."
        )
    numbers, bitmap = pack(weight)
    if numbers.nbytes + bitmap.nbytes >= weight.nbytes:
        return False
    state |= {name: numbers, name + BITMAP: bitmap}
    return True


@contextmanager
def _said_to_be_packed(config: PreTrainedConfig, layout: str) -> Iterator[None]:
    """Let a config tell of packed weights, for as long as they are written."""
    own = getattr(config, "quantization_config", None)
    config.quantization_config = COMPACT | {"layout": layout} | dict(own or {}) | {STORAGE: "packed"}
    try:
        yield
    finally:
        if own is None:
            delattr(config, "quantization_config")
        else:
            config.quantization_config = own
