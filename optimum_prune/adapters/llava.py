"""LLaVA: a language model shaped like Llama, and a vision tower as a stack that is pruned only when selected."""

from dataclasses import replace

from optimum_prune.adapters import llama, opt
from optimum_prune.adapters.base import Adapter, CoupledGroup, Rescaling, Stack

# CLIPAttention derives its head size as OPTAttention does, but no config key states it, and nothing is cached.
VISION_ATTENTION = replace(
    opt.ATTENTION, unit_size_key=None, cached=False, biases=opt.ATTENTION.writers + opt.ATTENTION.readers
)
VISION_MLP = CoupledGroup(
    unit="mlp_channel",
    site="mlp",
    writers=("mlp.fc1",),
    readers=("mlp.fc2",),
    counts={"intermediate_size": "mlp.fc1"},
    keep_global=True,  # a SigLIP tower has a pooling head of that width too
    biases=("mlp.fc1", "mlp.fc2"),
)
VISION_RESCALINGS = (
    Rescaling("layer_norm1", readers=VISION_ATTENTION.writers),
    *opt.ATTENTION_RESCALINGS,
    Rescaling("layer_norm2", readers=VISION_MLP.writers),
    Rescaling("mlp.fc1", readers=VISION_MLP.readers, relu="mlp.activation_fn"),
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
    rescalings=VISION_RESCALINGS,
)
LANGUAGE = replace(llama.STACK, path="model.language_model.layers", name="language", config="text_config", by_type=True)
ADAPTER = Adapter("llava", stacks=(VISION, LANGUAGE), auto_class="AutoModelForImageTextToText")
