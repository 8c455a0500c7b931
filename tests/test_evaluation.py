"""Perplexity and KL against plain float64 loops, what is refused, and that the model is left as it was."""

import copy
import json
import math
import struct
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from optimum_prune import evaluation
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.errors import CalibrationError
from optimum_prune.evaluation import DenseReference, dense_reference, evaluate_model, weight_bytes
from optimum_prune.metrics import KLDivergence, Perplexity
from tests.models import IMAGE_TOKEN, SHAPES, VARIANTS, inputs, llama, mistral, tokens, with_scaled_logits


def samples(*lengths: int, vocabulary: int = 96) -> CalibrationData:
    """Return random sequences of these lengths."""
    rows = [tokens(1, length, seed, vocabulary)[0] for seed, length in enumerate(lengths)]
    return CalibrationData(rows, max(lengths), "random")


def pruned_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of which half of the MLP channels do nothing."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if name.endswith("down_proj.weight"):
            parameter.data[:, ::2] = 0
    return model


def reference_of(model: PreTrainedModel, data: CalibrationData) -> DenseReference:
    reference = dense_reference(model, data)
    assert reference is not None
    return reference


def looped(model: PreTrainedModel, data: CalibrationData, dense: PreTrainedModel | None = None) -> tuple[float, float]:
    """Return perplexity and KL, one token at a time in float64, one unpadded sequence at a time."""

    def log_probabilities(model: PreTrainedModel, ids: Tensor) -> list[list[float]]:
        with torch.no_grad():
            return model(input_ids=ids[None]).logits[0].double().log_softmax(-1).tolist()

    nll, kl, count = 0.0, 0.0, 0
    for ids in data.samples:
        log_q = log_probabilities(model, ids)
        log_p = log_probabilities(dense or model, ids)
        for position in range(len(ids) - 1):
            nll -= log_q[position][ids[position + 1]]
            kl += sum(math.exp(p) * (p - q) for p, q in zip(log_p[position], log_q[position], strict=True))
            count += 1
    return math.exp(nll / count), kl / count


class BigramConfig(PreTrainedConfig):
    """Of a model whose next token depends on the last one only."""

    model_type = "bigram"


class Bigram(PreTrainedModel):
    """`logits = scale(head(table[id]))`: the table can be written down, and so can the perplexity."""

    config_class = BigramConfig

    def __init__(self, table: list[list[float]], scale: float = 1.0):
        super().__init__(BigramConfig())
        self.table = nn.Embedding.from_pretrained(torch.tensor(table))
        self.lm_head = nn.Linear(len(table), len(table), bias=False)
        self.lm_head.weight.data = torch.eye(len(table))
        self.scale = scale

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        logits = self.lm_head(self.table(input_ids))
        return CausalLMOutput(logits=logits.mul_(self.scale) if self.scale != 1 else logits)


LN3 = math.log(3)


