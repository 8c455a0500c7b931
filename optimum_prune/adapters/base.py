"""The declaration language for architectures: stacks of blocks, and in a block the linears that share units.

One trick keeps it declarative: a coupled axis is cut into `num_units` equal contiguous blocks. With 9 query and 3 KV
heads of 64, the rows of `q_proj` fall into 3 blocks of 192 and those of `k_proj` into 3 blocks of 64, so MLP channels,
multi-head, grouped-query and multi-query attention need no arithmetic of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class CoupledGroup:
    """Linears of one block that share an index space of units. All names are relative to the block.

    Attributes:
        unit: kind of unit, `"kv_group"` or `"mlp_channel"`.
        site: submodule that the group lives in; names the group for people (`model.layers.3.mlp`).
        writers: linears whose output rows (and bias) carry the units. The rows of the first one are counted; of
            attention, the first two are keys and values.
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
        tables: embeddings whose columns belong to units; a block may lack them.
        tied: `"units"` where the same units have to go in every layer of the stack, `"counts"` where only their
            number has to be the same.
        cached: generation keeps the group's keys and values, of every token.
        biases: linears that the class builds with a bias; or the config attribute that says whether all linears of the
            group have one (other groups of the stack may go by the same).
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
    tables: tuple[str, ...] = ()
    tied: Literal["units", "counts"] | None = None
    cached: bool = False
    biases: tuple[str, ...] | str = ()


@dataclass(frozen=True)
class Rescaling:
    """A place in a block where a scale per channel cancels exactly. All names are relative to the block.

    What comes out of `divided` is divided by the scale. That is undone in the columns of `readers`, or in what comes
    out of `multiplied`. Nothing else reads either, and nothing lies in between that a positive factor does not pass.

    Attributes:
        divided: a linear (its rows and bias) or a norm (its weight and bias).
        readers: all linears that read it.
        multiplied: a linear or norm whose products with `divided` are all that is read: queries, of keys.
        head_dim: module attribute with the channels of a head, where more query heads than KV heads share scales.
        rotated: RoPE turns channels i and i + head_dim / 2 of a head into each other, so they share a scale.
        relu: activation in between, which has to be a ReLU.
        norm_first: attribute of the block that is true where its norms stand before the sub-layers. Behind them, what
            comes out of a norm is the residual stream too.
    """

    divided: str
    readers: tuple[str, ...] = ()
    multiplied: str | None = None
    head_dim: str | None = None
    rotated: bool = False
    relu: str | None = None
    norm_first: str | None = None


@dataclass(frozen=True)
class Stack:
    """A list of blocks with the same coupled groups, e.g. `model.layers`.

    Attributes:
        path: of the list of blocks, in the model with its head.
        groups: coupled groups of a block. Of a tuple of alternatives, the one whose linears the block has.
        name: by which a config selects the stack.
        default: whether it is pruned where a config selects none.
        config: attribute of the model's config that holds the config of this stack; `""` for the model's own.
        layer_sizes: where sizes go that differ from layer to layer: transformers' `per_layer_config`, or the
            checkpoint's `quantization_config` where that does not fit (two stacks of one config).
        depth: config attribute that counts the blocks; None where blocks cannot be dropped.
        first: attributes of the first block alone, by module (`""` is the block): they move when it is dropped.
        sublayers: `"attention"` and `"mlp"` -> submodule that can be skipped: where its output is zero, nothing is
            added to the residual stream.
        mask: input of the model that tells the stack's padding, or None where there is no padding.
        rescalings: of a block. Of a tuple of alternatives, the first whose modules the block has. They say what feeds
            what, not only what is where: declare them anew for blocks that compute with the same modules otherwise.
        by_type: the blocks are those of the model type that `config` names. Where an adapter of that type declares one
            stack, its groups, sub-layers and rescalings stand in for those declared here.
    """

    path: str
    groups: tuple[CoupledGroup | tuple[CoupledGroup, ...], ...]
    name: str = "decoder"
    default: bool = True
    config: str = ""
    layer_sizes: Literal["per_layer_config", "quantization_config"] = "per_layer_config"
    depth: str | None = "num_hidden_layers"
    first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sublayers: Mapping[str, str] = field(default_factory=dict)
    mask: str | None = "attention_mask"
    rescalings: tuple[Rescaling | tuple[Rescaling, ...], ...] = ()
    by_type: bool = False


@dataclass(frozen=True)
class Adapter:
    """Everything the project knows about one `model_type`.

    Attributes:
        model_type: as in the config; the file is named like it.
        stacks: in the order in which data flows through them.
        auto_class: of transformers, which loads the model with its language-model head.
    """

    model_type: str
    stacks: tuple[Stack, ...]
    auto_class: str = "AutoModelForCausalLM"
