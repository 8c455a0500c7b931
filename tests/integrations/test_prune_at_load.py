"""Pruning while loading: the same model as when it is pruned afterwards, plain in every other way."""

import copy
import json
import logging
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    pipeline,
)

from optimum_prune import CalibrationConfig, InductionConfig, Pruner, PruningConfig, PruningReport
from optimum_prune.configs import METHOD
from optimum_prune.errors import (
    CalibrationError,
    CheckpointError,
    InvalidConfig,
    UnsupportedArchitecture,
    UnsupportedModel,
)
from optimum_prune.integrations import at_load
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.pipeline import prune
from tests.calibration.conftest import picture, processor, t5_tokenizer  # noqa: F401 - fixtures
from tests.models import VARIANTS, llama, llava, source, t5, tokens
from tests.outputs import load, outputs
from tests.pruned import uniformly
from tests.words import tokenizer

TEXTS = [f"w{i} w{i + 1} w{i + 2} w{2 * i} w{3 * i} w5 w{i + 9}" for i in range(3, 20)]
KL = CalibrationConfig(TEXTS * 64, num_samples=2, seq_len=32, selection="kl", candidates=2)
MASKS = {"pattern": "unstructured", "scorer": "wanda", "sparsity": 0.5}


def structured(data, **changes) -> PruningConfig:
    calibration = CalibrationConfig(data, num_samples=4, seq_len=12)
    given = {"scorer": "taylor", "sparsity": 0.4, "round_to": 1, "calibration": calibration}
    return PruningConfig(**given | changes)


def on_texts(**changes) -> PruningConfig:
    return structured(TEXTS, **changes)


def afterwards(folder, config, **options):
    model, _ = load(folder, **options)
    companions = Pruner.from_pretrained(folder)
    prune(model, config, companions.tokenizer, companions.processor)
    return model


def report(model: Any) -> PruningReport:
    return model.pruning_report


def assert_equal(model, other):
    assert model.config.to_dict() == other.config.to_dict()
    found, expected = model.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# The same as pruning afterwards


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant, tmp_path):
    model = VARIANTS[variant]()
    model.save_pretrained(tmp_path)
    units = ["mlp_channel"] if variant == "llama-mqa" else None
    config = structured(source(model), units=units)
    found, complaints = load(tmp_path, quantization_config=config)
    assert complaints == {}
    expected, _ = load(tmp_path)
    prune(expected, config)
    assert found.num_parameters() < model.num_parameters()
    assert_equal(found, expected)


PATTERNS = {
    "layers": {"pattern": "layers", "scorer": "block_influence", "sparsity": 0.34},
    "sub-layers": {"pattern": "layers", "scorer": "random", "sparsity": 0.34, "units": ["mlp"], "seed": 3},
    "unstructured": MASKS,
    "2:4": {"pattern": "2:4", "scorer": "sparsegpt", "sparsity": None},
    "induced": {**MASKS, "induction": InductionConfig(epochs=1)},
    "ntk, selected": {"scorer": "ntk", "calibration": KL},
    "self": {"scorer": "wanda", "calibration": CalibrationConfig("self", num_samples=2, seq_len=8)},
    "no data": {"scorer": "random", "seed": 5},
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern(pattern, dense):
    fields = PATTERNS[pattern]
    if fields.get("pattern", "structured") != "structured":
        fields = {"round_to": 8, **fields}
    config = on_texts(**fields)
    found = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    assert report(found).achieved > 0.2
    assert_equal(found, afterwards(dense, config))


def test_as_a_dict(dense):
    given = {"quant_method": METHOD, **MASKS, "calibration": {"source": TEXTS, "seq_len": 12}}
    found = AutoModelForCausalLM.from_pretrained(dense, quantization_config=given)
    fields = {key: value for key, value in given.items() if key != "quant_method"}
    assert_equal(found, afterwards(dense, PruningConfig.from_dict(fields)))
    assert given.keys() == {"quant_method", *fields}


def test_recipe_as_a_dict(dense):
    """What `to_dict` returns, its version included."""
    config = on_texts(scorer="magnitude")
    given = config.to_dict() | {"quant_method": METHOD, "calibration": {"source": "self"}}
    found = AutoModelForCausalLM.from_pretrained(dense, quantization_config=given)
    assert_equal(found, afterwards(dense, on_texts(scorer="magnitude", calibration=CalibrationConfig())))


def test_dict_of_a_newer_version(dense):
    given = {"quant_method": METHOD, "version": 2, "sparsity": 0.3, "scorer": "magnitude", "zip": 1}
    with pytest.warns(UserWarning, match="written by a newer version .*'zip'"):
        found = AutoModelForCausalLM.from_pretrained(dense, quantization_config=given)
    assert report(found).achieved > 0.1


@pytest.mark.parametrize(
    "options",
    [{"device_map": "auto"}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}, {"dtype": "auto"}],
    ids=str,
)
def test_with_other_options(options, dense):
    config = on_texts()
    found = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config, **options)
    assert found.dtype == options.get("dtype", torch.float32) or options["dtype"] == "auto"
    assert_equal(found, afterwards(dense, config, **options))


