"""Encoder-decoders: pairs where the data has them, span corruption where it has not."""

import copy
import json
import logging
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from tokenizers import normalizers
from transformers import T5Config, T5Model

from optimum_prune.calibration.data import load_samples
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError, InvalidConfig
from tests.calibration.conftest import WORDS
from tests.models import t5

END = 1
TEXTS = [f"{WORDS} w{i} w{i + 1}" for i in range(30)]
QUESTIONS = [f"w{i} the fox" for i in range(30)]
ANSWERS = [f"w{i} jumps" for i in range(30)]
PAIRS = Dataset.from_dict({"text": QUESTIONS, "answer": ANSWERS, "n": list(range(30))})
TOKEN_PAIRS = {
    "input_ids": [[5, 6, 1, 0], [7, 1, 0, 0], [8, 9, 9, 1]],
    "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]],
    "labels": [[10, 1, -100], [11, 12, 1], [1, -100, -100]],
}


@pytest.fixture
def load(t5_model, t5_tokenizer):
    def load(source, order: Any = "random", tokenizer=t5_tokenizer, model=t5_model, **options):
        return load_samples(CalibrationConfig(source, **options), model, tokenizer, order=order)

    return load


@pytest.fixture(autouse=True)
def infos(caplog):
    caplog.set_level(logging.INFO, "optimum_prune")


def couples(data):
    return list(zip((s.tolist() for s in data.samples), (t.tolist() for t in data.targets), strict=True))


# Pairs


