"""What is not read is refused by its name, with a line that converts it: the line is executed here."""

import json
import re
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict

from optimum_prune.calibration.data import load_samples
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.data import load_training_data
from tests.models import llama, t5

MODEL = llama(vocab_size=280, max_position_embeddings=4096, num_hidden_layers=1)
LINE = re.compile(r"((?:dataset = |datasets\.)\S.*?\)) ?(?=To |Column |$)", re.MULTILINE)
REFUSED: dict[str, Any] = {
    "other keys": {"dialog": [{"speaker": "a", "utterance": "the fox"}, {"speaker": "b", "utterance": "jumps"}]},
    "one key": {"turns": [{"said": "the fox"}, {"said": "jumps"}]},
    "both in one": {"conversation": [{"human": "the fox", "assistant": "jumps"}]},
    "messages of other keys": {"messages": [{"who": "a", "text": "the fox"}, {"who": "b", "text": "jumps"}]},
    "texts": {"dialog": ["the fox", "jumps", "the end"]},
    "words": {"tokens": ["the", "fox"], "tags": [1, 2]},
    "records": {"translation": {"text": "the fox"}, "n": 1},
    "two texts": {"title": "the fox", "body": "jumps"},
    "beside an id": {"id": "7", "dialogue": ["the fox", "jumps"]},
}


def line_of(error: CalibrationError) -> str:
    lines = LINE.findall(str(error))
    assert lines, str(error)
    return lines[0]


@pytest.fixture
def rows(request):
    """As many rows as recovery needs, none equal to another."""

    def numbered(value: Any, n: int) -> Any:
        if isinstance(value, dict):
            return {key: numbered(item, n) for key, item in value.items()}
        if isinstance(value, list):
            return [numbered(item, n) for item in value]
        return f"{value} {n}" if isinstance(value, str) else value

    return [numbered(REFUSED[request.param], n) for n in range(12)]


def use(source: Any, tokenizer: Any) -> None:
    """Calibrate, evaluate and train on a source."""
    for order in ("random", "first"):
        data = load_samples(CalibrationConfig(source, num_samples=4), MODEL, tokenizer, order=order)  # pyright: ignore[reportArgumentType]
        assert data.samples and "fox" in "".join(map(tokenizer.decode, data.samples))
    assert load_training_data(RecoveryConfig(source, num_samples=4, seq_len=8), MODEL, tokenizer).train


@pytest.mark.parametrize("rows", REFUSED, indirect=True)
def test_a_dataset_is_converted(rows, tokenizer):
    dataset = Dataset.from_list(rows)
    messages = set()
    for load in (
        lambda: load_samples(CalibrationConfig(dataset), MODEL, tokenizer),
        lambda: load_samples(CalibrationConfig(dataset), MODEL, tokenizer, order="first"),
        lambda: load_training_data(RecoveryConfig(dataset), MODEL, tokenizer),
    ):
        with pytest.raises(CalibrationError, match="Of the columns of the dataset") as caught:
            load()
        messages.add(str(caught.value))
    assert len(messages) == 1, "the same everywhere"
    names = {"dataset": dataset}
    exec(line_of(caught.value), names)
    use(names["dataset"], tokenizer)


@pytest.mark.parametrize("rows", ["other keys", "two texts"], indirect=True)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "saved", "saved splits"])
def test_a_file_is_converted(rows, kind, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset, split = Dataset.from_list(rows), "train"
    if kind == "jsonl":
        source = tmp_path / "it's.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        source = tmp_path / "rows.parquet"
        dataset.to_parquet(source)
    else:
        source, split = tmp_path / "data", "train" if kind == "saved" else "test"
        if kind == "folder":
            source.mkdir()
            dataset.to_parquet(source / "test-00000-of-00001.parquet")
        else:
            (dataset if kind == "saved" else DatasetDict({"test": dataset})).save_to_disk(str(source))
    with pytest.raises(CalibrationError) as caught:
        load_samples(CalibrationConfig(str(source), split=split), MODEL, tokenizer)
    exec(line_of(caught.value), {"datasets": datasets})
    use("converted.jsonl", tokenizer)


@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_chats_for_an_encoder_decoder(keys, t5_tokenizer):
    turns = [dict(zip(keys, said, strict=True)) for said in (("user", "the quick fox"), ("assistant", "jumps over"))]
    dataset = Dataset.from_dict({"messages": [turns] * 4})
    with pytest.raises(CalibrationError, match="An encoder-decoder reads questions with answers") as caught:
        load_samples(CalibrationConfig(dataset), t5(eos_token_id=1), t5_tokenizer)
    names = {"dataset": dataset}
    exec(line_of(caught.value), names)
    data = load_samples(CalibrationConfig(names["dataset"]), t5(eos_token_id=1), t5_tokenizer)
    assert data.task == "pairs" and t5_tokenizer.decode(data.samples[0], skip_special_tokens=True) == "the quick fox"


def test_turns_that_are_only_known_once_they_are_read(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    mixed = [[{"role": "user", "content": "the fox"}], [{"role": "user", "content": [{"type": "text", "text": "dog"}]}]]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in mixed))
    data = load_samples(CalibrationConfig(str(path)), MODEL, tokenizer)
    assert sorted(map(tokenizer.decode, data.samples)) == ["dog\n", "the fox\n"]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]}) + "\n")
    with pytest.raises(CalibrationError, match="a part of type 'image', and words are of type 'text'"):
        load_samples(CalibrationConfig(str(path)), MODEL, tokenizer)
