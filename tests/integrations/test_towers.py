"""LLaVA with other towers than CLIP, and around other language models than Llama."""
# pyright: reportArgumentType=false

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from optimum_prune import Pruner, PruningConfig
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.pipeline import prune
from optimum_prune.sizes import why_not_stock
from tests.models import gemma3, inputs, llava, mistral, qwen2, qwen3

INSIDE = {"qwen2": qwen2, "qwen3": qwen3, "mistral": mistral, "gemma3": gemma3}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(model)).logits


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_siglip_tower_loads_again(tmp_path, allocation):
    model = llava(siglip=True)
    prune(model, PruningConfig(scorer="magnitude", sparsity=0.3, round_to=1, stacks=["vision"], allocation=allocation))
    save_checkpoint(model, tmp_path / "pruned")
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path / "pruned")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("siglip", [False, True], ids=["clip", "siglip"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("inside", INSIDE)
def test_a_plain_config_says_what_is_inside(inside, tied, siglip, tmp_path):
    """The language model has the biases and norms of its own class, so an equal cut is stock, as around a Llama."""
    text = INSIDE[inside](tie_word_embeddings=tied).config
    model = llava(text=text, siglip=siglip, tie_word_embeddings=tied)
    assert why_not_stock(model) is None
    config = PruningConfig(scorer="magnitude", sparsity=0.5, allocation="uniform")
    plan = Pruner(model).plan(config)
    assert plan.layout.layout == "stock"
    prune(model, config)
    assert save_checkpoint(model, tmp_path / "pruned", layout="stock") == "stock"
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path / "pruned")
    assert torch.equal(logits(again), logits(model))