@pytest.mark.parametrize("order", ["first", "random"])
@pytest.mark.parametrize("kind", ["table", "stream", "file"])
def test_texts_with_their_answers(load, t5_tokenizer, tmp_path, order, kind):
    source: Any = {"table": PAIRS, "stream": PAIRS.to_iterable_dataset(), "file": str(tmp_path / "a.jsonl")}[kind]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))  # pyright: ignore[reportArgumentType]
    data = load(source, order, target_column="answer", num_samples=30)
    expected = [
        (t5_tokenizer(q)["input_ids"], t5_tokenizer(a)["input_ids"]) for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    assert all(question[-1] == answer[-1] == END for question, answer in expected)
    assert sorted(couples(data)) == sorted(expected)
    assert (couples(data) == expected) == (order == "first")
    assert (data.task, data.start, data.texts, data.images) == ("pairs", 0, 30, None)
    assert couples(load(source, order, target_column="answer", num_samples=5)) == couples(data)[:5]
    assert load(source, order, target_column="answer", num_samples=30).fingerprint == data.fingerprint


def test_the_seed_decides_the_draw(load):
    draws = [couples(load(PAIRS, target_column="answer", num_samples=8, seed=seed)) for seed in (0, 1, 1)]
    assert draws[0] != draws[1] == draws[2]


def test_the_text_column_is_what_the_target_is_not(load, t5_tokenizer):
    other = PAIRS.rename_column("text", "question")
    data = load(other, "first", target_column="answer", num_samples=1)
    assert data.samples[0].tolist() == t5_tokenizer(QUESTIONS[0])["input_ids"]
    turned = load(other, "first", text_column="answer", target_column="question", num_samples=1)
    assert couples(turned) == [pair[::-1] for pair in couples(data)]


def test_long_texts_are_cut_and_keep_their_end(load, t5_tokenizer, caplog):
    dataset = Dataset.from_dict({"text": [WORDS, "fox"], "answer": ["the dog", WORDS]})
    data = load(dataset, "first", target_column="answer", num_samples=2, seq_len=4)
    long = [*t5_tokenizer(WORDS)["input_ids"][:3], END]
    assert couples(data) == [
        (long, t5_tokenizer("the dog")["input_ids"]),
        (t5_tokenizer("fox")["input_ids"], long),
    ]
    assert "2 samples of in-memory: Dataset, columns: text, answer were cut to 4 tokens" in caplog.text


def test_a_long_text_leaves_no_trace_on_the_tokenizer(load, t5_tokenizer, monkeypatch):
    warnings = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", lambda *args, **_: warnings.append(args))
    before = copy.deepcopy(t5_tokenizer.backend_tokenizer.to_str())
    load(
        Dataset.from_dict({"text": [WORDS * 9], "answer": [WORDS * 9]}),
        target_column="answer",
        num_samples=1,
        seq_len=8,
    )
    assert t5_tokenizer.backend_tokenizer.to_str() == before and not warnings


@pytest.mark.parametrize("order", ["first", "random"])
@pytest.mark.parametrize("stream", [False, True])
def test_pairs_with_a_blank_half_are_left_out_and_counted(load, caplog, order, stream):
    dataset = Dataset.from_dict({"text": ["fox", "", "dog", None, "the"], "answer": ["the", "dog", " ", "fox", "end"]})
    source = dataset.to_iterable_dataset() if stream else dataset
    assert len(load(source, order, target_column="answer", num_samples=2).samples) == 2
    assert "gives only" not in caplog.text
    data = load(source, order, target_column="answer", num_samples=9)
    assert len(data.samples) == data.texts == 2
    assert "2 texts, 3 blank ones left out" in caplog.text and "gives only 2 samples" in caplog.text


def test_a_text_of_which_a_tokenizer_makes_nothing(load, tokenizer, caplog):
    dataset = Dataset.from_dict({"text": ["the", "fox"], "answer": ["\u200b", "dog"]})
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    data = load(dataset, tokenizer=tokenizer, model=t5(vocab_size=280), target_column="answer", num_samples=1)
    assert tokenizer.decode(data.samples[0]) == "fox" and "1 empty samples" in caplog.text


def test_only_what_is_drawn_is_read_of_a_table(load, monkeypatch):
    read = []
    get = Dataset.__getitem__
    monkeypatch.setattr(Dataset, "__getitem__", lambda self, key: read.append(key) or get(self, key))
    monkeypatch.setattr(Dataset, "__iter__", lambda self: 1 / 0)
    load(PAIRS, target_column="answer", num_samples=4)
    assert len(read) == len(set(read)) == 4


def test_first_reads_a_stream_no_further_than_it_must(load):
    read = []

    def generate():
        for i in range(10_000):
            read.append(i)
            yield {"text": "the fox", "answer": "dog"}

    data = load(IterableDataset.from_generator(generate), "first", target_column="answer", num_samples=4)
    assert len(data.samples) == 4 and len(set(read)) < 1000


def test_a_question_is_not_its_own_answer(load):
    with pytest.raises(InvalidConfig, match="text_column and target_column are both 'answer'"):
        load(PAIRS, text_column="answer", target_column="answer")
    with pytest.raises(CalibrationError, match="target_column 'input_ids' is no column of strings"):
        load(Dataset.from_dict(TOKEN_PAIRS), target_column="input_ids")


# Pairs of token ids


@pytest.mark.parametrize("options", [{}, {"target_column": "labels"}])
@pytest.mark.parametrize("order", ["first", "random"])
def test_token_ids_with_labels_need_no_tokenizer(load, order, options):
    expected = [([5, 6, 1], [10, 1]), ([7, 1], [11, 12, 1]), ([8, 9, 9, 1], [1])]
    dataset = Dataset.from_dict(TOKEN_PAIRS)
    for source in (dataset, dataset.to_iterable_dataset(), dataset.with_format("torch")):
        data = load(source, order, tokenizer=None, num_samples=3, **options)
        assert sorted(couples(data)) == sorted(expected)
        assert (data.task, data.texts, data.start) == ("pairs", None, 0)


def test_token_ids_are_cut_where_they_are_too_long_and_left_out_where_there_are_none(load, caplog):
    dataset = Dataset.from_dict({"input_ids": [[5, 6, 7], [8], [], [9]], "labels": [[4, 4, 4], [-100], [4], [4]]})
    data = load(dataset, "first", tokenizer=None, num_samples=2, seq_len=2)
    assert couples(data) == [([5, 6], [4, 4]), ([9], [4])]
    assert "1 samples of in-memory" in caplog.text and "were cut to 2 tokens" in caplog.text
    assert "2 empty samples" in caplog.text


def test_labels_of_classes_are_no_targets(load, t5_tokenizer):
    dataset = Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [1]})
    assert load(dataset, num_samples=1).task == "span corruption"