def test_pipeline(dense):
    generator = pipeline("text-generation", model=str(dense), model_kwargs={"quantization_config": on_texts()})
    assert_equal(generator.model, afterwards(dense, on_texts()))
    assert generator(TEXTS[0], max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith(TEXTS[0])


def test_encoder_decoder_on_texts(tmp_path, t5_tokenizer):  # noqa: F811 - the fixture
    """Span corruption needs the sentinels of the tokenizer, for token ids too."""
    t5(eos_token_id=1).save_pretrained(tmp_path)
    t5_tokenizer.save_pretrained(tmp_path)
    for data in (TEXTS, [list(range(4, 30)), list(range(5, 31))]):
        config = structured(data)
        found, _ = load(tmp_path, quantization_config=config)
        assert (report(found).calibration or {})["task"] == "span corruption"
        assert_equal(found, afterwards(tmp_path, config))


def test_images(tmp_path, processor):  # noqa: F811 - the fixture
    llava().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    table = Dataset.from_dict({"image": [picture(shade) for shade in (9, 99, 199)], "text": TEXTS[:3]})
    config = structured(table, stacks=["language", "vision"])
    found, _ = load(tmp_path, quantization_config=config)
    assert (report(found).calibration or {})["task"] == "image-text"
    assert {group.stack for group in report(found).groups} >= {"model.language_model.layers"}
    assert_equal(found, afterwards(tmp_path, config))


def test_token_lists_need_no_tokenizer(tmp_path, caplog):
    """None is looked for: on the Hub, that would be requests for files that are not there."""
    llama().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=structured(tokens(4).tolist()))
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=on_texts(scorer="magnitude"))
    assert "tokenizer" not in caplog.text


def test_tokenizer_of_the_same_commit(dense, monkeypatch):
    seen = []
    monkeypatch.setattr(
        at_load, "load_companions", lambda model, name, **given: seen.append((name, given)) or (None, None)
    )
    model = llama()
    for commit in (None, "0123abc"):
        model.config.name_or_path, model.config._commit_hash = "org/dense", commit
        with pytest.raises(CalibrationError, match="tokenizer"):
            at_load.prune_loaded_(model, on_texts())
    assert seen == [("org/dense", {}), ("org/dense", {"revision": "0123abc"})]


def test_headless_and_classifier(dense):
    config = structured(tokens(4).tolist(), scorer="wanda")
    for auto in (AutoModel, AutoModelForSequenceClassification):
        found = auto.from_pretrained(dense, quantization_config=config)
        expected = auto.from_pretrained(dense)
        prune(expected, config)
        assert_equal(found.base_model, expected.base_model)


# An ordinary model, with a report


def test_nothing_of_a_quantizer_is_left(dense):
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=PruningConfig(**MASKS, calibration=DATA))
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model, "quantization_method")
    assert model.is_quantized is False
    assert not hasattr(model.config, "quantization_config")
    assert not hasattr(model.config, "_is_quantized")
    assert not model.training
    assert model.half().dtype == torch.float16


DATA = CalibrationConfig(TEXTS, seq_len=12)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [({"allocation": "uniform"}, "stock"), ({"allocation": "global"}, "compact")],
)
def test_saved_by_transformers(changes, layout, dense, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=on_texts(**changes))
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored.get("quantization_config", {}).get("layout", "stock") == layout
    assert "sparsity" not in stored.get("quantization_config", {})
    assert stored["pruning_config"]["recipe"]["scorer"] == "taylor"
    again, complaints = load(tmp_path)
    assert complaints == {}
    found = outputs(again)
    for name, tensor in outputs(model).items():
        assert torch.equal(tensor, found[name]), name


def test_report(dense, tmp_path):
    config = on_texts()
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    assert isinstance(report(model), PruningReport)
    assert report(model).base_model == str(dense)
    pruner = Pruner(model, tokenizer())
    assert pruner.report is report(model)
    pruner.save_pretrained(tmp_path / "it")
    assert (tmp_path / "it" / "pruning_report.json").exists()
    assert "taylor" in (tmp_path / "it" / "README.md").read_text()


