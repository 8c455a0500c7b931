"""The declaration language for architectures: stacks of blocks, and in a block the linears that share units.

One trick keeps it declarative: a coupled axis is cut into `num_units` equal contiguous blocks. With 9 query and 3 KV
heads of 64, the rows of `q_proj` fall into 3 blocks of 192 and those of `k_proj` into 3 blocks of 64, so MLP channels,
multi-head, grouped-query and multi-query attention need no arithmetic of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CoupledGroup:
    """Linears of one block that share an index space of units. All names are relative to the block.

    Attributes:
        unit: kind of unit, `"kv_group"` or `"mlp_channel"`.
        site: submodule that the group lives in; names the group for people (`model.layers.3.mlp`).
        writers: linears whose output rows (and bias) carry the units. The rows of the first one are counted.
        readers: linears whose input columns carry the units.
        counts: config attribute -> linear whose rows it counts (in steps of `unit_size`). The first attribute counts
            the units themselves.
        unit_size: module attribute with the rows that one unit has in the first writer; None means 1.
        unit_size_key: config attribute that states `unit_size`; written wherever head counts are changed, because a
            class that derives it from other counts would otherwise derive it wrongly.
        width_attributes: module attributes that repeat the width of the first writer and must follow it.
        unit_attributes: module attributes that repeat the number of units and must follow it.
        keep_global: leave the config's global counts at the parent's when layers differ (the class's constructor
            needs them to divide something), instead of writing the widest layer's.
    """

    unit: str
    site: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    counts: Mapping[str, str]
    unit_size: str | None = None
    unit_size_key: str | None = None
    width_attributes: tuple[str, ...] = ()
    unit_attributes: tuple[str, ...] = ()
    keep_global: bool = False


@dataclass(frozen=True)
class Stack:
    """A list of blocks with the same coupled groups, e.g. `model.layers`."""

    path: str
    groups: tuple[CoupledGroup, ...]


@dataclass(frozen=True)
class Adapter:
    """Everything the project knows about one `model_type`."""

    model_type: str
    stacks: tuple[Stack, ...] = field(default_factory=tuple)
