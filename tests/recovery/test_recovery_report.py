"""The report of a recovery: the same as JSON, short in a config, readable as a table."""

import json
from dataclasses import replace

import pytest

from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.report import Losses, RecoveryReport, describe_losses

DATA = {
    "sources": [{"source": "self", "share": 0.5}, {"source": "org/texts", "share": 0.5}],
    "samples": 800,
    "tokens": 40960,
    "trained_tokens": 40160,
    "held_out": 89,
    "fingerprint": "sha256:ab",
}
REPORT = RecoveryReport(
    config=RecoveryConfig("text.txt").to_dict(),
    data=DATA,
    before=Losses(3.0, 0.75),
    after=Losses(2.0, 0.25),
    merged=Losses(2.5, 0.5),
    kept=True,
    steps=200,
    best_step=180,
    curve=[{"step": 1, "train": 3.0}, {"step": 20, "held_out": 2.0}],
    trained_parameters=1000,
    zeros_before=5000,
    zeros_after=4000,
    seconds=1.25,
    machine="cpu, float32, CPU threads: 2",
)
CONTROL = replace(REPORT, merged=None, before=Losses(2.5), after=Losses(1.5), zeros_before=0, zeros_after=0)
NOT_KEPT = replace(REPORT, merged=None, kept=False, after=REPORT.before, best_step=0, zeros_after=5000)


@pytest.mark.parametrize(
    "report", [REPORT, replace(REPORT, control=CONTROL, warnings=["Beware."]), CONTROL, NOT_KEPT], ids=range(4)
)
def test_the_same_in_json(report):
    read = RecoveryReport.from_dict(json.loads(json.dumps(report.to_dict(), allow_nan=False)))
    assert read == report
    assert isinstance(read.before, Losses) and type(read.control) is type(report.control)
    assert str(read) == str(report)


def test_keys_of_newer_versions_do_no_harm():
    assert RecoveryReport.from_dict(REPORT.to_dict() | {"version": 2, "hyperdrive": True}) == REPORT


def test_the_merge_gap():
    assert REPORT.merge_gap == 0.5
    assert CONTROL.merge_gap is None


def test_as_a_table():
    assert str(replace(REPORT, control=CONTROL, warnings=["Beware."])).splitlines() == [
        "recovery: LoRA rank 8, loss lm, 200 steps (best: 180), 800 samples, 40,160 tokens of self (50%), "
        "org/texts (50%)",
        "  pruned                held-out loss 3.0000 (perplexity 20.09), KL to the dense model 0.7500",
        "  with the adapter      held-out loss 2.0000 (perplexity 7.39), KL to the dense model 0.2500",
        "  merged                held-out loss 2.5000 (perplexity 12.18), KL to the dense model 0.5000",
        "  dense                 held-out loss 2.5000 (perplexity 12.18)",
        "  dense, trained alike  held-out loss 1.5000 (perplexity 4.48)",
        "  zeros 5,000 -> 4,000 (merge 'masked')",
        "  took 1.2 s",
        "warning: Beware.",
    ]


def test_nothing_that_was_better():
    assert str(NOT_KEPT).splitlines()[1:] == [
        "  pruned  held-out loss 3.0000 (perplexity 20.09), KL to the dense model 0.7500",
        "  no step was better than none: the model is as it was",
        "  zeros 5,000 -> 5,000 (merge 'masked')",
        "  took 1.2 s",
    ]


def test_no_zeros_no_line():
    assert "zeros" not in str(CONTROL)


def test_a_loss_beyond_the_range_of_floats():
    assert describe_losses(Losses(1000.0), "KL") == "held-out loss 1000.0000 (perplexity inf)"


def test_a_distance_over_some_tokens_is_called_so():
    some = replace(REPORT, config=REPORT.config | {"teacher_top_k": 8})
    assert "KL to the dense model (its 8 best tokens) 0.7500" in str(some)


def test_the_record_in_a_config():
    assert REPORT.record() == {
        "config": REPORT.config,
        "data": DATA,
        "control": False,
        "steps": 200,
        "held_out_loss": {"before": 3.0, "after": 2.5},
    }
    assert CONTROL.record()["held_out_loss"] == {"before": 2.5, "after": 1.5}
    assert NOT_KEPT.record()["held_out_loss"] == {"before": 3.0, "after": 3.0}
