"""A Llama that its own config refuses, saved as the Mistral that computes the same."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, LlamaForSequenceClassification

from optimum_prune import Pruner, PruningConfig
from optimum_prune.binding import bind
from optimum_prune.class_switch import switched, switched_name
from optimum_prune.errors import InvalidConfig
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.planning.layout import skeleton_of
from optimum_prune.planning.planner import make_plan
from optimum_prune.sizes import describe_
from optimum_prune.surgery import slice_
from tests.models import inputs, llama, llava, mistral, qwen2, tokens
from tests.outputs import outputs
from tests.processes import answer
from tests.pruned import holes, unevenly
from tests.shallow import skip
from tests.words import tokenizer

RELOAD = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tests.models import inputs
from tests.outputs import load, outputs

found = {}
for folder in map(Path, sys.argv[1:]):
    model, complaints = load(folder)
    images = hasattr(model.config, "vision_config")
    with torch.no_grad():
        result = {"logits": model(**inputs(model)).logits} if images else outputs(model)
    save_file(result, folder.with_suffix(".safetensors"))
    text = model.config.text_config if images else model.config
    found[folder.name] = [sorted(complaints), type(model).__name__, text.model_type]
assert "optimum_prune" not in sys.modules
print(json.dumps(found))
"""


def three_groups_each(model):
    """Keep 6 of 8 heads in every layer, which do not divide a hidden size of 32."""
    for group in bind(model):
        if group.unit == "kv_group" and group.declared.default:
            slice_(group, [0, 2, 3])
    describe_(model)
    return model


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, Any] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "wide-heads": lambda: llama(head_dim=10, hidden_size=40),
    "scaled-rope": lambda: llama(rope_parameters=LLAMA3),
    "llava": llava,
}


def logits(model):
    with torch.no_grad():
        return model(**inputs(model)).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save all, load all in a process without the package."""
    root = tmp_path_factory.mktemp("switched")
    models = {name: three_groups_each(build()) for name, build in MODELS.items()}
    for name, model in models.items():
        config = model.config.to_dict()
        assert save_checkpoint(model, root / name, class_switch=True) == "stock"
        assert model.config.to_dict() == config
    return root, models, answer(RELOAD, *(root / name for name in models))


@pytest.mark.parametrize("name", MODELS)
def test_plain_transformers_computes_the_same(saved, name):
    root, models, found = saved
    switched_class = "LlavaForConditionalGeneration" if name == "llava" else "MistralForCausalLM"
    assert found[name] == [[], switched_class, "mistral"]
    result = load_file(root / f"{name}.safetensors")
    expected = {"logits": logits(models[name])} if name == "llava" else outputs(models[name])
    assert [key for key in result if not torch.equal(result[key], expected[key])] == []


@pytest.mark.parametrize("name", MODELS)
def test_config_is_plain(saved, name):
    config = json.loads((saved[0] / name / "config.json").read_text())
    text = config.get("text_config", config)
    assert (text["num_attention_heads"], text["num_key_value_heads"], text["sliding_window"]) == (6, 3, None)
    assert not {"quantization_config", "per_layer_config", "attention_bias", "mlp_bias"} & text.keys()
    assert "quantization_config" not in config


def test_window_is_as_long_as_the_context(tmp_path):
    """Mistral's own default is 4096 tokens."""
    model = three_groups_each(llama(max_position_embeddings=5000, num_hidden_layers=1))
    ids = tokens(1, 4200)
    save_checkpoint(model, tmp_path / "it", class_switch=True)
    loaded = Pruner.from_pretrained(tmp_path / "it").model
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits[:, -5:], model(ids).logits[:, -5:])


def test_other_heads_than_those_of_language_models(tmp_path):
    torch.manual_seed(0)
    model: Any = three_groups_each(LlamaForSequenceClassification(llama().config).eval())
    assert save_checkpoint(model, tmp_path / "it", class_switch=True) == "stock"
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "it")
    assert type(loaded).__name__ == "MistralForSequenceClassification"
    assert torch.equal(logits(loaded), logits(model))


