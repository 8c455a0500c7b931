"""T5, v1.0 and gated (v1.1, Flan): an encoder and a decoder of their own widths, and three kinds of attention.

The position bias of a stack is a table with a column per head in its first block, and is added in every block: so all
blocks of a stack keep the same heads of self-attention. Cross-attention has no such bias, and each block keeps its own.
"""

from dataclasses import replace

from optimum_prune.adapters.base import Adapter, CoupledGroup, Rescaling, Stack


def _attention(site: str) -> CoupledGroup:
    return CoupledGroup(
        unit="kv_group",
        site=site,
        writers=(f"{site}.k", f"{site}.v", f"{site}.q"),
        readers=(f"{site}.o",),
        counts={"num_heads": f"{site}.k"},
        unit_size=f"{site}.key_value_proj_dim",
        width_attributes=(f"{site}.inner_dim",),
        unit_attributes=(f"{site}.n_heads",),
        tied="counts",
        cached=True,
    )


def _mlp(site: str, *writers: str) -> CoupledGroup:
    return CoupledGroup(
        unit="mlp_channel",
        site=site,
        writers=tuple(f"{site}.{writer}" for writer in writers),
        readers=(f"{site}.wo",),
        counts={"d_ff": f"{site}.{writers[0]}"},
    )


_SELF = "layer.0.SelfAttention"
SELF_ATTENTION = replace(_attention(_SELF), tied="units", tables=(f"{_SELF}.relative_attention_bias",))
CROSS_ATTENTION = _attention("layer.1.EncDecAttention")
FIRST = {_SELF: ("relative_attention_bias", "has_relative_attention_bias")}


def _feed_forward(site: str) -> tuple[CoupledGroup, CoupledGroup]:
    return _mlp(site, "wi_0", "wi_1"), _mlp(site, "wi")


def _attention_rescalings(attention: CoupledGroup) -> tuple[Rescaling, ...]:
    keys, values, queries = attention.writers
    return (
        Rescaling(keys, multiplied=queries),
        Rescaling(values, readers=attention.readers),
    )


def _rescalings(site: str) -> tuple[Rescaling | tuple[Rescaling, ...], ...]:
    """Declare those of self-attention and of the feed-forward at `site`."""
    norm, (gated, plain) = f"{site.rpartition('.')[0]}.layer_norm", _feed_forward(site)
    return (
        Rescaling("layer.0.layer_norm", readers=SELF_ATTENTION.writers),
        *_attention_rescalings(SELF_ATTENTION),
        tuple(Rescaling(norm, readers=mlp.writers) for mlp in (gated, plain)),
        (
            Rescaling(f"{site}.wi_1", readers=gated.readers),
            Rescaling(f"{site}.wi", readers=plain.readers, relu=f"{site}.act"),
        ),
    )


# The keys and values of cross-attention read the encoder's last norm, in every block: a scale of it is no block's own.
CROSS_RESCALINGS = (
    Rescaling("layer.1.layer_norm", readers=(f"{CROSS_ATTENTION.site}.q",)),
    *_attention_rescalings(CROSS_ATTENTION),
)
ENCODER = Stack(
    "encoder.block",
    (replace(SELF_ATTENTION, cached=False), _feed_forward("layer.1.DenseReluDense")),
    name="encoder",
    layer_sizes="quantization_config",
    depth="num_layers",
    first=FIRST,
    rescalings=_rescalings("layer.1.DenseReluDense"),
)
DECODER = Stack(
    "decoder.block",
    (SELF_ATTENTION, CROSS_ATTENTION, _feed_forward("layer.2.DenseReluDense")),
    name="decoder",
    layer_sizes="quantization_config",
    depth="num_decoder_layers",
    first=FIRST,
    mask="decoder_attention_mask",
    rescalings=_rescalings("layer.2.DenseReluDense") + CROSS_RESCALINGS,
)
ADAPTER = Adapter("t5", stacks=(ENCODER, DECODER), auto_class="AutoModelForSeq2SeqLM")
