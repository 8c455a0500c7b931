"""Evaluation of saved checkpoints: the numbers of both models side by side, with one of them in memory."""

import math
import weakref
from typing import Any

import pytest
import torch

from optimum_prune import checkpoint_evaluation, latency
from optimum_prune import pruner as pruner_module
from optimum_prune.checkpoint_evaluation import evaluate_checkpoint
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import CheckpointError, InvalidConfig
from optimum_prune.pruner import Pruner
from optimum_prune.recovery.config import RecoveryConfig
from tests.models import gemma2, llama, opt, qwen2, t5, tokens
from tests.words import tokenizer

SAMPLES = tokens(batch=3, length=14, seed=1).tolist()
DATA = CalibrationConfig(SAMPLES, batch_size=1)
UNEVEN = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1, compensation="none")
ZEROS = PruningConfig(pattern="2:4", scorer="magnitude")


def evaluated(*args, **options):
    return evaluate_checkpoint(*args, latency=False, **options)


def looped(model, dense):
    """Return perplexity and KL to a dense model, from whole logits in float64, one sequence at a time."""
    nll = kl = count = 0
    for row in SAMPLES:
        ids = torch.tensor([row])
        with torch.no_grad():
            q, p = (m.eval()(input_ids=ids).logits[0, :-1].double().log_softmax(-1) for m in (model, dense))
        nll -= q.gather(-1, ids[0, 1:, None]).sum().item()
        kl += (p.exp() * (p - q)).sum().item()
        count += len(row) - 1
    return math.exp(nll / count), kl / count


@pytest.fixture(scope="module")
def pruned(dense):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(UNEVEN)
    for layout in ("compact", "padded"):
        pruner.save_pretrained(dense.with_name(layout), layout)
    return pruner.model


@pytest.mark.parametrize("layout", ["compact", "padded"])
def test_numbers_of_a_pruned_checkpoint(layout, dense, pruned):
    found = evaluated(dense.with_name(layout), DATA, dense=dense)
    assert list(found) == ["dense", "pruned"]
    perplexity, kl = looped(pruned, llama())
    assert found["pruned"].perplexity == pytest.approx(perplexity, rel=1e-5)
    assert found["pruned"].kl == pytest.approx(kl, rel=1e-4)
    assert found["dense"].perplexity == pytest.approx(looped(llama(), llama())[0], rel=1e-5)
    assert found["dense"].kl is None and found["dense"].parameters == llama().num_parameters()


@pytest.mark.parametrize("build", [gemma2, opt, qwen2])
def test_numbers_of_other_architectures(build, tmp_path):
    build().save_pretrained(tmp_path / "dense")
    pruner = Pruner(build())
    pruner.prune(ZEROS)
    pruner.save_pretrained(tmp_path / "packed", storage="packed")
    found = evaluated(tmp_path / "packed", DATA, dense=tmp_path / "dense")
    assert found["pruned"].kl == pytest.approx(looped(pruner.model, build())[1], rel=1e-4)


def test_answers_of_an_encoder_decoder(tmp_path):
    from datasets import Dataset

    texts = [" ".join(f"w{max(3, i)}" for i in row) for row in SAMPLES]
    rows = Dataset.from_dict({"question": texts, "answer": [text[:20] for text in texts]})
    columns: dict[str, Any] = {"text_column": "question", "target_column": "answer"}
    data = CalibrationConfig(rows, **columns)
    t5().save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    pruner = Pruner.from_pretrained(tmp_path / "dense")
    pruner.evaluate(rows, **columns, latency=False)
    pruner.prune(ZEROS)
    expected = pruner.evaluate(rows, **columns, latency=False)
    pruner.save_pretrained(tmp_path / "pruned")
    found = evaluated(tmp_path / "pruned", data, dense=tmp_path / "dense")["pruned"]
    assert (found.accuracy, found.exact_match) == (expected.accuracy, expected.exact_match)
    assert found.exact_match is not None
    assert found.kl == pytest.approx(expected.kl, rel=1e-4)


def test_one_model_is_in_memory(dense, pruned, monkeypatch):
    alive, load = [], pruner_module.load_model

    def watched(name, **options):
        assert not [found for found in alive if found() is not None], "another model is still in memory"
        model = load(name, **options)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(checkpoint_evaluation, "load_model", watched)
    monkeypatch.setattr(pruner_module, "load_model", watched)
    found = evaluate_checkpoint(dense.with_name("compact"), DATA, dense=dense)
    assert len(alive) == 2
    for evaluation in found.values():
        assert evaluation.prefill_ms is not None and evaluation.decode_ms_per_token is not None and evaluation.timed_at


