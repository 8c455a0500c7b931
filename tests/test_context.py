"""Sentences that say whether a model is measured on what it was calibrated or trained on."""
# pyright: reportArgumentType=false

import logging

import pytest

from optimum_prune.calibration.passages import passages
from optimum_prune.calibration.samples import CalibrationData
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.context import Seen, context, seen_by
from optimum_prune.integrations.page import page
from optimum_prune.pruner import Pruner
from optimum_prune.recovery.config import RecoveryConfig
from tests.models import llama, tokens
from tests.reports import recovery, report
from tests.words import tokenizer

MORE = "on other text it may have lost more."


def data(source="org/texts:small", split="train", seed=0):
    return CalibrationData(list(tokens(4, 64, seed)), 64, source, split=split)


def seen(source="org/texts:small", split="train", seed=1, role="calibrated"):
    found = data(source, split, seed)
    return Seen(role, [found.origin], passages(found.rows()))


@pytest.mark.parametrize(
    ("calibration", "evaluation", "sentence"),
    [
        (
            ("org/texts:small", "train"),
            ("org/texts:small", "train"),
            f"Measured on the data that the model was calibrated on (org/texts:small, split train): {MORE}",
        ),
        (
            ("org/texts:small", "train"),
            ("org/texts:small", "test"),
            f"Measured on the kind of text that the model was calibrated on (org/texts:small, split train): {MORE}",
        ),
        (
            ("org/texts:small", "train"),
            ("org/texts:large", "train"),
            "Measured on another source than the model was calibrated on (org/texts:small, split train).",
        ),
        (
            ("/my/wiki.valid.txt", None),
            ("/my/wiki.test.txt", None),
            f"Measured on the kind of text that the model was calibrated on (wiki.valid.txt): {MORE}",
        ),
        (
            ("/my/train.jsonl", None),
            ("/my/test.jsonl", None),
            f"Measured on the kind of text that the model was calibrated on (train.jsonl): {MORE}",
        ),
        (
            ("/my/code.txt", None),
            ("/my/wiki.txt", None),
            "Measured on another source than the model was calibrated on (code.txt).",
        ),
        (
            ("/my/contest.txt", None),
            ("/my/contrain.txt", None),
            "Measured on another source than the model was calibrated on (contest.txt).",
        ),
        (
            ("self", None),
            ("/my/wiki.txt", None),
            "Measured on another source than the model was calibrated on (text that it wrote itself).",
        ),
        (
            ("in-memory: 4 texts, sha256 0123", None),
            ("in-memory: 4 texts, sha256 0123", None),
            f"Measured on the data that the model was calibrated on (in-memory: 4 texts, sha256 0123): {MORE}",
        ),
        (  # two datasets may have the same columns
            ("in-memory: Dataset, columns: text", None),
            ("in-memory: Dataset, columns: text", None),
            "Measured on another source than the model was calibrated on (in-memory: Dataset, columns: text).",
        ),
    ],
)
def test_sources_are_known_by_their_names(calibration, evaluation, sentence, caplog):
    assert context([seen(*calibration)], data(*evaluation)) == [sentence]
    assert caplog.messages == ([sentence] if "on the data" in sentence else [])


def test_the_same_text_under_another_name(caplog):
    sentences = context([seen("/my/a.txt", None, seed=0)], data("/other/b.txt", None))
    assert sentences == [
        "Measured on the data that the model was calibrated on (a.txt; 100% of the measured passages are in "
        f"it): {MORE}"
    ]
    assert caplog.messages == sentences


def test_the_same_source_tells_how_much_of_it_was_seen():
    (sentence,) = context([seen(seed=0)], data())
    assert "(org/texts:small, split train; 100% of the measured passages were among its samples): " in sentence


def test_the_same_data_in_several_roles_is_one_sentence():
    sentences = context([seen(), seen(role="trained"), seen("org/others", role="trained")], data(split="test"))
    assert [sentence.partition(" (")[0] for sentence in sentences] == [
        "Measured on the kind of text that the model was calibrated and trained on",
        "Measured on another source than the model was trained on",
    ]


