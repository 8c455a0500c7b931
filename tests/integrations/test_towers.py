"""LLaVA with another tower than CLIP."""
# pyright: reportArgumentType=false

import pytest
import torch
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from optimum_prune import PruningConfig
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.pipeline import prune
from tests.models import _BASE, inputs


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_siglip_tower_loads_again(tmp_path, allocation):
    torch.manual_seed(0)
    vision = SiglipVisionConfig(
        hidden_size=24, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=8
    )
    text = LlamaConfig(**_BASE)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=95, vision_feature_select_strategy="full"
    )
    model = LlavaForConditionalGeneration(config).eval()
    prune(model, PruningConfig(scorer="magnitude", sparsity=0.3, round_to=1, stacks=["vision"], allocation=allocation))
    save_checkpoint(model, tmp_path / "pruned")
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path / "pruned")
    given = inputs(model)
    with torch.no_grad():
        assert torch.equal(again(**given).logits, model(**given).logits)
