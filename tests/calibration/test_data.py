"""From texts and token lists to samples and batches."""

import json
import logging
import random
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimum_prune.calibration.data import CalibrationData, load_samples
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from tests.calibration.conftest import WORDS
from tests.models import llama

TEXTS = [f"{WORDS} chapter {i}" for i in range(40)]
EOS = 1


def line_of(tokenizer, texts):
    """All tokens of the texts, with EOS between them: what the windows are cut from."""
    line = []
    for text in filter(str.strip, texts):
        line += [EOS] * bool(line) + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return line


def joined(data):
    return torch.cat(data.samples).tolist()


def ids(data):
    return [sample.tolist() for sample in data.samples]


@pytest.fixture
def load(model, tokenizer):
    def load(source, order: Any = "random", **options):
        return load_samples(CalibrationConfig(source, **options), model, tokenizer, order=order)

    return load


@pytest.fixture(autouse=True)
def infos(caplog):
    caplog.set_level(logging.INFO, "optimum_prune")


# Texts


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    texts=st.lists(st.text(max_size=60), min_size=1).filter(lambda texts: any(map(str.strip, texts))),
    seq_len=st.integers(1, 20),
)
def test_windows_cut_the_line_of_all_tokens_without_loss(load, tokenizer, texts, seq_len):
    data = load(texts, order="first", num_samples=10_000, seq_len=seq_len)

    assert joined(data) == line_of(tokenizer, texts)
    assert all(len(sample) == seq_len for sample in data.samples[:-1])
    assert data.texts == sum(bool(text.strip()) for text in texts)
    assert data.tokens == sum(map(len, data.samples))
    assert all(sample.dtype == torch.int64 for sample in data.samples)


def test_first_takes_the_beginning(load, tokenizer):
    assert ids(load(TEXTS, order="first", num_samples=2, seq_len=7)) == [
        line_of(tokenizer, TEXTS)[:7],
        line_of(tokenizer, TEXTS)[7:14],
    ]


def test_random_draws_windows_without_replacement(load):
    windows = ids(load(TEXTS, order="first", num_samples=10_000, seq_len=16))
    # The texts repeat themselves, so equal windows are counted, not excluded.
    drawn = ids(load(TEXTS, num_samples=len(windows), seq_len=16))
    assert sorted(drawn) == sorted(windows)
    assert drawn != windows
    assert drawn[:5] == ids(load(TEXTS, num_samples=5, seq_len=16)), "more samples begin with the fewer ones"


def test_the_seed_decides_the_draw(load):
    one, same, other = (load(TEXTS, num_samples=8, seq_len=16, seed=seed) for seed in (0, 0, 1))
    assert ids(one) == ids(same) and one.fingerprint == same.fingerprint
    assert ids(one) != ids(other) and one.fingerprint != other.fingerprint


@pytest.mark.parametrize("source", [TEXTS, "self"])
def test_global_random_state_is_neither_read_nor_changed(load, source):
    def draw(seed):
        for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
            set_seed(seed)
        untouched = torch.rand(1).item(), random.random(), numpy.random.rand()
        for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
            set_seed(seed)
        samples = ids(load(source, num_samples=2, seq_len=8))
        assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == untouched
        return samples

    assert draw(seed=1) == draw(seed=2)


@pytest.mark.parametrize("order", ["random", "first"])
@pytest.mark.parametrize("seed", range(5))
def test_the_short_window_is_used_only_where_it_is_needed(load, tokenizer, order, seed):
    length = len(line_of(tokenizer, TEXTS[:1]))
    seq_len = length // 3 - 1  # three full windows and a short one
    sizes = [
        [len(s) for s in load(TEXTS[:1], order, num_samples=n, seq_len=seq_len, seed=seed).samples]
        for n in (1, 3, 4, 9)
    ]
    short = length - 3 * seq_len
    full = [seq_len] * 3
    assert sizes == [full[:1], full, [*full, short], [*full, short]]


def test_eight_short_texts_and_a_context_of_131072(tokenizer, caplog):
    model = llama(vocab_size=280, max_position_embeddings=131072)
    data = load_samples(CalibrationConfig(TEXTS[:8]), model, tokenizer)
    tokens = len(line_of(tokenizer, TEXTS[:8]))
    assert [len(sample) for sample in data.samples] == [tokens]
    assert data.seq_len == 2048 and data.texts == 8
    assert f"Using 1 samples, {tokens} tokens, from in-memory: 8 texts" in caplog.text
    assert "Asked for 32 samples" in caplog.text and f"gives only 1 samples, {tokens} tokens" in caplog.text


