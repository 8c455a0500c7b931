"""The whole way: load, prune, evaluate, save; and what is said when it cannot be gone."""

import json
import logging
import os
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

from optimum_prune import pruner as pruner_module
from optimum_prune import stages
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import (
    CalibrationError,
    CheckpointError,
    InvalidConfig,
    PruningError,
    UnsupportedArchitecture,
)
from optimum_prune.integrations import companions
from optimum_prune.pipeline import prune
from optimum_prune.pruner import Pruner
from optimum_prune.report import PruningReport
from optimum_prune.sizes import measure
from tests.models import llama, tokens
from tests.words import tokenizer

SAMPLES = tokens(batch=4, length=16, seed=1).tolist()
OTHERS = tokens(batch=4, length=16, seed=2).tolist()
CUT = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)
UNIFORM = PruningConfig(scorer="magnitude", sparsity=0.5)


@pytest.fixture
def pruner(dense):
    return Pruner.from_pretrained(dense)


@pytest.fixture
def damaged(dense, tmp_path):
    """Return a function that copies the dense model, with a file changed or removed."""

    def change(name, content):
        folder = tmp_path / "damaged"
        shutil.copytree(dense, folder)
        if content is None:
            (folder / name).unlink()
        elif isinstance(content, dict):
            values = json.loads((folder / name).read_text()) | content
            (folder / name).write_text(json.dumps(values))
        else:
            (folder / name).write_bytes(content)
        return folder

    return change


@torch.no_grad()
def logits(model):
    return model(input_ids=tokens()).logits


# Loading


def test_loads_model_and_tokenizer(pruner):
    assert torch.equal(logits(pruner.model), logits(llama()))
    assert pruner.tokenizer("w3 w95").input_ids == [3, 95]
    assert not pruner.is_pruned
    assert pruner.report is None
    assert pruner.evaluations == {}


def test_keywords_are_those_of_transformers(dense):
    assert Pruner.from_pretrained(str(dense), dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_processor_brings_its_tokenizer():
    words = tokenizer()
    assert Pruner(llama(), processor=SimpleNamespace(tokenizer=words)).tokenizer is words


@pytest.mark.parametrize("content", [None, b"{", b"{}"])
def test_without_a_tokenizer_token_ids_remain(content, damaged, caplog):
    pruner = Pruner.from_pretrained(damaged("tokenizer.json", content))
    assert pruner.tokenizer is None
    assert "damaged has no tokenizer that loads" in caplog.text
    texts = CalibrationConfig(["w3 w4 w5"])
    with pytest.raises(CalibrationError, match="tokenizer"):
        pruner.prune(PruningConfig(sparsity=0.3, calibration=texts))
    assert pruner.report is None
    pruner.prune(PruningConfig(sparsity=0.3, round_to=1, calibration=CalibrationConfig(SAMPLES)))


def refused(name, message, error: type[PruningError] = CheckpointError, **options):
    with pytest.raises(error, match=message) as caught:
        Pruner.from_pretrained(name, **options)
    assert "\n" not in str(caught.value)


def test_no_such_directory(tmp_path):
    refused(tmp_path / "nothing", "nothing does not exist")


def test_no_such_model_on_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/nothing", r"nobody/nothing cannot be loaded \(no folder of that name is here\): ")


def test_directory_without_a_model(tmp_path):
    refused(tmp_path, "cannot be loaded: Unrecognized model")


def test_unsupported_architecture_is_refused_before_weights_are_read(damaged, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("read"))
    folder = damaged("config.json", {"model_type": "gpt2"})
    refused(
        folder,
        "Unknown architecture 'gpt2'; supported: 'gemma2', .*'llama', 'llava', 'mistral'",
        UnsupportedArchitecture,
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not a valid JSON file"),
        (b"", "not a valid JSON file"),
        (b"\xff\xfe\x00", "not a valid JSON file"),
        (b"[]", "Unrecognized model"),
        ({"model_type": "no_such"}, "model type `no_such`"),
        ({"hidden_size": "32"}, "Field 'hidden_size' expected int"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"hidden_act": "no_such"}, "no_such"),
        ({"intermediate_size": 40}, "ignore_mismatched_sizes"),
        (None, "Unrecognized model"),
    ],
)
def test_damaged_config(content, reason, damaged):
    refused(damaged("config.json", content), f"damaged cannot be loaded: .*{reason}")


@pytest.mark.parametrize("content", [b"", b"12345", b"\x10" * 5000, (1000).to_bytes(8, "little") + b"{" * 1000, None])
def test_damaged_weights(content, damaged):
    refused(damaged("model.safetensors", content), "damaged cannot be loaded: .*(header|no file named)")


