"""Files, folders, datasets and dataset ids."""

import csv
import gzip
import json
import logging
import os
from dataclasses import replace

import datasets
import pytest
from datasets import Dataset, DatasetDict, Value

from optimum_prune.calibration.data import load_samples, source_name
from optimum_prune.calibration.sources import open_source
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError

TEXTS = ["first text", "second, with a comma\nand a line", "", "ünï"]
ROWS = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]


def read(source, **options):
    source = open_source(CalibrationConfig(source, **options))
    return source.kind, list(source.items)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """Work in an empty folder, and leave it empty."""
    folder = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(folder)
    yield
    assert os.listdir(folder) == []


def write_jsonl(path, rows, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_csv(path, rows, opener=open):
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


WRITERS = {
    "a.jsonl": write_jsonl,
    "A.JSONL": write_jsonl,
    "a.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "a.csv": write_csv,
    "a.parquet": lambda path, rows: Dataset.from_list(rows).to_parquet(path),
    "a.jsonl.gz": lambda path, rows: write_jsonl(path, rows, gzip.open),
    "a.csv.gz": lambda path, rows: write_csv(path, rows, gzip.open),
    "[a] *?.jsonl": write_jsonl,
}


@pytest.mark.parametrize("name", WRITERS)
def test_tables_give_their_text_column(tmp_path, name, capfd):
    WRITERS[name](tmp_path / name, ROWS)
    capfd.readouterr()
    kind, texts = read(tmp_path / name)
    assert kind == "texts" and [text or "" for text in texts] == TEXTS
    assert capfd.readouterr() == ("", ""), "quiet"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.TXT"])
def test_a_text_file_is_one_text(tmp_path, name):
    (tmp_path / name).write_text("\ufeffone\n\ntwo ü", encoding="utf-8")
    assert read(tmp_path / name) == ("texts", ["one\n\ntwo ü"])
    with gzip.open(tmp_path / f"{name}.gz", "wt", encoding="utf-8") as file:
        file.write("packed")
    assert read(tmp_path / f"{name}.gz") == ("texts", ["packed"])


def test_tables_of_pairs(tmp_path):
    rows = [{"question": "a", "answer": "b"}, {"question": "c", "answer": None}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    expected = ("text pairs", [("a", "b"), ("c", None)])
    for source in (tmp_path / "a.jsonl", tmp_path / "a.parquet", Dataset.from_list(rows)):
        assert read(source, target_column="answer") == expected
    assert read(tmp_path / "a.jsonl", target_column="question", text_column="answer")[1] == [("b", "a"), (None, "c")]


def test_tables_of_token_ids_with_targets(tmp_path):
    rows = [{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": [7, -100]}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    expected = ("token pairs", [([5, 6], [7])])
    assert read(tmp_path / "a.jsonl", target_column="labels") == expected
    config = CalibrationConfig(tmp_path / "a.jsonl")
    source = open_source(config, "encoder-decoder")
    assert (source.kind, list(source.items)) == expected
    assert open_source(config).kind == "token ids"


def test_a_folder_of_pairs(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "answer": "b"}])
    write_csv(tmp_path / "b.csv", [{"text": "c", "answer": "d"}])
    assert read(tmp_path, target_column="answer") == ("text pairs", [("a", "b"), ("c", "d")])
    (tmp_path / "c.txt").write_text("plain")
    with pytest.raises(CalibrationError, match=r"target_column='answer' names a column, and '.*c\.txt' has none"):
        read(tmp_path, target_column="answer")


@pytest.mark.parametrize("source", [["a text"], [[1, 2]]])
@pytest.mark.parametrize("option", ["target_column", "image_column"])
def test_a_list_has_no_columns(source, option):
    with pytest.raises(CalibrationError, match=rf"{option}='x' names a column, and a list has none\. Give a dataset"):
        read(source, **{option: "x"})


def test_tables_of_token_ids(tmp_path):
    rows = [{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, {"input_ids": [7], "attention_mask": [1]}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "a.parquet") == ("token ids", [[5, 6], [7]])


def test_a_folder_gives_its_files_in_order(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ROWS[:2])
    (tmp_path / "c.txt").write_text("last")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "model.bin").write_text("not a text")
    (tmp_path / "nested").mkdir()
    assert read(tmp_path) == ("texts", ["first", *TEXTS[:2], "last"])


def test_files_are_opened_when_they_are_reached(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    items = iter(open_source(CalibrationConfig(str(tmp_path))).items)
    assert next(items) == "first"
    with pytest.raises(CalibrationError, match=r"b\.txt'.*utf-8"):
        next(items)


def test_saved_datasets_and_their_splits(tmp_path):
    train, test = Dataset.from_list(ROWS), Dataset.from_list(ROWS[:1])
    train.save_to_disk(tmp_path / "one")
    DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "one") == read(tmp_path / "two") == ("texts", TEXTS)
    assert read(tmp_path / "two", split="test") == ("texts", TEXTS[:1])
    with pytest.raises(
        CalibrationError, match=r"Unknown split 'tset'; supported: 'train', 'test'\. Did you mean 'test'"
    ):
        read(tmp_path / "two", split="tset")


def test_datasets_in_memory_and_streamed():
    dataset = Dataset.from_list(ROWS)
    assert read(dataset) == read(dataset.to_iterable_dataset()) == ("texts", TEXTS)
    other = dataset.rename_column("text", "body")
    assert read(other) == read(other.cast_column("body", Value("large_string"))) == ("texts", TEXTS)


def test_a_text_column_that_is_named_comes_before_everything_else():
    dataset = Dataset.from_dict({"input_ids": [[1]], "text": ["a"], "title": ["b"], "n": [1]})
    assert read(dataset) == ("token ids", [[1]])
    assert read(dataset, text_column="title") == ("texts", ["b"])
    assert read(dataset.remove_columns("input_ids")) == ("texts", ["a"])


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"n": [1]}, {}, r"columns of the dataset, 0 hold strings.* its columns: 'n' \(int64\)"),
        (
            {"a": ["x"], "b": ["y"]},
            {},
            r"2 hold strings, none of these called 'text'; its columns: 'a' \(string\), 'b' \(string\)",
        ),
        ({"text": [["x"]]}, {}, r"its columns: 'text' \(List\)"),
        ({"text": ["x"]}, {"text_column": "txt"}, "text_column 'txt' is no column .* its columns: 'text'"),
        ({"text": ["x"], "n": [1]}, {"text_column": "n"}, "text_column 'n' is no column of strings"),
        ({}, {}, "its columns: none"),
    ],
)
def test_a_dataset_without_the_text_column_has_its_columns_listed(columns, options, message):
    with pytest.raises(CalibrationError, match=message):
        read(Dataset.from_dict(columns), **options)