def test_blank_texts_are_skipped_and_counted(load, tokenizer, caplog):
    data = load(["", TEXTS[0], " \n\t", TEXTS[1], ""], num_samples=1)
    assert data.texts == 2
    assert "2 texts, 3 blank ones left out" in caplog.text
    assert ids(load(TEXTS[:2], num_samples=1)) == ids(data)


def test_a_text_longer_than_the_context_becomes_windows(load, tokenizer, model):
    text = WORDS * 20
    data = load([text], order="first", num_samples=10_000)
    assert data.seq_len == model.config.max_position_embeddings == 64
    assert joined(data) == line_of(tokenizer, [text])
    assert max(map(len, data.samples)) == 64


LONG = {
    "words": "".join(f"{w}{i % 7}." + " " * (i % 3) + "\n" * (i % 5) for i, w in enumerate(WORDS.split() * 9000)),
    "no space": "fox" * 40_000,
    "only spaces": " " * 100_000 + "end",
    "not ascii": "日本" * 30_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_very_long_text_is_tokenised_in_pieces_without_a_trace(load, tokenizer, monkeypatch, text):
    warnings = []
    logger = "transformers.tokenization_utils_base.logger.warning"
    monkeypatch.setattr(logger, lambda *args, **_: warnings.append(args))
    data = load(["end", text, "end"], order="first", num_samples=10**6)
    assert not warnings
    assert tokenizer.decode(joined(data)) == f"end</s>{text}</s>end"
    assert data.texts == 3
    if text == LONG["words"]:
        assert joined(data) == line_of(tokenizer, ["end", text, "end"])


class CountingTokenizer:
    def __init__(self, tokenizer):
        self.tokenizer, self.eos_token_id, self.characters = tokenizer, tokenizer.eos_token_id, 0
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, pieces, **options):
        self.characters += sum(map(len, pieces))
        return self.tokenizer(pieces, **options)


@pytest.mark.parametrize("texts", [[WORDS * 80_000], [WORDS] * 80_000], ids=["one long", "many"])
def test_first_tokenises_little_more_than_it_needs(model, tokenizer, texts):
    counting = CountingTokenizer(tokenizer)
    config = CalibrationConfig(texts, num_samples=4, seq_len=16)
    data = load_samples(config, model, counting, order="first")  # pyright: ignore[reportArgumentType]
    assert data.texts and data.tokens == 64
    assert counting.characters < 300_000 < sum(map(len, texts)) / 10


def test_texts_follow_each_other_directly_where_there_is_no_end_token(model, tokenizer):
    plain = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    data = load_samples(CalibrationConfig(["ab", "cd"]), model, plain)
    assert tokenizer.decode(data.samples[0]) == "abcd"


def test_samples_do_not_hold_the_chunk_they_were_cut_from(load):
    for sample in load(TEXTS, num_samples=3, seq_len=16).samples:
        assert sample.untyped_storage().nbytes() == sample.nbytes


# Token lists


def test_token_lists_are_samples_as_they_are(load):
    lists = [[5, 6, 7], [8], [9, 10]]
    assert ids(load(lists, order="first", num_samples=3)) == lists
    assert sorted(ids(load(lists, num_samples=3))) == sorted(lists)
    drawn = [ids(load(lists, num_samples=1, seq_len=3, seed=seed))[0] for seed in range(20)]
    assert all(sample in drawn for sample in lists), "short ones too"
    assert load(lists, num_samples=3).texts is None


def test_long_and_empty_token_lists_are_cut_and_dropped_aloud(load, caplog):
    data = load([[5] * 9, [], [6] * 4], order="first", num_samples=2, seq_len=4)
    assert ids(data) == [[5] * 4, [6] * 4]
    assert "1 samples of in-memory: 3 token lists" in caplog.text and "were cut to 4 tokens" in caplog.text
    assert "1 empty samples" in caplog.text


