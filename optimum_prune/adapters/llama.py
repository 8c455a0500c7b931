"""Llama, and everything that is shaped like it."""

from optimum_prune.adapters.base import Adapter, CoupledGroup, Stack

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
)
MLP = CoupledGroup(
    unit="mlp_channel",
    site="mlp",
    writers=("mlp.gate_proj", "mlp.up_proj"),
    readers=("mlp.down_proj",),
    counts={"intermediate_size": "mlp.gate_proj"},
    width_attributes=("mlp.intermediate_size",),
)
STACK = Stack("model.layers", (ATTENTION, MLP), sublayers={"attention": "self_attn", "mlp": "mlp"})
ADAPTER = Adapter("llama", stacks=(STACK,))
