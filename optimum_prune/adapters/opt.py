"""OPT: multi-head attention with biases, and an MLP without a gate whose linears sit in the block itself."""

from optimum_prune.adapters.base import Adapter, CoupledGroup, Rescaling, Stack

ATTENTION = CoupledGroup(
    unit="kv_group",
    site="self_attn",
    writers=("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"),
    readers=("self_attn.out_proj",),
    counts={"num_attention_heads": "self_attn.k_proj"},
    unit_size="self_attn.head_dim",
    unit_size_key="head_dim",
    unit_attributes=("self_attn.num_heads",),
    keep_global=True,  # OPTAttention derives its head size from hidden_size and the global head count
    cached=True,
    biases="enable_bias",
)
MLP = CoupledGroup(
    unit="mlp_channel",
    site="fc1",
    writers=("fc1",),
    readers=("fc2",),
    counts={"ffn_dim": "fc1"},
    biases="enable_bias",
)
ATTENTION_RESCALINGS = (
    Rescaling("self_attn.k_proj", multiplied="self_attn.q_proj"),
    Rescaling("self_attn.v_proj", readers=ATTENTION.readers),
)
RESCALINGS = (
    Rescaling("self_attn_layer_norm", readers=ATTENTION.writers, norm_first="do_layer_norm_before"),
    *ATTENTION_RESCALINGS,
    Rescaling("final_layer_norm", readers=MLP.writers, norm_first="do_layer_norm_before"),
    Rescaling("fc1", readers=MLP.readers, relu="activation_fn"),
)
ADAPTER = Adapter("opt", stacks=(Stack("model.decoder.layers", (ATTENTION, MLP), rescalings=RESCALINGS),))
