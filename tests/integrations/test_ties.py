"""A config that ties the head to the embedding, and a checkpoint that holds two different matrices."""
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from optimum_prune import Pruner, PruningConfig, prune
from optimum_prune.integrations.loading import load_skeleton
from tests.models import gemma2, inputs, llama, llava, opt, qwen2, t5
from tests.outputs import load

COMPACT = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)
ZEROS = PruningConfig(scorer="magnitude", sparsity=0.6, pattern="unstructured")
BUILDS = {
    "llama": lambda: llama(tie_word_embeddings=True),
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "opt": opt,
    "gemma2": gemma2,
    "t5": t5,
    "t5 1.1": lambda: t5(tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
    "llava": lambda: llava(tie_word_embeddings=True),
}


def two_matrices(model, folder):
    """Save a model, and give its checkpoint a head of its own."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "language_model.lm_head.weight" if "vision" in str(model.config) else "lm_head.weight"
    tensors[name] = torch.full_like(model.get_input_embeddings().weight, 0.25).normal_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def logits(model):
    with torch.no_grad():
        return model(**inputs(model)).logits


@pytest.mark.parametrize("build", BUILDS)
def test_both_are_kept(build, tmp_path):
    stored = two_matrices(BUILDS[build](), tmp_path / "dense")
    skeleton, pruner = load_skeleton(tmp_path / "dense"), Pruner.from_pretrained(tmp_path / "dense")
    assert skeleton.num_parameters() == pruner.model.num_parameters() == stored
    assert skeleton.config.tie_word_embeddings == pruner.model.config.tie_word_embeddings == build.startswith("t5")
    pruner.prune(COMPACT)
    for layout in ("compact", "padded"):
        assert pruner.save_pretrained(tmp_path / layout, layout=layout) == layout
        again, complaints = load(tmp_path / layout)
        assert complaints == {}
        torch.testing.assert_close(logits(again), logits(pruner.model), atol=1e-4, rtol=1e-4)
        head, table = again.get_output_embeddings().weight, again.get_input_embeddings().weight
        assert not torch.equal(head, table)


@pytest.mark.parametrize("storage", ["dense", "packed"])
@pytest.mark.parametrize("build", ["llama", "t5"])
def test_stock(build, storage, tmp_path):
    two_matrices(BUILDS[build](), tmp_path / "dense")
    pruner = Pruner.from_pretrained(tmp_path / "dense")
    pruner.prune(ZEROS)
    assert pruner.save_pretrained(tmp_path / "it", storage=storage) == "stock"
    assert torch.equal(logits(load(tmp_path / "it")[0]), logits(pruner.model))


@pytest.mark.parametrize("config", [COMPACT, ZEROS])
def test_pruned_while_loading_and_saved_by_transformers(config, tmp_path):
    two_matrices(BUILDS["llama"](), tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "it")
    assert json.loads((tmp_path / "it" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(load(tmp_path / "it")[0]), logits(model))


@pytest.mark.parametrize("build", ["llama", "t5"])
def test_a_live_model_whose_tie_was_broken(build, tmp_path):
    """As PEFT leaves it that merged `modules_to_save`."""
    model = BUILDS[build]()
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    report = prune(model, COMPACT)
    assert report.parameters_after == model.num_parameters()
    Pruner(model).save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)[0]), logits(model))


def test_tied_weights_stay_tied(tmp_path):
    BUILDS["llama"]().save_pretrained(tmp_path)
    for model in (load_skeleton(tmp_path), Pruner.from_pretrained(tmp_path).model):
        assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
