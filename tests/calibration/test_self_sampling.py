"""Samples that the model draws from itself."""

import copy

import pytest
import torch
from transformers import GenerationConfig, LlamaModel, T5Config, T5ForConditionalGeneration

from optimum_prune.calibration import self_sampling
from optimum_prune.calibration.data import load_samples
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from tests.models import IMAGE_TOKEN, llama, llava, mistral

BOS, EOS = 1, 2


def draw(model, tokenizer=None, **options):
    options = {"num_samples": 5, "seq_len": 12, **options}
    return torch.stack(load_samples(CalibrationConfig("self", **options), model, tokenizer).samples)


def sharp(model):
    """Make one token nearly certain at every step."""
    with torch.no_grad():
        model.lm_head.weight *= 1000
    return model


@pytest.mark.filterwarnings("error")
def test_samples_have_the_length_and_begin_with_bos():
    data = load_samples(CalibrationConfig("self", num_samples=5, seq_len=12), llama())
    assert [sample.shape for sample in data.samples] == [(12,)] * 5
    assert all(sample[0] == BOS and sample.dtype == torch.int64 for sample in data.samples)
    assert data.source == "self" and data.texts is None and data.tokens == 60
    assert len({tuple(sample.tolist()) for sample in data.samples}) == 5


@pytest.mark.parametrize("make", [llama, mistral])
def test_the_cache_and_the_window_do_not_change_what_is_drawn(make):
    model = sharp(make())
    sample = draw(model, num_samples=1, seq_len=20)
    with torch.no_grad():
        expected = model(sample, use_cache=False).logits.argmax(dim=-1)
    assert torch.equal(sample[:, 1:], expected[:, :-1])


def test_tokens_follow_the_models_distribution():
    model = llama(vocab_size=16)
    second = draw(model, num_samples=20_000, batch_size=20_000, seq_len=2)[:, 1]
    with torch.no_grad():
        expected = model(torch.tensor([[BOS]])).logits[0, -1].softmax(dim=-1)
    found = second.bincount(minlength=16) / len(second)
    assert (found - expected).abs().sum() / 2 < 0.02, "total variation"


def test_a_token_without_probability_is_never_drawn(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.zeros(size, dtype=options["dtype"]))
    model = llama()
    model.lm_head = torch.nn.Linear(32, 96)
    model.lm_head.bias.data[:3] = -torch.inf
    assert set(draw(model)[:, 1:].flatten().tolist()) == {3}


def test_seed_and_batch_size():
    samples = draw(llama())
    assert torch.equal(samples, draw(llama()))
    assert not torch.equal(samples, draw(llama(), seed=1))
    for batch_size in (1, 2, 5, 100):
        assert torch.equal(samples, draw(llama(), batch_size=batch_size))


def test_without_bos_the_first_token_is_eos_and_without_both_it_is_random(tokenizer):
    def first(tokenizer=None, **ids):
        model = llama(vocab_size=280)
        for name, token in ids.items():  # the constructor has opinions about None
            setattr(model.config, name, token)
        return draw(model, tokenizer, num_samples=20)[:, 0].tolist()

    assert set(first()) == {BOS}
    assert set(first(bos_token_id=None)) == {EOS}
    assert set(first(bos_token_id=None, eos_token_id=[7, 8])) == {7}
    assert set(first(bos_token_id=5000, eos_token_id=9)) == {9}, "an id that the model does not know"
    assert set(first(tokenizer, bos_token_id=None, eos_token_id=None)) == {tokenizer.bos_token_id}
    lost = first(bos_token_id=None, eos_token_id=None)
    assert len(set(lost)) > 10 and lost == first(bos_token_id=None, eos_token_id=None)


def test_the_placeholder_of_an_image_is_never_drawn():
    model = llava()
    others = draw(model, num_samples=8)
    assert IMAGE_TOKEN not in others
    with torch.no_grad():
        model.lm_head.weight[IMAGE_TOKEN] = 100 * torch.randn(32, generator=torch.Generator().manual_seed(0))
        assert (model(others).logits.argmax(dim=-1) == IMAGE_TOKEN).any(), "this model loves the token"
    assert IMAGE_TOKEN not in draw(model, num_samples=8)
    for name in ("bos_token_id", "eos_token_id"):
        setattr(model.config.text_config, name, None)
    first = draw(model, num_samples=2000, batch_size=2000, seq_len=1)
    assert set(first.flatten().tolist()) == set(range(IMAGE_TOKEN))


def test_an_end_token_does_not_end_a_sample():
    model = llama()
    model.lm_head = torch.nn.Linear(32, 96)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias.data = torch.zeros(96).index_fill(0, torch.tensor(EOS), 5.0)  # 6 of 10 tokens
    samples = draw(model, num_samples=20)
    assert samples.shape == (20, 12)
    behind = samples[:, 1:][samples[:, :-1] == EOS]
    assert (behind == EOS).any() and (behind != EOS).any()


def test_the_generation_config_is_not_obeyed_and_not_changed():
    plain, model = draw(llama()), llama()
    stop = list(range(96))
    model.generation_config = GenerationConfig(
        max_length=3, forced_bos_token_id=5, suppress_tokens=[6], top_k=1, eos_token_id=stop, do_sample=False
    )
    model.config.use_cache = False
    before = copy.deepcopy(model.generation_config.to_dict()), copy.deepcopy(model.config.to_dict())
    assert torch.equal(plain, draw(model))
    assert (model.generation_config.to_dict(), model.config.to_dict()) == before


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")  # newer transformers rename it
@pytest.mark.parametrize("fails", [False, True])
def test_training_mode_is_restored_module_by_module(monkeypatch, fails):
    model = llama(attention_dropout=0.5).train()
    model.gradient_checkpointing_enable()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    if fails:
        monkeypatch.setattr(self_sampling, "_continue", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            draw(model)
    else:
        assert torch.equal(draw(model), draw(llama()))
    assert [module.training for module in model.modules()] == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_one_token_is_the_first_alone():
    assert draw(llama(), seq_len=1).tolist() == [[BOS]] * 5


def test_models_that_cannot_generate_are_refused():
    headless = LlamaModel(llama().config)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    for model in (headless, t5):
        with pytest.raises(CalibrationError, match=rf"head, got {type(model).__name__}. Give texts, a file") as caught:
            draw(model)
        assert ("target_column" in str(caught.value)) == (model is t5)


def test_logits_that_are_not_finite_are_refused():
    model = llama()
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(CalibrationError, match="logits are not finite"):
        draw(model)