class TestMetrics:
    def test_every_token_weighs_the_same(self):
        # 3 tokens of 1/2 and 1 of 1/8: (3 ln 2 + ln 8) / 4 = 1.5 ln 2
        result = Perplexity(keep_in_memory=True).compute(nll=[3 * math.log(2), math.log(8)], tokens=[3, 1])
        assert result == {"perplexity": pytest.approx(2**1.5)}
        assert KLDivergence(keep_in_memory=True).compute(kl=[1.0, 0.2], tokens=[1, 3]) == {
            "kl_divergence": pytest.approx(0.3)
        }

    @pytest.mark.parametrize("in_memory", [True, False])
    def test_batches_add_up_and_leave_nothing_behind(self, in_memory, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        metric = Perplexity(keep_in_memory=in_memory, cache_dir=str(tmp_path / "cache"))
        metric.add_batch(nll=[1.0, 2.0], tokens=[1, 2])
        metric.add(nll=3.0, tokens=1)
        assert metric.compute() == {"perplexity": pytest.approx(math.exp(6 / 4))}
        assert metric.compute(nll=[1.0], tokens=[1]) == {"perplexity": pytest.approx(math.e)}
        assert [path for path in tmp_path.rglob("*.arrow")] == []

    def test_a_broken_model_is_measured_as_broken(self):
        perplexity, divergence = Perplexity(keep_in_memory=True), KLDivergence(keep_in_memory=True)
        assert perplexity.compute(nll=[1000.0], tokens=[1]) == {"perplexity": math.inf}
        nan = pytest.approx(math.nan, nan_ok=True)
        assert perplexity.compute(nll=[math.nan], tokens=[1]) == {"perplexity": nan}
        assert divergence.compute(kl=[math.nan], tokens=[1]) == {"kl_divergence": nan}

    def test_rounding_makes_no_negative_divergence(self):
        assert KLDivergence(keep_in_memory=True).compute(kl=[-1e-9], tokens=[3]) == {"kl_divergence": 0.0}


class TestNumbers:
    def test_by_hand(self):
        dense = Bigram([[LN3, 0.0], [0.0, 0.0]])  # after 0: 3/4 and 1/4; after 1: one half each
        data = CalibrationData([torch.tensor([0, 0, 1]), torch.tensor([1, 0])], 3, "by hand")
        reference = reference_of(dense, data)
        measured = evaluate_model(dense, data)
        assert measured.perplexity == pytest.approx((4 / 3 * 4 * 2) ** (1 / 3))
        assert (measured.kl, measured.tokens, measured.sequences) == (None, 3, 2)

        dense.table.weight.data.zero_()  # pruned in place: one half each, everywhere
        measured = evaluate_model(dense, data, reference=reference)
        assert measured.perplexity == pytest.approx(2)
        # two tokens follow a 0: KL of (3/4, 1/4) from one half each; the third follows a 1
        assert measured.kl == pytest.approx(2 / 3 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)))

    @pytest.mark.parametrize("name", [*SHAPES, "mistral"])
    def test_equal_to_a_plain_loop_in_float64(self, name):
        dense = mistral() if name == "mistral" else llama(**SHAPES[name])
        pruned, data = pruned_copy(dense), samples(12, 7, 2, 16, 1)
        perplexity, kl = looped(pruned, data, dense)
        measured = evaluate_model(pruned, data, batch_size=3, reference=reference_of(dense, data))
        assert measured.perplexity == pytest.approx(perplexity, rel=1e-5)
        assert measured.kl == pytest.approx(kl, rel=1e-4)
        assert kl > 0.01
        assert measured.tokens == 11 + 6 + 1 + 15

    @settings(deadline=None, max_examples=25)
    @given(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1),
        batch_size=st.integers(2, 6),
        chunk=st.integers(1, 21),
    )
    def test_padding_batches_and_chunks_change_nothing(self, lengths, batch_size, chunk):
        data, dense = samples(*lengths), llama(num_hidden_layers=1)
        pruned = pruned_copy(dense)
        plain = evaluate_model(pruned, data, reference=reference_of(dense, data))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation, "CHUNK", chunk)
            reference = dense_reference(dense, data, batch_size=batch_size)
            other = evaluate_model(pruned, data, batch_size=batch_size, reference=reference)
        assert other.perplexity == pytest.approx(plain.perplexity, rel=1e-4)
        assert other.kl == pytest.approx(plain.kl, rel=1e-3, abs=1e-6)
        assert other.tokens == plain.tokens == sum(lengths) - len(lengths)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_no_divergence_from_itself(self, dtype):
        model, data = llama().to(dtype), samples(9, 5)
        measured = evaluate_model(model, data, reference=reference_of(model, data))
        assert measured.kl == 0
        assert measured.dtype == str(dtype).removeprefix("torch.")

    def test_uniform_logits_give_the_size_of_the_vocabulary(self):
        model = llama()
        model.lm_head.weight.data.zero_()
        assert evaluate_model(model, samples(20)).perplexity == pytest.approx(96)

    def test_logits_are_made_for_a_few_tokens_at_a_time(self, monkeypatch):
        monkeypatch.setattr(evaluation, "CHUNK", 5)
        model, data, made = llama(), samples(40, 23), []
        model.lm_head.register_forward_hook(lambda module, args, output: made.append(output.numel() // 96))
        evaluate_model(model, data, batch_size=2, reference=reference_of(model, data))
        assert max(made) == 2 * evaluation.PROBE  # of both sequences, in a forward
        assert sum(made) > 2 * data.tokens


class TestSoftCap:
    def test_numbers(self):
        from transformers import Gemma2Config, Gemma2ForCausalLM

        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            final_logit_softcapping=3.0,
            initializer_range=0.5,
        )
        model, data = Gemma2ForCausalLM(config).eval(), samples(9, 4)
        pruned = pruned_copy(model)
        uncapped = copy.deepcopy(pruned)
        uncapped.config.final_logit_softcapping = None
        perplexity, kl = looped(pruned, data, model)
        measured = evaluate_model(pruned, data, reference=reference_of(model, data))
        assert measured.perplexity == pytest.approx(perplexity, rel=1e-5)
        assert measured.kl == pytest.approx(kl, rel=1e-4)
        assert looped(uncapped, data)[0] != pytest.approx(perplexity, rel=1e-3)  # the cap matters here


class TestRefusals:
    def test_scaled_logits_have_no_reference_but_a_right_perplexity(self):
        scaled = Bigram([[LN3 / 2, 0.0], [0.0, 0.0]], scale=2.0)
        data = CalibrationData([torch.tensor([0, 0, 1])], 3, "by hand")
        with pytest.warns(UserWarning, match="not available for Bigram"):
            assert dense_reference(scaled, data) is None
        assert evaluate_model(scaled, data).perplexity == pytest.approx((4 / 3 * 4) ** 0.5)

    def test_scaled_logits_of_a_model(self):
        model, data = with_scaled_logits(llama()), samples(9, 4)
        with pytest.warns(UserWarning, match="not available for LlamaForCausalLM"):
            assert dense_reference(model, data) is None
        assert evaluate_model(model, data).perplexity == pytest.approx(looped(model, data)[0], rel=1e-5)

    @pytest.mark.parametrize("change", ["weights", "one row", "vocabulary", "dtype"])
    def test_a_changed_output_embedding_gives_no_number(self, change):
        model, data = llama(), samples(9, 4)
        reference = reference_of(model, data)
        if change == "weights":
            model.lm_head.weight.data *= 1.01
        elif change == "one row":
            model.lm_head.weight.data[5] += 0.1
        elif change == "vocabulary":
            model.resize_token_embeddings(100)
        else:
            model.bfloat16()
        with pytest.warns(UserWarning, match="output embedding has changed"):
            measured = evaluate_model(model, data, reference=reference)
        assert measured.kl is None
        assert math.isfinite(measured.perplexity)

    def test_other_data(self):
        model = llama()
        with pytest.raises(CalibrationError, match="measured on other data"):
            evaluate_model(model, samples(9), reference=reference_of(model, samples(8)))

    def test_nothing_to_predict(self):
        model = llama()
        model.forward = None  # pyright: ignore[reportAttributeAccessIssue]  # refused without a forward
        for call in (dense_reference, evaluate_model):
            with pytest.raises(CalibrationError, match="no sample has a second token"):
                call(model, samples(1, 1))


class TestSideEffects:
    @pytest.mark.parametrize("call", ["reference", "evaluation"])
    @pytest.mark.parametrize("failing_forward", [None, 0, 1, 2])
    def test_the_model_is_left_as_it_was(self, monkeypatch, call, failing_forward):
        model, data = llama().train(), samples(9, 4, 7)
        model.model.layers[1].eval()  # a mode of its own, that train() would lose
        modes = {name: module.training for name, module in model.named_modules()}
        state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        forward, calls = model.model.norm.forward, []

        def fail(*args):
            assert not model.training
            calls.append(None)
            if len(calls) - 1 == failing_forward:
                raise RuntimeError("on purpose")
            return forward(*args)

        monkeypatch.setattr(model.model.norm, "forward", fail)
        act = dense_reference if call == "reference" else evaluate_model
        if failing_forward is None:
            act(model, data)
        else:
            with pytest.raises(RuntimeError, match="on purpose"):
                act(model, data)
        assert {name: module.training for name, module in model.named_modules()} == modes
        assert not any(
            module._forward_pre_hooks or module._forward_hooks or module._backward_hooks for module in model.modules()
        )
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert torch.is_grad_enabled()
        assert torch.equal(torch.get_rng_state(), random)

    def test_no_file_is_left(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        evaluate_model(llama(), samples(5))
        assert list(tmp_path.iterdir()) == []

    def test_importing_the_module_imports_no_evaluate(self):
        code = "import sys, optimum_prune.evaluation; print('evaluate' in sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "False"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_size_is_that_of_the_file(tmp_path: Path, tied, dtype):
    model = llama(tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    assert weight_bytes(model) == len(raw) - header
    measured = evaluate_model(model, samples(5))
    assert measured.weight_bytes == len(raw) - header
    shapes = [entry["shape"] for key, entry in json.loads(raw[8:header]).items() if key != "__metadata__"]
    assert measured.parameters == sum(math.prod(shape) for shape in shapes)


def task_data(model: PreTrainedModel, lengths: tuple[int, ...] = (12, 11, 12)) -> CalibrationData:
    """Return what a T5 should answer, or what a LLaVA should say of its pictures."""
    rows = [inputs(model, 1, length, seed) for seed, length in enumerate(lengths)]
    ids = [row["input_ids"][0] for row in rows]
    if model.config.is_encoder_decoder:
        answers = [row["decoder_input_ids"][0][: 5 + i] for i, row in enumerate(rows)]
        return CalibrationData(ids, 12, "pairs", targets=answers, start=0, task="pairs")
    pixels = [row["pixel_values"] for row in rows]
    return CalibrationData(ids, 12, "pictures", images=pixels, image_token=IMAGE_TOKEN, task="image-text")


def task_log_probabilities(model: PreTrainedModel, data: CalibrationData, i: int) -> list[tuple[int, list[float]]]:
    """Return every predicted token of a sample, with its distribution, from a forward of its own."""
    ids = data.samples[i][None]
    with torch.no_grad():
        if data.targets is not None:
            labels = data.targets[i].tolist()
            answer = torch.tensor([[0, *labels[:-1]]])
            logits = model(input_ids=ids, decoder_input_ids=answer).logits[0]
        else:
            assert data.images is not None
            labels = ids[0, 1:].tolist()
            logits = model(input_ids=ids, pixel_values=data.images[i]).logits[0, :-1]
    rows = logits.double().log_softmax(-1).tolist()
    return [(label, row) for label, row in zip(labels, rows, strict=True) if label != data.image_token]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", ["t5", "t5-gated", "llava"])
def test_answers_and_captions_against_loops(name, batch_size):
    model = VARIANTS[name]()
    pruned, data = pruned_copy(model), task_data(model)
    for parameter in (p for n, p in pruned.named_parameters() if n.endswith("wo.weight")):
        parameter.data[:, ::2] = 0
    nll = kl = right = whole = 0.0
    count = 0
    for i in range(len(data.samples)):
        q, p = task_log_probabilities(pruned, data, i), task_log_probabilities(model, data, i)
        nll -= sum(row[label] for label, row in q)
        kl += sum(math.exp(b) * (b - a) for (_, x), (_, y) in zip(q, p, strict=True) for a, b in zip(x, y, strict=True))
        hits = [max(range(len(row)), key=row.__getitem__) == label for label, row in q]
        right, whole, count = right + sum(hits), whole + all(hits), count + len(q)
    got = evaluate_model(pruned, data, batch_size=batch_size, reference=reference_of(model, data))
    assert got.tokens == count and got.sequences == 3
    assert got.loss == pytest.approx(nll / count, rel=1e-5)
    assert got.kl == pytest.approx(kl / count, rel=1e-3) and kl / count > 0.01
    assert got.accuracy == pytest.approx(right / count) and got.exact_match == pytest.approx(whole / 3)


@pytest.mark.parametrize("name", ["t5", "llava"])
def test_what_greedy_generation_answers_is_all_right(name):
    """Teacher-forced, each token is the best one exactly where greedy generation writes that answer."""
    model: Any = VARIANTS[name]()
    data = task_data(model)
    rows = []
    for i, ids in enumerate(data.samples):
        extra = {} if data.images is None else {"pixel_values": data.images[i]}
        prompt = ids if data.images is None else ids[:11]
        said = model.generate(input_ids=prompt[None], **extra, do_sample=False, max_new_tokens=4, min_new_tokens=4)[0]
        rows.append(said[1:] if data.images is None else said)
    if data.images is None:
        answered = replace(data, targets=rows)
    else:
        answered = replace(data, samples=rows)
        answered = Captions(**{option.name: getattr(answered, option.name) for option in fields(answered)})
    got = evaluate_model(model, answered)
    assert (got.accuracy, got.exact_match) == (1.0, 1.0)
    worse = evaluate_model(model, replace(answered, **spoilt(answered)))
    assert worse.exact_match == pytest.approx(2 / 3) and worse.accuracy is not None and worse.accuracy < 1


class Captions(CalibrationData):
    """Of which only what was generated counts."""

    def predicted(self, index):
        positions, labels = super().predicted(index)
        return positions[-4:], labels[-4:]


def spoilt(data: CalibrationData) -> dict[str, list[Tensor]]:
    """Change the last token of the first answer."""
    field = "samples" if data.targets is None else "targets"
    rows = [row.clone() for row in getattr(data, field)]
    rows[0][-1] = 3 + rows[0][-1] % 90
    return {field: rows}


def test_running_text_is_not_predicted_to_its_end():
    got = evaluate_model(llama(), samples(12, 7))
    assert got.exact_match is None and got.accuracy is not None and 0 <= got.accuracy < 1
