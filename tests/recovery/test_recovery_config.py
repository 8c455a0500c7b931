"""RecoveryConfig: what it refuses, and that it is the same in Python, JSON and YAML."""
# pyright: reportArgumentType=false

import json

import pytest
import yaml
from datasets import Dataset

from optimum_prune.errors import InvalidConfig
from optimum_prune.recovery.config import RecoveryConfig

NUMBERS = {
    "max_steps": 1,
    "batch_size": 1,
    "gradient_accumulation": 1,
    "seq_len": 1,
    "num_samples": 1,
    "teacher_top_k": 1,
    "rank": 1,
    "evaluations": 1,
    "patience": 1,
    "seed": 0,
}
FRACTIONS = ("kl_weight", "warmup", "dropout", "held_out")


@pytest.mark.parametrize(("name", "lowest"), NUMBERS.items())
def test_integers(name, lowest):
    # where the seeds of NumPy end, which a Trainer sets, too
    for value in (lowest - 1, 1.5, "2", True, *([2**32] if name == "seed" else [])):
        with pytest.raises(
            InvalidConfig, match=rf"^{name} must be an integer >= {lowest}( and < 4294967296)?, got {value!r}\.$"
        ):
            RecoveryConfig(**{name: value})
    assert getattr(RecoveryConfig(**{"loss": "kl", name: lowest}), name) == lowest


@pytest.mark.parametrize("name", FRACTIONS)
def test_fractions(name):
    for value in (-0.1, 1, 1.5, float("nan"), "0.5", True):
        with pytest.raises(InvalidConfig, match=rf"^{name} must be a number >=? 0 and < 1, got {value!r}\.$"):
            RecoveryConfig(**{name: value})
    assert getattr(RecoveryConfig(**{name: 0.5}), name) == 0.5


@pytest.mark.parametrize("name", ["learning_rate", "alpha"])
def test_positive_numbers(name):
    for value in (0, -1, float("inf"), float("nan"), "fast"):
        with pytest.raises(InvalidConfig, match=rf"^{name} must be a finite number > 0, got {value!r}\.$"):
            RecoveryConfig(**{name: value})
    assert getattr(RecoveryConfig(**{name: 3}), name) == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss", "ml", r"^Unknown loss 'ml'.*lm"),
        ("merge", "masket", r"^Unknown merge 'masket'.*masked"),
        ("schedule", "cosin", r"^Unknown schedule 'cosin'.*cosine"),
        ("dataset", "", "^dataset must be "),
        ("dataset", {}, r"^dataset must be a source, or a non-empty mapping of sources to their shares, got \{\}"),
        ("dataset", {"self": 0}, r"^dataset\['self'\] must be a finite number > 0, got 0"),
        ("dataset", {"self": "half"}, r"^dataset\['self'\] must be a finite number > 0, got 'half'"),
        ("dataset", {"": 1}, "^dataset must be a source, or a non-empty mapping"),
        ("dataset", {3: 1}, "^dataset must be a source, or a non-empty mapping"),
        ("dataset", 3, "^dataset must be "),
        ("text_column", "", "^text_column must be "),
        ("target_column", 1, "^target_column must be "),
        ("image_column", "", "^image_column must be "),
        ("split", "", "^split must be "),
        ("target_modules", 3, "^target_modules must be "),
        ("target_modules", [""], "^target_modules must be "),
        ("teacher_device", 0, "^teacher_device must be "),
        ("gradient_checkpointing", "yes", "^gradient_checkpointing must be "),
        ("trainer_options", ["bf16"], "^trainer_options must be a mapping of names to values"),
        ("trainer_options", {"optim": object()}, "^trainer_options must be a mapping of names to values that JSON"),
    ],
)
def test_refusals(name, value, message):
    with pytest.raises(InvalidConfig, match=message):
        RecoveryConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "a", "target_column": "a"}, "^text_column and target_column are both 'a'; a question and"),
        ({"teacher_top_k": 8}, "^teacher_top_k has no meaning with loss 'lm', which asks no teacher"),
        ({"teacher_device": "cpu"}, "^teacher_device has no meaning with loss 'lm'"),
    ],
)
def test_fields_that_do_not_go_together(options, message):
    with pytest.raises(InvalidConfig, match=message):
        RecoveryConfig(**options)


FULL = RecoveryConfig(
    dataset={"self": 1, "text.txt": 3.5},
    loss="mix",
    teacher_top_k=8,
    target_modules=["q_proj", "*.1.*"],
    merge="remask",
    patience=3,
    trainer_options={"bf16": True, "lr_scheduler_kwargs": {"min_lr": 0.1}},
)


@pytest.mark.parametrize("config", [RecoveryConfig(), FULL], ids=["defaults", "full"])
def test_the_same_in_json_and_yaml(config):
    assert RecoveryConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert RecoveryConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_data_in_memory_is_described_and_not_copied():
    for data in ([[3, 4, 5]], Dataset.from_dict({"text": ["a b c"]})):
        described = RecoveryConfig(data).to_dict()
        assert described["dataset"].startswith("in-memory: ")
        json.dumps(described)
    assert RecoveryConfig([[3, 4]]).to_dict() != RecoveryConfig([[3, 5]]).to_dict()


def test_a_teacher_is_asked_unless_the_text_is_enough():
    assert [RecoveryConfig(loss=loss).uses_teacher for loss in ("lm", "kl", "mix")] == [False, True, True]
