"""Draws from lists, tables and streams: what is read and tokenised for them, and that they are seeded."""

import json
from collections import Counter
from itertools import count, pairwise
from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from optimum_prune import Pruner, PruningConfig, RecoveryConfig
from optimum_prune.calibration import choosing
from optimum_prune.calibration.choosing import in_order, runs
from optimum_prune.calibration.data import load_samples
from optimum_prune.calibration.request import resolve
from optimum_prune.calibration.rows import Rows, Stream
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.recovery.data import load_training_data
from tests.models import llama, t5

BUFFER = 50


class Counted:
    """Tokenizer that counts the texts that go through it."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **options):
        self.texts += len(text) if isinstance(text, list) else 1
        return self.tokenizer(text, **options)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(choosing, "BUFFER", BUFFER)
    monkeypatch.setattr(choosing, "PER_SAMPLE", 1)


def row(i: int) -> dict:
    question = f"what is {i}?"
    numbers = " ".join(map(str, range(i * 100, i * 100 + 100)))
    return {
        "text": f"{question} {numbers}",
        "question": question,
        "answer": f"it is {i}",
        "input_ids": [i % 280, i // 280 % 280, 5],
    }


def endless(*columns: str) -> tuple[IterableDataset, Counter]:
    """Return a stream without an end, and a counter of the rows that are read of it."""
    read = Counter()

    def generate():
        for i in count():
            read["rows"] += 1
            yield {name: row(i)[name] for name in columns}

    return IterableDataset.from_generator(generate), read  # pyright: ignore[reportReturnType]


def asked(source, num_samples=8, seed=0, order: Any = "random", seq_len=16, model=None):
    config = CalibrationConfig(source, num_samples=num_samples, seed=seed, seq_len=seq_len)
    return resolve(config, model or llama(vocab_size=280), None, order)


def ids(data):
    return [sample.tolist() for sample in data.samples]


# Streams


@pytest.mark.parametrize("order", ["random", "first"])
@pytest.mark.parametrize("columns", [("text",), ("input_ids",)])
def test_an_endless_stream_is_read_a_bounded_way(model, tokenizer, columns, order):
    stream, read = endless(*columns)
    data = load_samples(CalibrationConfig(stream, num_samples=8, seq_len=16), model, tokenizer, order=order)
    assert len(data.samples) == 8
    # Rows are read by 256, columns are found by 64 rows, and texts are tokenised by 2^18 characters.
    assert read["rows"] <= 1500
    again = load_samples(CalibrationConfig(stream, num_samples=8, seq_len=16), model, tokenizer, order=order)
    assert again.fingerprint == data.fingerprint
    if order == "first":
        assert data.first_rows is None and "first_rows" not in data.to_dict()


def test_the_report_names_the_rows_that_a_stream_was_drawn_from(model, tokenizer, caplog):
    caplog.set_level("INFO", "optimum_prune")
    stream, _ = endless("input_ids")
    data = load_samples(CalibrationConfig(stream, num_samples=2, seq_len=16), model, tokenizer)
    assert data.first_rows == data.to_dict()["first_rows"] == BUFFER
    assert all(sample[0] < BUFFER for sample in ids(data))
    assert f"Drawn from the first {BUFFER} rows of in-memory: IterableDataset" in caplog.text
    seeds = [load_samples(CalibrationConfig(stream, seed=seed, num_samples=8), model) for seed in range(3)]
    assert len({data.fingerprint for data in seeds}) == 3


def test_pairs_of_an_endless_stream(t5_model, t5_tokenizer):
    stream, read = endless("question", "answer")
    config = CalibrationConfig(stream, num_samples=8, seq_len=16, target_column="answer")
    data = load_samples(config, t5_model, t5_tokenizer)
    assert len(data.samples) == 8 and data.first_rows == BUFFER
    assert read["rows"] < 1000


def test_recovery_on_an_endless_stream(model, tokenizer):
    for columns in (("text",), ("input_ids",), ("question", "answer")):
        stream, read = endless(*columns)
        config = RecoveryConfig(stream, max_steps=4, batch_size=2, seq_len=16)
        data = load_training_data(config, model, tokenizer)
        assert len(data.train) == 8 and read["rows"] <= 1500
        assert data.sources[0]["first_rows"] % BUFFER == 0 and data.sources[0]["first_rows"] > 0


def test_a_whole_run_on_endless_streams():
    stream, _ = endless("input_ids")
    pruner = Pruner(llama(vocab_size=280))
    calibration = CalibrationConfig(stream, num_samples=4, seq_len=16)
    report = pruner.prune(PruningConfig(scorer="wanda", pattern="2:4", calibration=calibration))
    assert f"(drawn from its first {BUFFER} rows), 4 samples" in str(report)
    pruner.evaluate(stream, num_samples=4, seq_len=16)
    found = pruner.recover(RecoveryConfig(stream, max_steps=2, batch_size=2, seq_len=16))
    assert f"(drawn from its first {BUFFER} rows) (100%)" in str(found)


def test_a_stream_within_the_buffer_gives_the_draw_of_its_table(model, tokenizer, tmp_path):
    rows = [{"text": row(i)["text"]} for i in range(BUFFER)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = Dataset.from_list(rows)
    draws = [
        load_samples(CalibrationConfig(source, num_samples=5, seq_len=16), model, tokenizer)
        for source in (table, table.to_iterable_dataset(), str(tmp_path / "rows.jsonl"), str(tmp_path))
    ]
    assert len({data.fingerprint for data in draws}) == 1
    assert all(data.first_rows is None for data in draws)


def test_an_endless_stream_without_anything_usable_is_given_up(model, tokenizer):
    stream, read = endless("question", "answer")
    config = RecoveryConfig(stream, max_steps=4, batch_size=2, seq_len=2)
    with pytest.raises(CalibrationError, match=rf"no usable tokens .*{10 * BUFFER} samples of which no token would be"):
        load_training_data(config, model, tokenizer)
    assert read["rows"] < 1500


def test_a_buffer_that_does_not_suffice_is_filled_again():
    request = asked([[1]])
    found = list(in_order(Stream(range(3 * BUFFER + 7)), request, lambda i: i % 2 == 0))
    assert sorted(found) == list(range(0, 3 * BUFFER + 7, 2)) and found != sorted(found)
    assert [i // BUFFER for i in found] == sorted(i // BUFFER for i in found)
    assert request.seen["buffered"] == 0, "in the end all rows took part"


def test_the_buffer_is_bounded_by_what_its_rows_hold(monkeypatch):
    monkeypatch.setattr(choosing, "MEMORY", 1000)
    for item in ("x" * 100, b"x" * 100, [1] * 100, ("x" * 50, ["y" * 50]), [{"content": "x" * 96, "role": "user"}]):
        request = asked([[1]])
        next(in_order(Stream(item for _ in count()), request, lambda _: True))
        assert request.seen["buffered"] == 10


def test_many_samples_want_a_larger_buffer():
    request = asked([[1]], num_samples=3 * BUFFER)
    next(in_order(Stream(count()), request, lambda _: True))
    assert request.seen["buffered"] == 3 * BUFFER


# Tables


@pytest.mark.parametrize("kind", ["table", "file"])
def test_forty_thousand_rows_cost_as_much_as_two_thousand(model, tokenizer, tmp_path, kind):
    costs = []
    for number in (2_000, 40_000):
        source: Any = Dataset.from_dict({"text": [row(i)["text"] for i in range(number)]})
        if kind == "file":
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in source))
            source = str(tmp_path / "rows.jsonl")
        counted = Counted(tokenizer)
        data = load_samples(CalibrationConfig(source, num_samples=8, seq_len=16), model, counted)  # pyright: ignore[reportArgumentType]
        assert len(data.samples) == 8
        costs.append(counted.texts)
    assert costs[1] <= 1.1 * costs[0] < 1000


def test_rows_that_are_not_drawn_are_not_read(model):
    read = Counter()

    def item(row):
        read["rows"] += 1
        return row["input_ids"]

    table = Rows(Dataset.from_dict({"input_ids": [[i % 280] for i in range(1000)]}), item, "rows")
    found = in_order(table, asked([[1]]), lambda _: True)
    drawn = [next(found) for _ in range(8)]
    assert read["rows"] == 8 and len(set(map(tuple, drawn))) > 4


def test_runs_are_rows_that_follow_each_other_and_none_twice():
    texts = [f"{i:03} " + "x" * 16 for i in range(100)]  # 20 characters
    request = asked([[1]], seq_len=16)  # 64 characters: runs of 4 rows
    table = Rows(Dataset.from_dict({"text": texts}), lambda row: row["text"], "rows")
    found = [int(text[:3]) for text in runs(table, request) if text]
    assert sorted(found) == list(range(100)) and found != sorted(found)
    follows = sum(b == a + 1 for a, b in pairwise(found))
    assert follows > 50
    assert sorted(runs(Stream(texts), request), key=str) == texts


def test_windows_of_a_table_hold_texts_that_follow_each_other_from_random_rows_on(model, tokenizer):
    table = Dataset.from_dict({"text": [f" number {i}" for i in range(500)]})
    starts = set()
    for seed in range(3):
        config = CalibrationConfig(table, num_samples=4, seq_len=60, seed=seed)
        for sample in ids(load_samples(config, model, tokenizer)):
            numbers = [int(text.rpartition(" ")[2]) for text in tokenizer.decode(sample).split("</s>")[1:-1]]
            follows = sum(b == a + 1 for a, b in pairwise(numbers))
            assert len(numbers) >= 3 and follows >= len(numbers) - 3
            starts.add(numbers[0])
    assert len(starts) > 8 and max(starts) > 100


def test_spans_of_a_table_are_drawn(t5_tokenizer):
    table = Dataset.from_dict({"text": ["the quick brown fox jumps over the lazy dog"] * 4000})
    counted = Counted(t5_tokenizer)
    data = load_samples(CalibrationConfig(table, num_samples=4, seq_len=16), t5(eos_token_id=1), counted)  # pyright: ignore[reportArgumentType]
    assert len(data.samples) == 4 and data.task == "span corruption"