def test_packed_too(tmp_path):
    model = holes(three_groups_each(llama()), sparsity=0.9)
    assert save_checkpoint(model, tmp_path / "it", class_switch=True, storage="packed") == "stock"
    loaded = Pruner.from_pretrained(tmp_path / "it").model
    assert type(loaded).__name__ == "MistralForCausalLM"
    assert torch.equal(logits(loaded), logits(model))


def test_never_without_being_asked(tmp_path):
    model = three_groups_each(llama())
    assert save_checkpoint(model, tmp_path / "it") == "compact"
    assert json.loads((tmp_path / "it" / "config.json").read_text())["model_type"] == "llama"
    with pytest.raises(InvalidConfig, match=r"class_switch=True \(it is saved as MistralForCausalLM, which computes"):
        save_checkpoint(model, tmp_path / "other", layout="stock")


def test_only_where_it_is_needed(tmp_path):
    for name, model in {"dense": llama(), "mistral": three_groups_each(mistral())}.items():
        assert save_checkpoint(model, tmp_path / name, class_switch=True) == "stock"
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["model_type"] == model.config.model_type
    options = {"layout": "compact", "class_switch": True}
    assert save_checkpoint(three_groups_each(llama()), tmp_path / "it", **options) == "compact"


REFUSED = {
    "Mistral has no attention_bias": lambda: three_groups_each(llama(attention_bias=True)),
    "Mistral has no mlp_bias": lambda: three_groups_each(llama(mlp_bias=True)),
    "of one size of layers has no model.layers.1.*of that shape": lambda: unevenly(llama()),
    "would have model.layers.1.self_attn.*which is missing": lambda: skip(llama(), "attention", 1),
    "a Qwen2ForCausalLM is not shaped like a Llama": lambda: unevenly(qwen2()),
    "transformers has no Mistral like MyLlama": lambda: three_groups_each(MyLlama(llama().config)),
}


class MyLlama(LlamaForCausalLM):
    pass


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_switched_stays_and_says_so(reason, tmp_path, caplog):
    model = REFUSED[reason]()
    assert switched_name(model) is None
    assert save_checkpoint(model, tmp_path / "it", class_switch=True, verify=False) == "compact"
    (warning,) = [record.getMessage() for record in caplog.records if "class_switch" in record.getMessage()]
    assert warning.startswith("class_switch=True changes nothing: ")
    with pytest.raises(InvalidConfig, match=reason):
        switched(model)
    with pytest.raises(InvalidConfig) as refused:
        save_checkpoint(model, tmp_path / "other", layout="stock")
    assert "class_switch" not in str(refused.value)


def test_a_skeleton_will_do():
    for build in (llama, llava):
        model = three_groups_each(build())
        assert {key: tensor.shape for key, tensor in switched(skeleton_of(model)).state_dict().items()} == {
            key: tensor.shape for key, tensor in model.state_dict().items()
        }


# The plan, and the whole way


UNIFORM = PruningConfig(
    scorer="magnitude", sparsity=0.25, allocation="uniform", units=["kv_group"], compensation="none"
)


def test_plan_offers_it():
    plan = make_plan(llama(), UNIFORM)
    assert (plan.layout.layout, plan.layout.class_switch) == ("compact", "MistralForCausalLM")
    assert "layout with class_switch: stock, as MistralForCausalLM, which computes the same" in str(plan)
    plan.check_layout("stock", class_switch=True)
    with pytest.raises(InvalidConfig, match=r"Use class_switch=True \(it is saved as MistralForCausalLM"):
        plan.check_layout("stock")
    plan = make_plan(llama(attention_bias=True), UNIFORM)
    assert plan.layout.class_switch is None and "class_switch" not in str(plan)
    with pytest.raises(InvalidConfig):
        plan.check_layout("stock", class_switch=True)


def test_pruner_switches_and_the_card_names_the_class_that_loads(tmp_path):
    model: Any = LlamaForSequenceClassification(llama().config).eval()
    pruner = Pruner(model, tokenizer())
    pruner.prune(UNIFORM)
    assert pruner.save_pretrained(tmp_path / "it", "stock", class_switch=True) == "stock"
    assert type(pruner.model) is LlamaForSequenceClassification
    assert "import MistralForSequenceClassification, AutoTokenizer" in (tmp_path / "it" / "README.md").read_text()
    assert (tmp_path / "it" / "pruning_report.json").exists()