def test_truncated_weights(dense, damaged):
    whole = (dense / "model.safetensors").read_bytes()
    refused(damaged("model.safetensors", whole[: len(whole) // 2]), "damaged cannot be loaded: .*header")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtyp": "bfloat16"}, "dtyp"),
        ({"dtype": "bfloat61"}, "valid"),
        ({"device_map": "moon"}, "moon"),
    ],
)
def test_wrong_keywords(options, reason, dense):
    refused(dense, f"dense cannot be loaded: .*{reason}", **options)


# Pruning


def test_prunes_in_place(pruner):
    model, before = pruner.model, measure(pruner.model)
    report = pruner.prune(CUT)
    assert pruner.model is model
    assert pruner.report is report
    assert pruner.is_pruned
    assert measure(model) != before
    assert report.achieved == pytest.approx(0.3, abs=0.03)
    assert report.parameters_after == model.num_parameters()


def test_text_is_tokenised(pruner):
    texts = [" ".join(f"w{i}" for i in row) for row in SAMPLES]
    report = pruner.prune(
        PruningConfig(sparsity=0.3, round_to=1, calibration=CalibrationConfig(texts, num_samples=4, seq_len=16))
    )
    assert report.calibration["tokens"] == 64
    assert report.calibration["source"].startswith("in-memory: 4 texts")


def test_refused_run_changes_nothing(pruner):
    before, config = measure(pruner.model), pruner.model.config.to_dict()
    with pytest.raises(InvalidConfig, match="no_such"):
        pruner.prune(PruningConfig(scorer="magnitude", sparsity=0.3, exclude=["no_such"]))
    assert measure(pruner.model) == before
    assert pruner.model.config.to_dict() == config
    assert torch.equal(logits(pruner.model), logits(llama()))
    assert pruner.report is None
    assert not pruner.is_pruned


# Evaluation


def test_evaluation_chooses_no_data(pruner):
    with pytest.raises(InvalidConfig, match="selection='kl' has no meaning for evaluation"):
        pruner.evaluate(SAMPLES, selection="kl")


def test_before_and_after(pruner):
    dense = pruner.evaluate(SAMPLES, latency=False)
    assert dense.kl is None
    assert dense.tokens == 4 * 15
    pruner.prune(CUT)
    pruned = pruner.evaluate(SAMPLES, latency=False)
    assert pruned.kl > 0.01
    assert pruned.perplexity != dense.perplexity
    assert pruned.parameters < dense.parameters
    assert pruned.weight_bytes < dense.weight_bytes
    assert pruner.evaluations == {"dense": dense, "pruned": pruned}
    assert re.search(rf"^KL.* {pruned.kl:.4f}$", pruner.comparison(), re.MULTILINE)


def test_nothing_to_compare_yet(pruner):
    pruner.evaluate(SAMPLES, latency=False)
    with pytest.raises(InvalidConfig, match=r"call prune\(\), then evaluate\(\)"):
        pruner.comparison()


def test_dense_model_is_loaded_again_where_it_was_not_measured(dense, pruner):
    first = Pruner.from_pretrained(dense)
    expected = first.evaluate(SAMPLES, latency=False)
    pruner.prune(CUT)
    pruned = pruner.evaluate(SAMPLES, latency=False)
    assert pruner.evaluations["dense"] == expected
    assert pruned.kl > 0.01


def no_second_model(monkeypatch):
    monkeypatch.setattr(pruner_module, "load_model", lambda *_, **__: pytest.fail("a second model was loaded"))


@pytest.mark.parametrize("latency", [False, True])
def test_a_dense_model_measured_before_pruning_is_not_loaded_again(latency, dense, pruner, monkeypatch):
    late = Pruner.from_pretrained(dense)
    late.prune(UNIFORM)
    expected = late.evaluate(SAMPLES, latency=False)
    no_second_model(monkeypatch)
    pruner.evaluate(SAMPLES, latency=latency)
    pruner.prune(UNIFORM)
    assert pruner.evaluate(SAMPLES, latency=latency).kl == pytest.approx(expected.kl, rel=1e-6)
    times = [pruner.evaluations[stage].timed_at for stage in ("dense", "pruned")]
    assert all(times) == latency


def test_a_dense_model_without_a_reference_is_not_loaded_again(pruner, monkeypatch):
    monkeypatch.setattr(stages, "dense_reference", lambda *_, **__: None)
    dense = pruner.evaluate(SAMPLES, latency=False)
    no_second_model(monkeypatch)
    pruner.prune(UNIFORM)
    assert pruner.evaluate(SAMPLES, latency=False).kl is None
    assert pruner.evaluations["dense"] == dense


def test_other_data_measures_the_dense_model_again(pruner):
    first = pruner.evaluate(SAMPLES, latency=False)
    pruner.prune(CUT)
    pruned = pruner.evaluate(OTHERS, latency=False)
    assert pruner.evaluations["dense"].data == pruned.data != first.data
    assert pruned.kl > 0.01


def test_nothing_removed_is_no_divergence(pruner):
    pruner.prune(PruningConfig(scorer="magnitude", sparsity=0.0))
    evaluation = pruner.evaluate(SAMPLES, latency=False)
    assert evaluation.kl == pytest.approx(0, abs=1e-9)
    assert evaluation.perplexity == pytest.approx(pruner.evaluations["dense"].perplexity)


def test_live_model_measured_in_time(caplog):
    pruner = Pruner(llama())
    pruner.evaluate(SAMPLES, latency=False)
    pruner.prune(CUT)
    kl = pruner.evaluate(SAMPLES, latency=False).kl
    assert kl is not None
    assert kl > 0.01
    assert "no KL" not in caplog.text


@pytest.mark.parametrize("before", [None, OTHERS])
def test_live_model_measured_too_late(before, caplog):
    pruner = Pruner(llama())
    if before:
        pruner.evaluate(before, latency=False)
    pruner.prune(CUT)
    assert pruner.evaluate(SAMPLES, latency=False).kl is None
    assert "so there is no KL. Call evaluate() on the same data before prune()" in caplog.text
    assert pruner.evaluations.keys() == {"pruned"}


def test_latency_of_both(pruner):
    pruner.prune(UNIFORM)
    pruner.evaluate(SAMPLES)
    for evaluation in pruner.evaluations.values():
        assert evaluation.prefill_ms > 0
        assert evaluation.decode_ms_per_token > 0
    assert pruner.evaluations.keys() == {"dense", "pruned"}
    assert pruner.evaluations["dense"].timed_at == pruner.evaluations["pruned"].timed_at  # in turn
    assert "apart" not in pruner.comparison()


def test_a_pruned_checkpoint_is_not_its_own_dense_model(pruner, tmp_path, caplog):
    pruner.prune(CUT)
    pruner.save_pretrained(tmp_path / "it")
    again = Pruner.from_pretrained(tmp_path / "it")
    assert again.is_pruned
    assert again.evaluate(SAMPLES, latency=False).kl is None
    assert again.evaluations.keys() == {"pruned"}
    assert "no KL" in caplog.text


# Saving


@pytest.mark.parametrize(("config", "layout"), [(CUT, "compact"), (UNIFORM, "stock")])
def test_everything_is_saved(config, layout, pruner, tmp_path):
    report = pruner.prune(config)
    evaluation = pruner.evaluate(SAMPLES, latency=False)
    assert pruner.save_pretrained(tmp_path / "it", max_shard_size="20KB") == layout
    assert len(list((tmp_path / "it").glob("model-*.safetensors"))) > 1
    again = Pruner.from_pretrained(tmp_path / "it")
    assert torch.equal(logits(again.model), logits(pruner.model))
    words: Any = again.tokenizer
    assert words.get_vocab() == pruner.tokenizer.get_vocab()
    assert words("w3 w95").input_ids == [3, 95]
    assert again.model.config.pruning_config == json.loads(json.dumps(report.record() | {"layout": layout}))

    stored = PruningReport.from_dict(json.loads((tmp_path / "it" / "pruning_report.json").read_text()))
    assert stored == report
    assert str(stored) == str(report)
    card = ModelCard.load(tmp_path / "it" / "README.md")
    assert f"{evaluation.kl:.4f}" in card.content
    assert ("import optimum_prune" in card.content) == (layout == "compact")


def test_what_is_published_names_no_local_path(dense, pruner, tmp_path):
    pruner.prune(CUT)
    pruner.save_pretrained(tmp_path / "it")
    for name in ("README.md", "config.json"):
        assert str(dense) not in (tmp_path / "it" / name).read_text()


def test_card_data(pruner, tmp_path):
    pruner.prune(CUT)
    pruner.save_pretrained(tmp_path / "it", card_data={"license": "apache-2.0", "base_model": "org/dense"})
    data = ModelCard.load(tmp_path / "it" / "README.md").data.to_dict()
    assert data["license"] == "apache-2.0"
    assert data["base_model"] == "org/dense"


def test_processor_is_saved_along(tmp_path):
    words = tokenizer()

    class Processor:
        tokenizer = words

        def save_pretrained(self, folder):
            (folder / "processor_config.json").write_text("{}")

    Pruner(llama(), processor=Processor()).save_pretrained(tmp_path / "it")
    assert (tmp_path / "it" / "processor_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "it").get_vocab() == words.get_vocab()


def test_without_a_report_or_a_tokenizer(tmp_path):
    assert Pruner(llama()).save_pretrained(tmp_path / "it") == "stock"
    assert sorted(os.listdir(tmp_path / "it")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "it")), logits(llama()))


