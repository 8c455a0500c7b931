"""Loading compact checkpoints through transformers: what comes out is an ordinary model, or an error."""

import copy
import json
import re
import shutil
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTQConfig,
    LlamaForCausalLM,
    pipeline,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from optimum_prune.config import PruningConfig
from optimum_prune.configs import METHOD
from optimum_prune.errors import CheckpointError
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.integrations.quantizer import CheckpointConfig, PruningQuantizer, register
from optimum_prune.pipeline import prune
from optimum_prune.sizes import measure
from tests.models import llama, tokens
from tests.outputs import left_padded, load, outputs
from tests.processes import answer
from tests.pruned import unevenly
from tests.words import tokenizer


@pytest.fixture(scope="module")
def compact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compact") / "it"
    save_checkpoint(unevenly(llama()), folder)
    return folder


@pytest.fixture(scope="module")
def expected():
    return logits(unevenly(llama()))


@pytest.fixture
def model(compact):
    return AutoModelForCausalLM.from_pretrained(compact)


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens()).logits


# Registration


def test_registered_once():
    register()
    register()
    assert AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] is CheckpointConfig
    assert AUTO_QUANTIZER_MAPPING[METHOD] is PruningQuantizer


def test_importing_the_package_after_transformers(compact):
    """The other order is that of every other fresh process in these tests."""
    script = """
import json, sys
from transformers import LlamaForCausalLM
assert "transformers.modeling_utils" in sys.modules
import optimum_prune
print(json.dumps(LlamaForCausalLM.from_pretrained(sys.argv[1]).model.layers[1].mlp.up_proj.out_features))
"""
    assert answer(script, compact) == 39


# An ordinary model


def test_nothing_of_a_quantizer_is_left(model):
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model, "quantization_method")
    assert model.is_quantized is False
    assert not getattr(model.config, "_is_quantized", False)
    assert not model.training


def test_config_still_says_that_it_is_compact(model, compact):
    assert model.config.quantization_config.quant_method == METHOD
    stored = json.loads((compact / "config.json").read_text())
    assert model.config.to_dict()["quantization_config"] == stored["quantization_config"]
    assert '"layout": "compact"' in repr(model.config)