def test_nothing_is_warned_of_where_all_is_used_as_asked(load, caplog):
    load([[5, 6], [7]], num_samples=2)
    load([*TEXTS, ""], num_samples=2, seq_len=8)
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_padding_on_either_side_gives_the_same_samples(load):
    lists = [[5, 6, 7], [8], [9, 10], []]
    width = 4
    right = {
        "input_ids": [row + [0] * (width - len(row)) for row in lists],
        "attention_mask": [[1] * len(row) + [0] * (width - len(row)) for row in lists],
    }
    left = {name: [row[::-1] for row in rows] for name, rows in right.items()}
    left["input_ids"] = [[0] * (width - len(row)) + row for row in lists]
    plain = load(Dataset.from_dict({"input_ids": lists}), num_samples=3)
    assert sorted(ids(plain)) == sorted(lists[:3])
    for data in (
        Dataset.from_dict(right),
        Dataset.from_dict(left),
        Dataset.from_dict(right).with_format("torch"),
    ):
        assert ids(load(data, num_samples=3)) == ids(plain)
        assert load(data, num_samples=3).fingerprint == plain.fingerprint


# What cannot be used


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([[1, 280]], "Sample 0 holds token id 280; the model's token ids are 0 to 279"),
        ([[1], [2, -1]], "Sample 1 holds token id -1"),
        ([[1, 2**70]], "Sample 0 is no list of token ids"),
        ([[]], r"in-memory: 1 token lists.* holds no usable tokens \(1 empty entries"),
        (["", "  "], r"in-memory: 2 texts.* holds no usable tokens \(2 empty entries"),
        (Dataset.from_dict({"input_ids": [[0.5]]}), "A row of input_ids must be a flat list of integers, got"),
        (Dataset.from_dict({"input_ids": [[[1]]]}), "A row of input_ids must be a flat list of integers, got"),
        (Dataset.from_dict({"input_ids": ["text"]}), "A row of input_ids is no list of token ids"),
        (Dataset.from_dict({"input_ids": [None, [1]]}), "A row of input_ids is no list of token ids"),
        (
            Dataset.from_dict({"input_ids": [[1, 2]], "attention_mask": [[1]]}),
            "Cannot read the dataset: a row has 2 input_ids, but 1 values in its attention_mask",
        ),
    ],
)
def test_unusable_data_is_refused_with_the_reason(load, source, message):
    with pytest.raises(CalibrationError, match=message):
        load(source)


def test_text_needs_a_tokenizer(model):
    with pytest.raises(CalibrationError, match="Texts need a tokenizer: pass one"):
        load_samples(CalibrationConfig(TEXTS), model)


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    with pytest.raises(CalibrationError, match=r"this model's tokenizer\?.* holds token id \d+; .* 0 to 95"):
        load_samples(CalibrationConfig(TEXTS), llama(), tokenizer)


# Lengths


def test_length_is_the_users_or_the_recommended_or_the_models(model, tokenizer):
    def length(seq_len, default, model=model):
        config = CalibrationConfig(TEXTS, seq_len=seq_len)
        return load_samples(config, model, tokenizer, default_seq_len=default).seq_len

    assert length(10, 20) == 10
    assert length(None, 20) == 20
    assert length(None, 128) == length(None, None) == 64
    wide = llama(vocab_size=280, max_position_embeddings=8192)
    assert (length(None, None, wide), length(None, 4096, wide), length(5000, None, wide)) == (
        2048,
        4096,
        5000,
    )
    with pytest.raises(CalibrationError, match="must be at most the model's max_position_embeddings 64, got 65"):
        length(65, None)


# Batches


def test_batches_pad_on_the_right_and_keep_the_order():
    data = CalibrationData([torch.tensor(s) for s in ([5, 6, 7], [8], [9, 0])], seq_len=4, source="lists")
    one, two = data.batches(2, pad_token_id=3)
    assert one["input_ids"].tolist() == [[5, 6, 7], [8, 3, 3]]
    assert one["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert two["input_ids"].tolist() == [[9, 0]] and two["attention_mask"].tolist() == [[1, 1]]
    assert one["input_ids"].dtype == one["attention_mask"].dtype == torch.int64


def test_fingerprint_sees_every_token_and_every_cut():
    variants = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[3], [1, 2]], [[1, 2], [4]]]
    prints = [CalibrationData([torch.tensor(s) for s in v], 4, "lists").fingerprint for v in variants]
    assert all(a != b for a, b in pairwise(sorted(prints)))
    assert all(p.startswith("sha256:") and len(p) == 7 + 64 for p in prints)


def test_the_description_is_json_without_the_data(load):
    data = load(TEXTS, num_samples=3, seq_len=16)
    described = json.loads(json.dumps(data.to_dict()))
    assert described.pop("source").startswith("in-memory: 40 texts, sha256 ")
    assert described == {"samples": 3, "tokens": 48, "seq_len": 16, "fingerprint": data.fingerprint}