def test_report_of_an_earlier_pruning(dense):
    """It would make a false card."""
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=on_texts())
    prune(model, on_texts(scorer="magnitude", compensation="none", calibration=CalibrationConfig()))
    assert Pruner(model).report is None


def test_pruner_that_prunes_while_loading(dense):
    pruner = Pruner.from_pretrained(dense, quantization_config=on_texts())
    assert pruner.report is not None and pruner.report.config["scorer"] == "taylor"


def test_stock_checkpoint_is_pruned_once_more(tmp_path):
    model = uniformly(llama())
    prune(model, PruningConfig(scorer="magnitude", sparsity=0.3, allocation="uniform"))
    assert save_checkpoint(model, tmp_path) == "stock"
    config = structured(tokens(4).tolist(), units=["mlp_channel"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert len(report(again).previous) == 1
    assert again.num_parameters() < model.num_parameters()


# Refusals


def test_calibration_data_is_not_copied():
    """Transformers copies its arguments, and the model's config with what is in it."""
    table = Dataset.from_dict({"input_ids": tokens(4).tolist()})
    assert copy.deepcopy(structured(table)).calibration.source is table


def refusals(folder):
    yield on_texts(calibration={"source": "no/such/file.txt"}), CalibrationError, "does not exist"
    yield structured([[1, 2, 960]]), CalibrationError, "960"
    yield {"quant_method": METHOD}, InvalidConfig, "sparsity is required"
    yield {"quant_method": METHOD, "sparsty": 0.2}, InvalidConfig, "'sparsty'.*Did you mean 'sparsity'"
    yield {"quant_method": METHOD, "sparsity": 1.2}, InvalidConfig, r"sparsity must be in \[0, 1\)"


def test_what_is_refused_leaves_nothing(dense):
    before = {path.name: path.read_bytes() for path in dense.iterdir()}
    for config, error, message in refusals(dense):
        with pytest.raises(error, match=message):
            AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    assert {path.name: path.read_bytes() for path in dense.iterdir()} == before
    again, complaints = load(dense)
    assert complaints == {} and not hasattr(again.config, "quantization_config")
    assert_equal(again, load(dense)[0])


def test_config_that_is_given_stays_as_it_was(dense):
    own = llama().config
    AutoModelForCausalLM.from_pretrained(dense, config=own, quantization_config=on_texts())
    assert own.to_dict() == llama().config.to_dict()


def test_texts_without_a_tokenizer(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(CalibrationError, match="tokenizer"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=on_texts())


def test_unknown_architecture_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=96)).save_pretrained(tmp_path)
    monkeypatch.setattr(GPT2LMHeadModel, "_load_pretrained_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedArchitecture, match="gpt2"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=on_texts(scorer="magnitude"))


def test_layer_that_is_not_in_memory(dense, tmp_path):
    names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0", "model.layers.2")
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    for options in ({"device_map": places, "offload_folder": tmp_path}, {"device_map": "meta"}):
        with pytest.raises(UnsupportedModel, match=r"model\.layers\.\d\.\S+weight is not in memory \(meta device"):
            AutoModelForCausalLM.from_pretrained(dense, quantization_config=on_texts(scorer="magnitude"), **options)


@pytest.mark.parametrize("scorer", ["taylor", "magnitude"])
def test_checkpoint_without_the_head(scorer, tmp_path):
    """A head of random weights would be scored through, and saved."""
    models: list[Any] = [llama(), llava()]
    for model in models:
        model.base_model.save_pretrained(tmp_path)
        with pytest.raises(
            CheckpointError, match=r"lacks lm_head\.weight, which \w+ needs .*config\.json names \w+Model"
        ):
            type(model).from_pretrained(tmp_path, quantization_config=on_texts(scorer=scorer))


@pytest.mark.parametrize("serialised", ["safetensors", "shards", "bin"])
def test_tensors_that_the_class_does_not_read(serialised, tmp_path):
    model = AutoModelForSequenceClassification.from_config(llama().config)
    model.save_pretrained(tmp_path, **({"max_shard_size": "10KB"} if serialised == "shards" else {}))
    if serialised == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    message = r"holds score\.weight, which LlamaForCausalLM does not read .*config.json names LlamaForSequenceClass"
    config = on_texts(scorer="magnitude")
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path, quantization_config=config).score is not None


def test_scorer_that_needs_the_head(dense):
    with pytest.raises(UnsupportedModel, match="LlamaModel gives no logits"):
        AutoModel.from_pretrained(dense, quantization_config=structured(tokens(4).tolist()))


def test_quantised_checkpoint(tmp_path):
    model = llama()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantized with GPTQConfig but you are passing a PruningConfig config"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=PruningConfig(**MASKS))