def test_a_text_column_that_is_named_comes_before_token_ids(load):
    dataset = Dataset.from_dict({**TOKEN_PAIRS, "text": ["the fox"] * 3})
    assert load(dataset, num_samples=1, text_column="text").task == "span corruption"


def test_labels_mean_nothing_to_a_decoder(model):
    data = load_samples(CalibrationConfig(Dataset.from_dict(TOKEN_PAIRS), num_samples=3), model, order="first")
    assert [sample.tolist() for sample in data.samples] == [[5, 6, 1], [7, 1], [8, 9, 9, 1]]
    assert data.targets is data.task is None


# Span corruption


def restore(source, target, sentinels):
    spans, key = {}, None
    for token in target[:-1]:
        if token in sentinels:
            spans[key := token] = []
        else:
            spans[key].append(token)
    return [token for each in source[:-1] for token in spans.get(each, [each])]


def line_of(tokenizer, texts):
    line = []
    for text in texts:
        line += [END] * bool(line) + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return line


def test_windows_of_text_are_corrupted_without_loss(load, t5_tokenizer):
    sentinels = t5_tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(20)])
    data = load(TEXTS, "first", num_samples=1000, seq_len=16)
    windows = [restore(*couple, sentinels) for couple in couples(data)]
    assert [token for window in windows for token in window] == line_of(t5_tokenizer, TEXTS)
    assert {len(window) for window in windows[:-1]} == {16}
    assert all(source[-1] == target[-1] == END for source, target in couples(data))
    assert (data.task, data.start, data.texts, data.seq_len) == ("span corruption", 0, 30, 16)
    assert data.tokens == sum(map(len, data.samples)) + sum(map(len, data.targets))


def test_neither_the_order_nor_the_number_of_samples_changes_the_spans(load):
    first = couples(load(TEXTS, "first", num_samples=1000, seq_len=16))
    drawn = couples(load(TEXTS, "random", num_samples=1000, seq_len=16))
    assert sorted(first) == sorted(drawn) and first != drawn
    assert couples(load(TEXTS, num_samples=3, seq_len=16)) == drawn[:3]
    assert couples(load(TEXTS, "first", num_samples=1000, seq_len=16, seed=1)) != first


def test_text_of_which_too_little_is_left(load, caplog):
    text = "the quick brown fox jumps"
    data = load([text], "first", num_samples=9, seq_len=2)
    assert len(data.samples) == 2
    assert "1 samples too short for span corruption of in-memory" in caplog.text
    with pytest.raises(CalibrationError, match=r"no usable tokens \(0 empty entries, 5 samples too short for span"):
        load([text], num_samples=9, seq_len=1)


def test_sentinels_in_the_text_itself_are_passed_over(load, t5_tokenizer):
    first, second = t5_tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>"])
    data = load(["the quick <extra_id_0> fox"], num_samples=1)
    assert sorted(data.samples[0].tolist() + data.targets[0].tolist()).count(first) == 1
    assert second in data.samples[0] and second in data.targets[0]


def test_token_ids_without_labels_are_corrupted_where_there_is_a_tokenizer(load, t5_tokenizer):
    sentinels = t5_tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(20)])
    lists = [[5, 6, 7, 8], [9, 10], [11]]
    data = load(lists, "first", num_samples=2)
    assert [restore(*couple, sentinels) for couple in couples(data)] == lists[:2]