def test_mixed_json_values_are_no_text(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": 3}])
    with pytest.raises(CalibrationError, match=r"its columns: 'text' \("):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "JSON parse error"),
        ("a.jsonl", b"", "it is empty"),
        ("a.jsonl.gz", b"no gzip", "gzip"),
        ("a.csv", b"a,b\n1\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        ("a.csv", b"", "No columns to parse"),
        ("a.parquet", b"no parquet", "Parquet magic bytes not found"),
        ("a.txt", b"\xff\xfe\x00", "'utf-8' codec can't decode"),
        ("a.txt.gz", b"no gzip", "gzip"),
        ("a.txt.gz", gzip.compress(os.urandom(1000))[:500], "end-of-stream"),
    ],
)
def test_damaged_files_are_named_with_the_reason(tmp_path, name, content, reason, caplog):
    (tmp_path / name).write_bytes(content)
    logger = logging.getLogger("datasets")
    caplog.set_level(logging.INFO, "datasets")
    logger.addHandler(caplog.handler)
    with pytest.raises(CalibrationError, match=rf"Cannot read '.*{name}': .*{reason}") as caught:
        read(tmp_path / name)
    assert caught.value.__cause__ is not None
    logger.removeHandler(caplog.handler)
    assert not caplog.records, "one message, not two"
    assert logger.level == logging.INFO


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(CalibrationError, match=r"holds no file that can be read: \.txt, \.md"):
        read(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [1]}])
    with pytest.raises(CalibrationError, match=r"mixes texts and token ids.*: a.txt texts, b.jsonl token ids"):
        read(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CalibrationError, match="Cannot read '"):
        read(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.docx").write_text("")
    with pytest.raises(CalibrationError, match=r"a.docx': its suffix must be one of \.txt, \.md, .*\.parquet"):
        read(tmp_path / "a.docx")


@pytest.mark.parametrize(
    "source",
    [
        "no/such/file",
        "/no/such",
        "missing.txt",
        "data/missing.jsonl.gz",
        "~nobody/x y",
        "A text, not a list. " * 99,
        "../up",
        "note: this",
    ],
)
def test_what_is_neither_a_file_nor_an_id_is_refused_without_the_network(source, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(CalibrationError, match=r"does not exist\. Give a file .*, a folder, a dataset id") as caught:
        read(source)
    assert len(str(caught.value)) < 300


def test_data_that_a_written_config_does_not_hold():
    written = CalibrationConfig(["a text"]).to_dict()
    with pytest.raises(CalibrationError, match=r"written without its data .*1 texts.*source to the data again"):
        open_source(CalibrationConfig.from_dict(written))


@pytest.mark.parametrize(
    ("source", "path", "name"),
    [
        ("org/data", "org/data", None),
        ("org/data:part-v1.0", "org/data", "part-v1.0"),
        ("squad", "squad", None),
        ("org/data:", None, None),
    ],
)
def test_dataset_ids_are_loaded_with_name_and_split(monkeypatch, source, path, name):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    if path is None:
        with pytest.raises(CalibrationError, match="does not exist"):
            read(source)
    else:
        assert read(source, split="test") == ("texts", TEXTS)
        assert calls == [((path, name), {"split": "test"})]


def test_errors_of_dataset_ids_say_what_was_asked_and_why_not(monkeypatch):
    def load_dataset(*args, **options):
        try:
            raise RuntimeError("broken file")
        except RuntimeError as error:
            raise ValueError("Config name is missing.\nPick one among: ['a', 'b']") from error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = (
        r"Cannot read dataset 'org/data', split 'train' \(no file or folder has this name\): "
        r"Config name is missing. Pick one among: \['a', 'b'\]: broken file\."
    )
    with pytest.raises(CalibrationError, match=message):
        read("org/data")


def test_a_folder_gives_the_split_that_is_asked_for(tmp_path):
    for split in ("train", "validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [{"text": split}])
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nThe card.")
    assert read(tmp_path) == ("texts", ["train"])
    for split in ("train", "validation", "test"):
        assert read(tmp_path, split=split) == ("texts", [split])
    with pytest.raises(CalibrationError, match=rf"'tset'; supported: 'train', 'validation', 'test'\..*of '{tmp_path}'"):
        read(tmp_path, split="tset")


def test_a_configuration_of_a_folder(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train.jsonl", [{"text": name}])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*\n" for name in ("one", "two"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert read(f"{tmp_path}:two") == ("texts", ["two"])
    assert source_name(CalibrationConfig(f"{tmp_path}:two")) == f"{tmp_path}:two"


def test_a_folder_of_texts_has_one_split(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    assert read(tmp_path, split="train") == ("texts", ["one"])
    with pytest.raises(CalibrationError, match=r"Unknown split 'test'; supported: 'train'\."):
        read(tmp_path, split="test")
    with pytest.raises(CalibrationError, match=r"text_column='body' names a column, and '.*a\.txt' has none"):
        read(tmp_path, text_column="body")
    write_jsonl(tmp_path / "b.jsonl", [{"body": "two", "title": "x"}])
    assert read(tmp_path, text_column="body") == ("texts", ["one", "two"])


def test_a_split_that_can_have_no_effect_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    dataset = Dataset.from_list(ROWS)
    for source in (["a text"], [[1, 2]], str(tmp_path / "a.txt"), str(tmp_path / "a.jsonl"), dataset):
        read(source, split="train")
        with pytest.raises(CalibrationError, match=r"split='test' has no effect on .*, which has no splits"):
            read(source, split="test")
    dataset.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(CalibrationError, match=r"Unknown split 'test'; supported: 'train'"):
        read(tmp_path / "saved", split="test")
    tested = Dataset.from_list(ROWS, split=datasets.Split.TEST)
    assert read(tested, split="test") == ("texts", TEXTS), "true, if needless"


@pytest.mark.parametrize("source", [["a text"], [[1, 2]], "a.txt"])
def test_a_text_column_that_can_have_no_effect_is_refused(tmp_path, source):
    (tmp_path / "a.txt").write_text("text")
    source = tmp_path / source if isinstance(source, str) else source
    with pytest.raises(CalibrationError, match=r"text_column='x' names a column, and .* has none"):
        read(source, text_column="x")


@pytest.mark.parametrize("option", ["split", "text_column"])
def test_options_of_text_that_the_model_writes_are_refused(model, option):
    config = replace(CalibrationConfig("self", num_samples=1, seq_len=2), **{option: "x"})
    with pytest.raises(CalibrationError, match=rf"{option}='x'.* \(source 'self'\)"):
        load_samples(config, model)