def test_all_data_of_a_report():
    earlier = {
        "recipe": {"calibration": {"source": "org/first", "split": "train"}},
        "calibration": {"fingerprint": "sha256:0", "tokens": 9},
        "recovery": [{"data": {"sources": [{"source": "org/second"}]}}],
    }
    unused = {"recipe": {"calibration": {"source": "self"}}}
    found = seen_by(report(previous=[earlier, unused], recovery=[recovery(), recovery(kept=False)]))
    assert [(one.role, one.sources[0]["source"]) for one in found] == [
        ("calibrated", "org/first"),
        ("trained", "org/second"),
        ("calibrated", "org/texts:small"),
        ("trained", recovery().data["sources"][0]["source"]),
    ]
    assert seen_by(None) == []


TEXTS = {
    name: " ".join(f"w{3 + int(token) % 90}" for token in tokens(1, 700, seed)[0]) for seed, name in enumerate("ab")
}


def test_from_pruning_to_the_page(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "optimum_prune")
    (tmp_path / "a.txt").write_text(TEXTS["a"])
    (tmp_path / "copy.txt").write_text("w9 " + TEXTS["a"])
    (tmp_path / "b.txt").write_text(TEXTS["b"])
    pruner = Pruner(llama(), tokenizer())
    calibration = CalibrationConfig(str(tmp_path / "a.txt"), num_samples=30, seq_len=60)
    pruner.evaluate(calibration.source, num_samples=4, seq_len=64, latency=False)
    assert pruner.evaluations["dense"].context == [], "nothing has shaped it yet"
    pruner.prune(PruningConfig(scorer="wanda", sparsity=0.3, calibration=calibration))

    def told(name):
        caplog.clear()
        found = pruner.evaluate(str(tmp_path / name), num_samples=4, seq_len=64, latency=False)
        assert pruner.evaluations["pruned"] is found
        (sentence,) = found.context
        assert caplog.messages.count(sentence) == ("on the data" in sentence)
        return sentence

    assert told("b.txt") == "Measured on another source than the model was calibrated on (a.txt)."
    assert told("copy.txt").startswith("Measured in part on the data that the model was calibrated on (a.txt; ")
    sentence = told("a.txt")
    assert sentence.startswith("Measured on the data that the model was calibrated on (a.txt; ")

    pruner.save_pretrained(tmp_path / "pruned")
    assert sentence in pruner.comparison()
    assert sentence in (tmp_path / "pruned" / "README.md").read_text()
    again = Pruner.from_pretrained(tmp_path / "pruned")
    assert again.evaluations["pruned"].context == [sentence]
    assert sentence in page(again.report, again.evaluations, title="x")
    again.evaluate(str(tmp_path / "copy.txt"), num_samples=4, seq_len=64, latency=False)
    assert "are in it" in again.evaluations["pruned"].context[0], "the report has the passages"
    assert "passages" not in (tmp_path / "pruned" / "config.json").read_text()


@pytest.mark.parametrize("shared", ["texts", "copy"])
def test_measured_on_what_it_was_trained_on(shared, caplog):
    caplog.set_level(logging.WARNING, "optimum_prune")
    texts = [TEXTS["a"]]
    pruner = Pruner(llama(), tokenizer())
    pruner.prune(PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global"))
    pruner._stages.load_dense = llama
    training = RecoveryConfig(texts, max_steps=2, batch_size=4, seq_len=32, learning_rate=1e-2)
    pruner.recover(training).kept = True  # so little training may not help
    texts = texts if shared == "texts" else [f"w5 {texts[0]}"]
    found = pruner.evaluate(texts, num_samples=8, seq_len=48, latency=False)
    assert "that the model was trained on (in-memory: 1 texts" in found.context[0]
    assert found.context[0] in caplog.text
