"""Latency on a clock that the models themselves set: the order of calls, and what is made of their times."""

import logging as standard_logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from optimum_prune import latency
from optimum_prune.errors import InvalidConfig, UnsupportedModel
from optimum_prune.latency import measure_latency
from optimum_prune.measurements import Spread
from optimum_prune.modes import evaluating
from tests.models import llama, t5


class Clock:
    """Time passes only where a model says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(latency, "perf_counter", clock)
    return clock


class FakeModel(nn.Module):
    """Takes `prefill` seconds for the first token and `decode` for every other, times `pace` of the round."""

    device = torch.device("cpu")

    def __init__(self, name, clock, log, prefill, decode, pace=(1,), **config):
        super().__init__()
        self.name, self.clock, self.log, self.prefill, self.decode = name, clock, log, prefill, decode
        self.pace = pace
        self.config = LlamaConfig(vocab_size=50, **config)
        self.generation_config = GenerationConfig(max_time=1)
        self.inner = nn.Dropout()

    def generate(self, input_ids, attention_mask, generation_config):
        new = generation_config.max_new_tokens
        assert generation_config is self.generation_config and generation_config.min_new_tokens == new
        assert attention_mask.shape == input_ids.shape and attention_mask.all()
        assert not self.training and not torch.is_grad_enabled()
        made = sum(entry[0] == self.name for entry in self.log)
        self.log.append((self.name, new, input_ids))
        pace = self.pace[min(made // 2, len(self.pace) - 1)]
        self.clock.now += pace * (self.prefill + self.decode * (new - 1))
        return torch.cat([input_ids, input_ids.new_zeros(len(input_ids), new)], dim=1)


def spread(*values) -> Any:
    return Spread(*(cast(Any, pytest.approx(value)) for value in values))


def test_models_take_turns_and_the_first_round_does_not_count(clock):
    log: list = []
    models: Any = {
        "a": FakeModel("a", clock, log, prefill=0.5, decode=0.01, pace=(100, 1, 4, 2)),
        "b": FakeModel("b", clock, log, prefill=0.25, decode=0.02),
    }
    measured = measure_latency(models, prefill_tokens=6, decode_tokens=5, repeats=3)
    assert [entry[:2] for entry in log] == 4 * [("a", 1), ("a", 5), ("b", 1), ("b", 5)]
    assert measured["a"].prefill_ms == spread(1000, 500, 2000)
    assert measured["a"].decode_ms_per_token == spread(20, 10, 40)
    assert measured["b"].prefill_ms == spread(250, 250, 250)
    assert measured["b"].decode_ms_per_token == spread(20, 20, 20)
    settings = [(m.prefill_tokens, m.decode_tokens, m.batch_size, m.repeats) for m in measured.values()]
    assert settings == [(6, 5, 1, 3)] * 2


def test_one_prompt_for_all_without_touching_the_global_generator(clock):
    log: list = []
    models: Any = {name: FakeModel(name, clock, log, 1, 1) for name in "ab"}
    before = torch.get_rng_state()
    measure_latency(models, prefill_tokens=6, decode_tokens=2, repeats=1, batch_size=3)
    assert torch.equal(torch.get_rng_state(), before)
    prompts = [entry[2] for entry in log]
    assert all(torch.equal(prompt, prompts[0]) for prompt in prompts)
    assert prompts[0].shape == (3, 6)
    assert prompts[0].max() < 50


def test_lengths_are_cut_to_the_smallest_context_and_the_result_says_so(clock):
    models: Any = {
        "long": FakeModel("long", clock, [], 1, 1),
        "short": FakeModel("short", clock, [], 1, 1, max_position_embeddings=40),
    }
    measured = measure_latency(models, repeats=1)
    assert {(m.prefill_tokens, m.decode_tokens) for m in measured.values()} == {(20, 20)}


def test_the_shortest_context_that_can_be_timed():
    measured = measure_latency({"": llama(max_position_embeddings=3)}, repeats=1)[""]
    assert (measured.prefill_tokens, measured.decode_tokens) == (1, 2)


@pytest.mark.parametrize("context", [1, 2])
def test_a_context_too_short_to_time(context):
    models = {"long": llama(), "short": llama(max_position_embeddings=context)}
    with pytest.raises(InvalidConfig, match=f"A context of {context} .* is too short to time: .* at least 3 tokens"):
        measure_latency(models)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill_tokens": 0}, "prefill_tokens must be >= 1, got 0"),
        ({"decode_tokens": 1}, "decode_tokens must be >= 2, got 1"),
        ({"repeats": 0}, "repeats must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
    ],
)
def test_too_little_to_measure(change, message):
    with pytest.raises(InvalidConfig, match=message):
        measure_latency({}, **change)


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was(clock, fails):
    model: Any = FakeModel("a", clock, [], 1, 1)
    model.train()
    model.inner.eval()
    own, generate_well = model.generation_config, model.generate
    seen = []

    def generate(**kwargs):
        seen.append(logging.get_verbosity())
        if fails:
            raise RuntimeError("on purpose")
        return generate_well(**kwargs)

    model.generate = generate
    logging.set_verbosity_info()
    try:
        if fails:
            with pytest.raises(RuntimeError, match="on purpose"):
                measure_latency({"a": model})
        else:
            measure_latency({"a": model})
        assert logging.get_verbosity() == standard_logging.INFO
    finally:
        logging.set_verbosity_warning()
    assert set(seen) == {standard_logging.ERROR}
    assert (model.training, model.inner.training) == (True, False)
    assert model.generation_config is own and own == GenerationConfig(max_time=1)
    assert torch.is_grad_enabled()


def test_no_end_of_sequence_token_ends_a_measurement(monkeypatch):
    model: Any = llama()
    made = []
    generate = model.generate
    prompt = latency._prompt({"": model}, 1, 4)
    greedy = generate(prompt, max_new_tokens=1, do_sample=False)[0, -1].item()
    model.generation_config.eos_token_id = greedy  # what it would say first ends a normal generation at once
    assert generate(prompt, max_new_tokens=6, do_sample=False).shape == (1, 5)

    def counted(**kwargs):
        output = generate(**kwargs)
        made.append(output.shape[1] - kwargs["input_ids"].shape[1])
        return output

    monkeypatch.setattr(model, "generate", counted)
    measured = measure_latency({"": model}, prefill_tokens=4, decode_tokens=6, repeats=2)[""]
    assert made == [1, 6] * 3
    assert measured.prefill_ms.lowest > 0


@pytest.mark.parametrize(
    "theirs",
    [
        {"max_time": 1e-6},
        {"num_beams": 6, "num_return_sequences": 3},
        {"stop_strings": ["."]},
        {"do_sample": True, "temperature": 0.5, "num_return_sequences": 3},
        {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
        {"max_length": 3, "min_length": 2, "begin_suppress_tokens": [1], "repetition_penalty": 2.0},
        {"use_cache": False, "prompt_lookup_num_tokens": 2},
        {"eos_token_id": list(range(96)), "forced_eos_token_id": 1},
    ],
    ids=lambda theirs: next(iter(theirs)),
)
def test_the_models_own_generation_config_does_not_matter(monkeypatch, theirs):
    model: Any = llama()
    model.generation_config = own = GenerationConfig(**theirs)
    before = own.to_dict()
    inputs: list = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: inputs.append(args[0].shape))
    measured = measure_latency({"": model}, prefill_tokens=4, decode_tokens=3, repeats=1, batch_size=2)[""]
    assert inputs == ([(2, 4)] + [(2, 4)] + 2 * [(2, 1)]) * 2  # one sequence each, every step from the cache
    assert measured.prefill_ms.lowest > 0
    assert model.generation_config is own and own.to_dict() == before


def test_an_encoder_and_a_decoder():
    config = T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model: Any = T5ForConditionalGeneration(config)
    model.generation_config = GenerationConfig()  # says nothing about how the decoder begins
    measured = measure_latency({"": model}, prefill_tokens=4, decode_tokens=3, repeats=1, batch_size=2)[""]
    assert (measured.prefill_tokens, measured.decode_tokens) == (4, 3)


def test_what_makes_another_number_of_tokens_is_not_timed(clock):
    model: Any = FakeModel("a", clock, [], 1, 1)
    own = model.generation_config
    model.generate = lambda input_ids, **kwargs: input_ids
    with pytest.raises(UnsupportedModel, match=r"FakeModel returned tokens of shape \(2, 4\) where \(2, 5\) was"):
        measure_latency({"a": model}, prefill_tokens=4, decode_tokens=2, batch_size=2)
    assert model.generation_config is own


def test_a_gpu_is_waited_for_on_both_sides_of_the_clock(clock, monkeypatch):
    waits: list = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(clock.now))
    prompt: Any = SimpleNamespace(to=lambda device: torch.ones(1, 2, dtype=torch.int64))
    model: Any = FakeModel("a", clock, [], 1, 1).eval()
    monkeypatch.setattr(latency, "input_device", lambda model: torch.device("cuda"))
    with evaluating(model), torch.no_grad():
        assert latency._milliseconds(model, prompt, 3) == 3000
    assert waits == [0, 3]


def test_an_encoder_that_is_shorter_than_the_decoder():
    """Whose own cache transformers makes too short."""
    found = measure_latency({"it": t5(num_layers=2, num_decoder_layers=3)}, decode_tokens=4, repeats=1)
    assert found["it"].decode_ms_per_token.median > 0