def test_given_tensors_are_saved_instead_of_its_own(model, tmp_path):
    """With a quantizer kept, transformers would ignore the dict and write the old weights."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=zeros)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == zeros.keys()
    assert not any(tensor.any() for tensor in stored.values())


def test_copy(model, expected):
    copied = copy.deepcopy(model)
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert torch.equal(logits(copied), expected)
    assert measure(copied) == measure(model)


def test_cast(model):
    assert model.half().dtype == torch.float16
    assert model.to(torch.bfloat16).dtype == torch.bfloat16


def test_other_attention(model, expected):
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    attentions = model(input_ids=tokens(), output_attentions=True).attentions
    assert [attention.shape[1] for attention in attentions] == [8, 6, 4]


def test_trains(model):
    model.train()
    model.gradient_checkpointing_enable()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_vocabulary_grows(model, tmp_path):
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_layer_on_disk(compact, expected, tmp_path):
    names = (
        "model.embed_tokens",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
        "model.layers.0",
        "model.layers.2",
    )
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(compact, device_map=places, offload_folder=tmp_path)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(logits(model), expected)


def test_pruned_once_more(model, tmp_path):
    before = measure(model)
    report = prune(model, PruningConfig(scorer="magnitude", sparsity=0.3, round_to=1))
    assert all(measure(model)[layer] != before[layer] for layer in before)
    assert report.achieved > 0.2
    save_checkpoint(model, tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert measure(again) == measure(model)
    assert torch.equal(logits(again), logits(model))


# Other ways to load it


def test_base_model(compact, expected, model):
    base = AutoModel.from_pretrained(compact)
    assert measure(base) == measure(model)
    with torch.no_grad():
        states = base(input_ids=tokens()).last_hidden_state
        assert torch.equal(model.lm_head(states), expected)


def test_base_model_saved_by_itself(compact, tmp_path):
    base = AutoModel.from_pretrained(compact)
    assert save_checkpoint(base, tmp_path / "base") == "compact"
    again, complaints = load(tmp_path / "base", AutoModel)
    assert complaints == {}
    model, complaints = load(tmp_path / "base")
    assert complaints == {"missing_keys": {"lm_head.weight"}}
    for other in (again, model.model):
        assert all(torch.equal(a, b) for a, b in zip(base.parameters(), other.parameters(), strict=True))


def test_sequence_classification(compact, tmp_path):
    model, complaints = load(compact, AutoModelForSequenceClassification, num_labels=3)
    assert complaints["missing_keys"] == {"score.weight"}
    assert logits(model).shape == (2, 3)
    save_checkpoint(model, tmp_path / "it")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "it")
    assert torch.equal(logits(again), logits(model))


def test_text_generation_pipeline(compact):
    words = tokenizer()
    generator = pipeline("text-generation", model=str(compact), tokenizer=words)
    given, mask = left_padded(llama())
    ids = given["input_ids"]
    prompts = [
        " ".join(words.convert_ids_to_tokens(row[keep].tolist())) for row, keep in zip(ids, mask.bool(), strict=True)
    ]
    found = generator(prompts, batch_size=2, do_sample=False, max_new_tokens=5, return_full_text=False)
    expected = words.batch_decode(outputs(generator.model)["dynamic"][:, :5], skip_special_tokens=True)
    assert [answer[0]["generated_text"].split() for answer in found] == [text.split() for text in expected]


def test_weights_of_the_old_format(compact, expected, tmp_path):
    shutil.copy(compact / "config.json", tmp_path)
    torch.save(load_file(compact / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_lora(compact, model, tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"], init_lora_weights=False)
    tuned = get_peft_model(model, lora)
    tuned.save_pretrained(tmp_path / "adapter")
    attached = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(compact), tmp_path / "adapter")
    assert torch.equal(logits(attached), logits(tuned))

    expected = logits(tuned)
    merged: Any = tuned.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert measure(again) == measure(model)
    assert torch.equal(logits(again), logits(merged))


# Config and weights that do not match


def tampered(compact, folder, config=None, weights=None):
    """Copy the checkpoint and change its config or its tensors."""
    shutil.copytree(compact, folder, dirs_exist_ok=True)
    if config is not None:
        content = json.loads((folder / "config.json").read_text())
        config(content)
        (folder / "config.json").write_text(json.dumps(content))
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_layer_1(**changes):
    return lambda config: config["per_layer_config"]["1"].update(changes)


DOWN = "model.layers.1.mlp.down_proj.weight"
MISMATCHES = {
    "width": (
        in_layer_1(intermediate_size=38),
        f"{DOWN} is [32, 38], but in the checkpoint it is [32, 39] (3 of 29",
    ),
    "heads": (
        in_layer_1(num_attention_heads=4, num_key_value_heads=2),
        "model.layers.1.self_attn.k_proj.weight is [8, 32], but in the checkpoint it is [12, 32] (4 of 29",
    ),
    "no sizes": (
        lambda config: config.pop("per_layer_config"),
        f"{DOWN} is [32, 43], but in the checkpoint it is [32, 39] (14 of 29",
    ),
    "no sizes and no flag": (
        lambda config: [config.pop(key) for key in ("per_layer_config", "allow_global_per_layer_attribute_access")],
        f"{DOWN} is [32, 43], but in the checkpoint it is [32, 39] (14 of 29",
    ),
    "sizes of one layer lost": (
        lambda config: config["per_layer_config"].pop("1"),
        f"{DOWN} is [32, 43], but in the checkpoint it is [32, 39] (7 of 29",
    ),
    "a layer less": (
        lambda config: (config.update(num_hidden_layers=2), config["per_layer_config"].pop("2")),
        "model.layers.2.input_layernorm.weight is absent, but in the checkpoint it is [32] (9 of 20",
    ),
    "a layer more": (
        lambda config: config.update(num_hidden_layers=4),
        "model.layers.3.input_layernorm.weight is [32], but in the checkpoint it is absent (9 of 38",
    ),
    "head size": (
        lambda config: config.update(head_dim=8),
        "model.layers.0.self_attn.k_proj.weight is [32, 32], but in the checkpoint it is [16, 32] (12 of 29",
    ),
    "biases": (
        lambda config: config.update(mlp_bias=True),
        "model.layers.0.mlp.down_proj.bias is [32], but in the checkpoint it is absent (9 of 38",
    ),
    "wider than the widest": (
        in_layer_1(intermediate_size=60),
        "model.layers.1.mlp {'intermediate_size': 60}, but",
    ),
    "heads without their group": (
        in_layer_1(num_attention_heads=5),
        "model.layers.1.self_attn {'num_key_value_heads': 3, 'num_attention_heads': 5}, but",
    ),
    "no heads": (
        in_layer_1(num_attention_heads=0, num_key_value_heads=0),
        "model.layers.1.self_attn {'num_key_value_heads': 0, 'num_attention_heads': 0}, but",
    ),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
def test_config_of_other_weights(mismatch, options, compact, tmp_path):
    """Stock transformers would initialise the layers anew where it is told to ignore sizes."""
    change, message = MISMATCHES[mismatch]
    folder = tampered(compact, tmp_path / "it", config=change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(num_hidden_layers=2),  # sizes of a layer that is not there
        lambda config: config.pop("allow_global_per_layer_attribute_access"),
        in_layer_1(intermediate_size="a"),
        lambda config: config.pop("quantization_config"),
        lambda config: config.update(vocab_size=95),
    ],
)
def test_what_transformers_itself_refuses(change, compact, tmp_path):
    with pytest.raises((ValueError, RuntimeError, AttributeError, StrictDataclassFieldValidationError)):
        AutoModelForCausalLM.from_pretrained(tampered(compact, tmp_path / "it", config=change))


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification])
def test_lost_tensor(auto, compact, tmp_path):
    folder = tampered(compact, tmp_path / "it", weights=lambda tensors: tensors.pop(DOWN))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight is \[32, 39\], but .* absent \(1 of"):
        auto.from_pretrained(folder)


def test_swapped_shard(tmp_path):
    save_checkpoint(unevenly(llama()), tmp_path / "it", max_shard_size="6KB")
    shards = sorted((tmp_path / "it").glob("model-*.safetensors"))
    (lost,) = load_file(shards[3])
    shutil.copy(shards[0], shards[3])
    with pytest.raises(CheckpointError, match=rf"{re.escape(lost)} is .*, but in the checkpoint it is absent"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "it")


def test_shard_of_another_model(tmp_path):
    save_checkpoint(unevenly(llama()), tmp_path / "it", max_shard_size="20KB")
    save_checkpoint(unevenly(llama(intermediate_size=47)), tmp_path / "other", max_shard_size="20KB")
    names = [{path.name for path in (tmp_path / name).glob("model-*")} for name in ("it", "other")]
    shard = max(names[0] & names[1])
    shutil.copy(tmp_path / "other" / shard, tmp_path / "it" / shard)
    with pytest.raises(CheckpointError, match=r"model\.layers\.\d\.\S+ is .*, but in the checkpoint it is "):
        AutoModelForCausalLM.from_pretrained(tmp_path / "it")


# What cannot be asked for


@pytest.mark.parametrize(
    "config",
    [
        GPTQConfig(bits=4),
        PruningConfig(sparsity=0.2),
        {"quant_method": METHOD, "sparsity": 0.2},
    ],
    ids=lambda config: type(config).__name__,
)
def test_another_config_for_a_compact_checkpoint(config, compact):
    message = f"quantized with CheckpointConfig but you are passing a {type(config).__name__} config"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(compact, quantization_config=config)


def test_block_of_a_newer_version(compact, expected, tmp_path):
    """It is loaded with a warning, and what this version does not know survives saving."""
    folder = tampered(compact, tmp_path / "it", config=lambda config: config["quantization_config"].update(zip=1))
    with pytest.warns(UserWarning, match=r"Unknown keys \['zip'\].*newer optimum_prune"):
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").quantization_config["zip"] == 1


def test_loads_on_the_meta_device(compact):
    model = LlamaForCausalLM.from_pretrained(compact, device_map="meta")
    assert measure(model) == measure(unevenly(llama()))
    assert all(parameter.is_meta for parameter in model.parameters())
