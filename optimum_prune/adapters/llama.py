"""Llama, and everything that is shaped like it."""

from dataclasses import replace

from optimum_prune.adapters.base import Adapter, CoupledGroup, Rescaling, Stack

ATTENTION = CoupledGroup(
    unit="kv_group",
    site="self_attn",
    writers=("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"),
    readers=("self_attn.o_proj",),
    counts={"num_key_value_heads": "self_attn.k_proj", "num_attention_heads": "self_attn.q_proj"},
    unit_size="self_attn.head_dim",
    unit_size_key="head_dim",
    keep_global=True,  # LlamaConfig refuses a global head count that does not divide hidden_size
    cached=True,
    biases="attention_bias",
)
MLP = CoupledGroup(
    unit="mlp_channel",
    site="mlp",
    writers=("mlp.gate_proj", "mlp.up_proj"),
    readers=("mlp.down_proj",),
    counts={"intermediate_size": "mlp.gate_proj"},
    width_attributes=("mlp.intermediate_size",),
    biases="mlp_bias",
)
_HEAD = "self_attn.head_dim"
RESCALINGS = (
    Rescaling("input_layernorm", readers=ATTENTION.writers),
    (
        Rescaling("self_attn.k_norm", multiplied="self_attn.q_norm", rotated=True),  # undoes what comes before it
        Rescaling("self_attn.k_proj", multiplied="self_attn.q_proj", head_dim=_HEAD, rotated=True),
    ),
    Rescaling("self_attn.v_proj", readers=ATTENTION.readers, head_dim=_HEAD),
    (
        Rescaling("pre_feedforward_layernorm", readers=MLP.writers),  # Gemma's; its other norm stands behind attention
        Rescaling("post_attention_layernorm", readers=MLP.writers),
    ),
    Rescaling("mlp.up_proj", readers=MLP.readers),
)
STACK = Stack(
    "model.layers", (ATTENTION, MLP), sublayers={"attention": "self_attn", "mlp": "mlp"}, rescalings=RESCALINGS
)
ADAPTER = Adapter("llama", stacks=(STACK,))


def shaped_like_llama(model_type: str, attention: tuple[str, ...] | str = ()) -> Adapter:
    """Declare Llama's blocks for a class whose MLPs have no biases; `attention` says which its attention has."""
    groups = (replace(ATTENTION, biases=attention), replace(MLP, biases=()))
    return Adapter(model_type, stacks=(replace(STACK, groups=groups),))
