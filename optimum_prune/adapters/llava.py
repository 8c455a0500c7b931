"""LLaVA: a language model shaped like Llama, and a CLIP vision tower as a stack that is pruned only when selected."""

from dataclasses import replace

from optimum_prune.adapters import llama
from optimum_prune.adapters.base import Adapter, CoupledGroup, Stack

VISION_ATTENTION = CoupledGroup(
    unit="kv_group",
    site="self_attn",
    writers=("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"),
    readers=("self_attn.out_proj",),
    counts={"num_attention_heads": "self_attn.k_proj"},
    unit_size="self_attn.head_dim",
    unit_attributes=("self_attn.num_heads",),
    keep_global=True,  # CLIPAttention derives its head size from hidden_size and the global head count
)
VISION_MLP = CoupledGroup(
    unit="mlp_channel",
    site="mlp",
    writers=("mlp.fc1",),
    readers=("mlp.fc2",),
    counts={"intermediate_size": "mlp.fc1"},
    keep_global=True,  # a SigLIP tower has a pooling head of that width too
)
VISION = Stack(
    "model.vision_tower.encoder.layers",
    (VISION_ATTENTION, VISION_MLP),
    name="vision",
    default=False,
    config="vision_config",
    layer_sizes="quantization_config",
    depth=None,  # LLaVA reads the output of a certain block of the tower, counted from either end
    mask=None,
)
LANGUAGE = replace(llama.STACK, path="model.language_model.layers", name="language", config="text_config")
ADAPTER = Adapter("llava", stacks=(VISION, LANGUAGE), auto_class="AutoModelForImageTextToText")