@pytest.mark.parametrize("source", [TEXTS, [[5, 6, 7]]])
def test_without_sentinels_pairs_are_asked_for(load, tokenizer, source):
    for given in (tokenizer, None):
        with pytest.raises(CalibrationError, match=r"<extra_id_0>.*give pairs: .* target_column"):
            load(source, tokenizer=given, model=t5(vocab_size=280))


# Lengths and refusals


def test_lengths_of_a_model_without_a_longest_context(t5_model, t5_tokenizer):
    def length(seq_len=None, default=None):
        config = CalibrationConfig(TEXTS, seq_len=seq_len, num_samples=1)
        return load_samples(config, t5_model, t5_tokenizer, default_seq_len=default).seq_len

    assert (length(), length(default=128), length(default=4096), length(5000, 128)) == (512, 128, 2048, 5000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target_column": "anwser"},
            r"target_column 'anwser' is no column .* its columns: 'text' \(string\), 'answer'",
        ),
        ({"target_column": "n"}, r"target_column 'n' is no column of strings .* 'n' \(int64\)"),
        ({"target_column": "answer", "text_column": "txt"}, "text_column 'txt' is no column of strings"),
        (
            {"image_column": "text"},
            "image_column='text' is for image-text models, and T5ForConditionalGeneration is none",
        ),
    ],
)
def test_columns_that_cannot_be_used(load, options, message):
    with pytest.raises(CalibrationError, match=message):
        load(PAIRS, **options)


def test_two_candidates_for_the_input(load):
    dataset = Dataset.from_dict({"a": ["x"], "b": ["y"], "answer": ["z"]})
    with pytest.raises(
        CalibrationError, match=r"columns of the dataset besides 'answer', 2 hold strings.* Set text_column"
    ):
        load(dataset, target_column="answer")


def test_nothing_usable(load):
    dataset = Dataset.from_dict({"text": ["", "fox"], "answer": ["dog", " "]})
    with pytest.raises(CalibrationError, match=r"no usable tokens \(2 empty entries were left out\)"):
        load(dataset, target_column="answer")


def test_pairs_of_texts_need_a_tokenizer(load):
    with pytest.raises(CalibrationError, match="Texts need a tokenizer"):
        load(PAIRS, tokenizer=None, target_column="answer")


def test_a_tokenizer_of_another_model_is_refused(load):
    with pytest.raises(CalibrationError, match=r"this model's tokenizer\?.* holds token id \d+; .* 0 to 9"):
        load(PAIRS, target_column="answer", model=t5(vocab_size=10))


def test_token_ids_that_are_not_the_models(load):
    dataset = Dataset.from_dict({"input_ids": [[5]], "labels": [[96]]})
    with pytest.raises(CalibrationError, match="A row of target ids holds token id 96"):
        load(dataset, tokenizer=None)


def test_a_decoder_is_given_no_targets(model, tokenizer):
    for source in (PAIRS, "self"):
        config = CalibrationConfig(source, target_column="answer")
        with pytest.raises(
            CalibrationError, match="target_column='answer' is for encoder-decoder models, and LlamaFor"
        ):
            load_samples(config, model, tokenizer)


def test_a_model_that_does_not_say_how_an_answer_begins(load):
    model = t5(decoder_start_token_id=None)
    model.generation_config.decoder_start_token_id = 7
    assert load(PAIRS, model=model, target_column="answer").start == 7
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(CalibrationError, match="names no decoder_start_token_id"):
        load(PAIRS, model=model, target_column="answer")


def test_a_headless_model_that_does_not_say_how_an_answer_begins(load):
    with pytest.raises(CalibrationError, match="config of T5Model names no decoder_start_token_id"):
        load(PAIRS, model=T5Model(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2)), target_column="answer")


@torch.no_grad()
def test_the_batches_go_into_the_model(load, t5_model):
    for batch in load(TEXTS, num_samples=5, seq_len=16).batches(2, pad_token_id=0):
        assert t5_model(**batch).logits.shape[:2] == batch["decoder_input_ids"].shape
