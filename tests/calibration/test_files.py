"""The data files of a folder, by split: the same as `datasets.load_dataset(folder)` finds."""

import json
import os
from itertools import chain

import datasets
import pytest
from datasets import Dataset

from optimum_prune.calibration.files import data_files, options_of
from optimum_prune.errors import CalibrationError

CONFIGURED = """---
configs:
- config_name: one
  data_files:
  - split: train
    path: one/train-*
- config_name: two
  data_files:
  - split: train
    path: two/train-*
  - split: held
    path: two/held-*
---
# The card
"""


def fill(folder, *names):
    """Write tables whose only text is their own name; other files hold the name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            Dataset.from_dict({"text": [name]}).to_parquet(folder / name)
        else:
            (folder / name).write_text(json.dumps({"text": name}) if name.endswith(".jsonl") else name)
    return str(folder)


def found(folder, name=None):
    return {
        split: [os.path.relpath(file, folder) for file in files]
        for split, files in data_files(str(folder), name).items()
    }


LAYOUTS = {
    "shards of the Hub": {
        "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        "test": ["data/test-00000-of-00001.parquet"],
    },
    "names": {"train": ["train.jsonl"], "validation": ["validation.jsonl"], "test": ["test.jsonl"]},
    "parts of names": {"train": ["my_train_1.jsonl", "my_train_2.jsonl"], "validation": ["my-dev.jsonl"]},
    "folders": {"train": ["a/train/x.jsonl", "a/train/y.jsonl"], "test": ["a/test/z.jsonl"]},
    "no names": {"train": ["b.jsonl", "deeper/and/deeper/a.jsonl"]},
    "one split": {"validation": ["deeper/valid.jsonl"]},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_splits_are_those_of_load_dataset(tmp_path, layout):
    fill(tmp_path / "data set", "README.md", "LICENSE", ".git/train.jsonl", *chain(*layout.values()))
    folder = tmp_path / "data set"
    assert found(folder) == layout
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {split: sorted(rows["text"]) for split, rows in loaded.items()} == layout


def test_a_card_that_names_configurations_decides(tmp_path):
    fill(tmp_path, "one/train-1.jsonl", "two/train-1.jsonl", "two/held-1.jsonl")
    (tmp_path / "README.md").write_text(CONFIGURED)
    assert found(tmp_path, "one") == {"train": ["one/train-1.jsonl"]}
    assert found(tmp_path, "two") == {"train": ["two/train-1.jsonl"], "held": ["two/held-1.jsonl"]}
    with pytest.raises(CalibrationError, match=rf"named '{tmp_path}:NAME'\): Config name is missing.*'one', 'two'"):
        data_files(str(tmp_path))
    with pytest.raises(CalibrationError, match=r"'three' not found\. Available: \['one', 'two'\]"):
        data_files(str(tmp_path), "three")


def test_texts_without_names_of_splits_are_all_train(tmp_path):
    fill(tmp_path, "b.txt", "a.md", "chapter/c.txt.gz", "LICENSE.md", "licence.txt", "NOTICE.txt", ".draft.txt", "m.h5")
    assert found(tmp_path) == {"train": ["a.md", "b.txt", "chapter/c.txt.gz"]}


@pytest.mark.parametrize(
    "names",
    [[], ["README.md"], ["README.md", "LICENSE.txt"], [".hidden/a.txt"], ["model.bin"], ["train.arrow", "notes.txt"]],
)
def test_folders_without_data(tmp_path, names):
    fill(tmp_path, *names)
    with pytest.raises(CalibrationError, match=r"holds no file that can be read: \.txt, .*README, licence and hidden"):
        data_files(str(tmp_path))


def test_a_broken_card(tmp_path):
    fill(tmp_path, "a.jsonl")
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(CalibrationError, match=r"Cannot read '.*README\.md': while parsing"):
        data_files(str(tmp_path))


def test_names_with_characters_of_patterns(tmp_path):
    folder = tmp_path / "[a] *?"
    fill(folder, "train [1].jsonl", "test.jsonl")
    assert found(folder) == {"train": ["train [1].jsonl"], "test": ["test.jsonl"]}


def test_options_that_can_have_an_effect(tmp_path):
    columns = {"text_column", "target_column", "image_column"}
    fill(tmp_path, "a.txt", "a.jsonl")
    assert options_of(["text"]) == options_of("self") == options_of(str(tmp_path / "a.txt")) == set()
    assert options_of(str(tmp_path / "a.jsonl")) == options_of(Dataset.from_dict({"text": ["a"]})) == columns
    assert options_of(str(tmp_path)) == options_of("org/data") == {"split", *columns}