def test_no_latency(dense, monkeypatch):
    for module in (checkpoint_evaluation, latency):
        monkeypatch.setattr(module, "measure_latency", lambda *_, **__: pytest.fail("it was timed"))
    (found,) = evaluated(dense, DATA).values()
    assert (found.prefill_ms, found.decode_ms_per_token, found.prefill_tokens, found.timed_at) == (None,) * 4


def test_a_model_without_a_record(dense, tmp_path):
    """Pruned by other means, and trained to the last layer since: its output embedding is not the dense one."""
    model: Any = llama()
    model.lm_head.weight.data *= 1.5
    model.model.layers[0].mlp.down_proj.weight.data[:, ::2] = 0
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert list(evaluated(tmp_path, DATA)) == ["dense"]
    found = evaluated(tmp_path, DATA, dense=dense)
    assert list(found) == ["dense", "pruned"]
    assert found["pruned"].kl == pytest.approx(looped(model, llama())[1], rel=1e-4)


def test_another_dtype_than_the_dense_models(dense, pruned, tmp_path):
    model = Pruner.from_pretrained(dense.with_name("compact"), dtype="bfloat16")
    model.save_pretrained(tmp_path)
    found = evaluated(tmp_path, DATA, dense=dense)
    assert (found["dense"].dtype, found["pruned"].dtype) == ("float32", "bfloat16")
    assert found["pruned"].kl == pytest.approx(looped(model.model, llama())[1], rel=1e-2)


def test_an_adapter_apart_counts(dense, tmp_path):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(UNEVEN)
    training = CalibrationConfig(SAMPLES)
    options = {"max_steps": 2, "merge": "none", "learning_rate": 0.01, "seq_len": 8, "held_out": 0.3}
    pruner.recover(RecoveryConfig(training.source, **options))
    expected = pruner.evaluate(SAMPLES, latency=False)
    pruner.save_pretrained(tmp_path)
    found = evaluated(tmp_path, DATA, dense=dense)
    assert list(found) == ["dense", "recovered"]
    assert found["recovered"].kl == pytest.approx(expected.kl, rel=1e-4)


def test_without_a_dense_model(dense, pruned, caplog):
    assert list(evaluated(dense, DATA)) == ["dense"]
    assert "no KL" not in caplog.text
    (found,) = evaluated(dense.with_name("compact"), DATA).values()
    assert found.kl is None
    assert "A saved model is compared by `optimum-cli prune evaluate`, which takes --dense MODEL." in caplog.text


def test_the_base_model_of_the_record_is_named_and_not_fetched(dense, tmp_path, caplog):
    pruner = Pruner.from_pretrained(dense)
    pruner.model.config.name_or_path = "org/dense"
    pruner.prune(UNEVEN)
    pruner.save_pretrained(tmp_path)
    assert list(evaluated(tmp_path, DATA)) == ["pruned"]
    assert "`optimum-cli prune evaluate` with --dense org/dense." in caplog.text


def test_earlier_measurements_are_not_among_them(dense, tmp_path):
    pruner = Pruner.from_pretrained(dense)
    pruner.evaluate(SAMPLES, latency=False)
    pruner.prune(UNEVEN)
    pruner.evaluate(SAMPLES, latency=False)
    pruner.save_pretrained(tmp_path)
    assert list(Pruner.from_pretrained(tmp_path).evaluations) == ["dense", "pruned"]
    assert list(evaluated(tmp_path, DATA)) == ["pruned"]


def test_a_dense_model_that_reads_other_tokens(dense, pruned, tmp_path):
    llama().save_pretrained(tmp_path)
    tokenizer(50).save_pretrained(tmp_path)
    texts = CalibrationConfig(["w3 w90 w4 w60 w7"])
    with pytest.raises(InvalidConfig, match="read other tokens in the same data"):
        evaluated(dense.with_name("compact"), texts, dense=tmp_path)


@pytest.mark.parametrize(
    ("model", "data", "options", "error", "message"),
    [
        ("nothing", DATA, {}, CheckpointError, "nothing"),
        ("compact", DATA, {"dense": "/nothing"}, CheckpointError, "/nothing does not exist"),
        ("compact", DATA, {"dense": "compact"}, InvalidConfig, "is pruned itself"),
        ("compact", CalibrationConfig("self"), {}, InvalidConfig, "did not write itself"),
        ("compact", CalibrationConfig(SAMPLES, selection="kl"), {}, InvalidConfig, "has no meaning for evaluation"),
    ],
)
def test_refused_before_weights_are_read(model, data, options, error, message, dense, pruned, monkeypatch):
    monkeypatch.setattr(checkpoint_evaluation, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(pruner_module, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    options = {key: dense.with_name(value) if value == "compact" else value for key, value in options.items()}
    with pytest.raises(error, match=message):
        evaluated(dense.with_name(model), data, **options)
