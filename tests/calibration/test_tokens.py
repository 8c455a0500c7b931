"""Windows of text that begin with BOS, where the tokenizer begins texts with it."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import LlamaConfig

from optimum_prune.calibration.data import load_samples
from optimum_prune.calibration.tokens import bos_token
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from tests.calibration.conftest import WORDS
from tests.models import llama, llava

BOS, EOS = 0, 1
TEXTS = [f"{WORDS} chapter {i}" for i in range(40)]


@pytest.fixture
def beginning(tokenizer):
    """The tokenizer of 280 tokens, which puts "<s>" in front of every text."""
    tokenizer.add_bos_token = True
    assert tokenizer("")["input_ids"] == [BOS]
    return tokenizer


@pytest.fixture
def load(model, beginning):
    def load(source, order: Any = "first", **options):
        return load_samples(CalibrationConfig(source, **options), model, beginning, order=order)

    return load


def ids(data):
    return [sample.tolist() for sample in data.samples]


def line_of(tokenizer, texts):
    line = []
    for text in texts:
        line += [EOS] * bool(line) + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return line


def behind_it(windows):
    return [token for window in windows for token in window[1:]]


class TestTheToken:
    def test_only_where_texts_begin_with_it(self, tokenizer):
        assert bos_token(tokenizer) == [], "it has a BOS token and does not use it"
        tokenizer.add_bos_token = True
        assert bos_token(tokenizer) == [BOS]
        tokenizer.bos_token = None
        assert bos_token(tokenizer) == []

    def test_an_end_token_of_the_same_id_is_none(self, tokenizer):
        tokenizer.bos_token = tokenizer.eos_token
        end = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
        tokenizer.backend_tokenizer.post_processor = end
        assert tokenizer("")["input_ids"] == [tokenizer.bos_token_id]
        assert bos_token(tokenizer) == []

    def test_t5_has_none(self, t5_tokenizer):
        assert bos_token(t5_tokenizer) == []


class TestWindows:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
    @given(
        texts=st.lists(st.text("abc fox", min_size=1, max_size=60).filter(str.strip), min_size=1),
        seq_len=st.integers(2, 20),
    )
    def test_every_window_begins_with_it_and_no_token_is_lost(self, load, beginning, texts, seq_len):
        windows = ids(load(texts, num_samples=10_000, seq_len=seq_len))
        assert all(window[0] == BOS for window in windows)
        assert behind_it(windows) == line_of(beginning, texts)
        assert all(len(window) == seq_len for window in windows[:-1])

    def test_texts_that_are_tokenised_in_several_calls(self, load, beginning, monkeypatch):
        monkeypatch.setattr("optimum_prune.calibration.tokens.CHUNK", 100)
        windows = ids(load(TEXTS, num_samples=10_000, seq_len=37))
        assert behind_it(windows) == line_of(beginning, TEXTS)
        assert all(window[0] == BOS for window in windows) and {len(window) for window in windows[:-1]} == {37}

    def test_it_is_not_doubled_where_the_text_has_it(self, load, beginning):
        plain, written = (load([f"{bos}the fox"], num_samples=1) for bos in ("", "<s>"))
        assert ids(written) == ids(plain)
        assert ids(plain)[0].count(BOS) == 1

    def test_it_is_never_predicted(self, load):
        data = load(TEXTS, num_samples=3, seq_len=16)
        for index, sample in enumerate(data.samples):
            positions, labels = data.predicted(index)
            assert positions.tolist() == list(range(15)) and torch.equal(labels, sample[1:])

    def test_the_draw_and_the_report(self, load):
        data = load(TEXTS, order="random", num_samples=5, seq_len=16)
        assert all(len(window) == 16 and window[0] == BOS and BOS not in window[1:] for window in ids(data))
        assert data.to_dict()["begins_with"] == "<s>"

    def test_without_room_for_text(self, load):
        with pytest.raises(CalibrationError, match="seq_len=1 leaves no room for text: each window begins with '<s>'"):
            load(TEXTS, seq_len=1)

    def test_another_models_token(self, beginning):
        beginning.add_tokens(["<begin>"], special_tokens=True)
        beginning.bos_token = "<begin>"
        beginning.add_bos_token = True  # again, of the new token
        with pytest.raises(CalibrationError, match=r"by this model's tokenizer\?.* holds token id 280"):
            load_samples(CalibrationConfig(TEXTS), llama(vocab_size=280), beginning)


class TestOthers:
    def test_token_lists_stay_as_they_are(self, load):
        data = load([[5, 6, 7], [BOS, 5]])
        assert ids(data) == [[5, 6, 7], [BOS, 5]]
        assert "begins_with" not in data.to_dict()

    def test_text_of_the_model_itself_begins_as_texts_do(self, load, model):
        assert model.config.bos_token_id == 1, "another one than the tokenizer's"
        data = load("self", num_samples=3, seq_len=8)
        assert all(window[0] == BOS and len(window) == 8 for window in ids(data))
        assert data.begins_with == "<s>"

    def test_text_alone_for_a_model_that_reads_images(self, beginning):
        data = load_samples(CalibrationConfig(TEXTS, num_samples=2, seq_len=8), image_reader(), beginning)
        assert all(window[0] == BOS for window in ids(data))


def image_reader():
    text = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return llava(text=text, image_token_index=299)