def test_report_of_other_weights_does_not_stay(pruner, tmp_path):
    pruner.prune(CUT)
    pruner.save_pretrained(tmp_path / "it")
    Pruner(llama()).save_pretrained(tmp_path / "it")
    assert not (tmp_path / "it" / "pruning_report.json").exists()


def test_layout_that_cannot_hold_it(pruner, tmp_path):
    pruner.prune(CUT)
    with pytest.raises(InvalidConfig, match="layout='stock' is not possible: layers differ in"):
        pruner.save_pretrained(tmp_path / "it", "stock")
    assert not any(tmp_path.iterdir())


def test_over_what_it_was_loaded_from(dense, tmp_path):
    """The weights in memory may be mapped from the very file that is replaced."""
    shutil.copytree(dense, tmp_path / "it")
    pruner = Pruner.from_pretrained(tmp_path / "it")
    pruner.prune(CUT)
    expected = logits(pruner.model)
    pruner.save_pretrained(tmp_path / "it")
    assert torch.equal(logits(pruner.model), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "it")), expected)


def test_failing_card_leaves_nothing(pruner, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise InvalidConfig("not a card")

    monkeypatch.setattr(companions, "model_card", fail)
    pruner.prune(CUT)
    with pytest.raises(InvalidConfig, match="not a card"):
        pruner.save_pretrained(tmp_path / "it")
    assert not any(tmp_path.iterdir())


def test_reload_and_go_on(pruner, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    pruner.prune(CUT)
    pruner.save_pretrained(tmp_path / "once")
    again = Pruner.from_pretrained(tmp_path / "once")
    report = again.prune(CUT)
    assert report.parameters_before == pruner.report.parameters_after
    again.save_pretrained(tmp_path / "once")
    final = Pruner.from_pretrained(tmp_path / "once")
    assert torch.equal(logits(final.model), logits(again.model))


# Nothing is said that was not measured on these very weights


def cut(seed=0):
    return PruningConfig(scorer="random", sparsity=0.3, allocation="uniform", round_to=1, seed=seed)


@pytest.fixture
def own(dense, tmp_path):
    """Return a dense checkpoint that a test may overwrite."""
    return shutil.copytree(dense, tmp_path / "own")


def test_saving_over_the_dense_model_leaves_nothing_to_compare_with(own, caplog):
    pruner = Pruner.from_pretrained(own)
    pruner.prune(cut())
    pruner.save_pretrained(own)
    assert pruner.evaluate(SAMPLES, latency=False).kl is None
    assert "cannot be loaded again" in caplog.text
    assert "dense" not in pruner.evaluations


def test_pruning_around_the_pruner_is_noticed(pruner, tmp_path):
    pruner.prune(cut())
    prune(pruner.model, cut(1))
    with pytest.raises(InvalidConfig, match="pruned again without this Pruner"):
        pruner.save_pretrained(tmp_path / "it")
    assert not any(tmp_path.iterdir())


def test_second_cut_is_told_as_such(pruner, tmp_path):
    dense_parameters = pruner.model.num_parameters()
    first = pruner.prune(cut())
    second = pruner.prune(cut(1))
    pruner.save_pretrained(tmp_path / "it")
    again = Pruner.from_pretrained(tmp_path / "it")
    assert again.report == second
    third = again.prune(cut(2))
    assert [record["recipe"]["seed"] for record in third.previous] == [0, 1]
    assert third.previous[0]["achieved"]["parameters_before"] == first.parameters_before == dense_parameters


def test_report_and_measurements_survive_saving_again(pruner, tmp_path):
    pruner.prune(cut())
    pruner.evaluate(SAMPLES, latency=False)
    pruner.save_pretrained(tmp_path / "it")
    again = Pruner.from_pretrained(tmp_path / "it")
    assert again.report == pruner.report
    assert again.evaluations == pruner.evaluations
    again.save_pretrained(tmp_path / "it")
    again.save_pretrained(tmp_path / "copy")
    for folder in ("it", "copy"):
        assert f"{pruner.evaluations['pruned'].kl:.4f}" in (tmp_path / folder / "README.md").read_text()


def test_report_of_another_pruning_is_not_taken(pruner, tmp_path):
    pruner.prune(cut())
    pruner.save_pretrained(tmp_path / "it")
    path = tmp_path / "it" / "pruning_report.json"
    path.write_text(path.read_text().replace('"asked": 0.3', '"asked": 0.4').replace('"seed": 0', '"seed": 7'))
    assert Pruner.from_pretrained(tmp_path / "it").report is None


def test_old_card_goes_with_the_old_checkpoint_and_a_readme_of_ones_own_stays(dense, pruner, tmp_path):
    pruner.prune(cut())
    pruner.save_pretrained(tmp_path / "it")
    Pruner.from_pretrained(dense).save_pretrained(tmp_path / "it")
    assert not (tmp_path / "it" / "README.md").exists()
    (tmp_path / "it" / "README.md").write_text("mine")
    Pruner.from_pretrained(dense).save_pretrained(tmp_path / "it")
    assert (tmp_path / "it" / "README.md").read_text() == "mine"


def test_changed_weights_are_measured_anew(pruner, caplog):
    pruner.evaluate(SAMPLES, latency=False)
    with torch.no_grad():
        pruner.model.model.layers[0].mlp.down_proj.weight.mul_(3)
    pruner.prune(cut())
    assert "changed by others" in caplog.text
    assert pruner.evaluate(SAMPLES, latency=False).kl is None
    assert "dense" not in pruner.evaluations
    with torch.no_grad():
        pruner.model.lm_head.weight.mul_(3)
    pruner.prune(cut(1))
    assert pruner.evaluations == {}


def test_change_after_the_measurement_keeps_it_off_the_card(pruner, tmp_path):
    pruner.prune(cut())
    pruner.evaluate(SAMPLES, latency=False)
    with torch.no_grad():
        pruner.model.lm_head.weight.mul_(3)
    pruner.save_pretrained(tmp_path / "it")
    assert "Nothing was measured on this model" in (tmp_path / "it" / "README.md").read_text()


def test_relative_path_is_no_hub_id(dense, tmp_path, monkeypatch):
    monkeypatch.chdir(dense.parent.parent)
    pruner = Pruner.from_pretrained(os.path.join(dense.parent.name, dense.name))
    monkeypatch.chdir(tmp_path)
    report = pruner.prune(cut())
    assert report.hub_base_model is None
    assert pruner.evaluate(SAMPLES, latency=False).kl is not None


def test_interrupted_evaluation_mixes_nothing(pruner, monkeypatch):
    pruner.prune(cut())
    pruner.evaluate(SAMPLES, latency=False)
    before = dict(pruner.evaluations)
    real, calls = stages.evaluate_model, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(stages, "evaluate_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pruner.evaluate(OTHERS, latency=False)
    assert pruner.evaluations == before


def test_classifier_stays_one(tmp_path):
    LlamaForSequenceClassification(llama().config).save_pretrained(tmp_path / "it")
    assert type(Pruner.from_pretrained(tmp_path / "it").model) is LlamaForSequenceClassification


def test_only_language_models_are_evaluated():
    with pytest.raises(InvalidConfig, match="Only language models can be evaluated, and LlamaModel is none"):
        Pruner(llama().model).evaluate(SAMPLES)


def test_dense_model_that_is_gone(own):
    pruner = Pruner.from_pretrained(own)
    pruner.prune(cut())
    shutil.rmtree(own)
    with pytest.raises(CheckpointError, match="does not exist"):
        pruner.evaluate(SAMPLES)


def test_texts_begin_as_the_tokenizer_begins_them(tmp_path):
    beginning = tokenizer()
    beginning.add_bos_token = True
    calibration, evaluation = (" ".join(f"w{3 + token % 90}" for token in range(start, start + 60)) for start in (0, 7))
    pruner = Pruner(llama(), beginning)
    config = CalibrationConfig([calibration], num_samples=3, seq_len=16)
    report = pruner.prune(PruningConfig(scorer="wanda", sparsity=0.3, calibration=config))
    measured = pruner.evaluate([evaluation], num_samples=3, seq_len=16, latency=False)

    words = beginning(evaluation, add_special_tokens=False)["input_ids"]
    windows = torch.tensor([[1, *words[i : i + 15]] for i in (0, 15, 30)])
    with torch.no_grad():
        loss = pruner.model(windows, labels=windows).loss.item()
    assert measured.loss == pytest.approx(loss, rel=1e-5)
    begins = "each window begins with `<s>`"
    assert begins in " ".join(str(report).split())
    assert begins in pruner.comparison()
    pruner.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text().count(begins) == 2, "calibration and evaluation"
