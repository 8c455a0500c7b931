"""Spread of scores: hand arithmetic, and what the reports of real runs carry."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

import json

import pytest
import torch

from optimum_prune import CalibrationConfig, PruningConfig, PruningReport
from optimum_prune.binding import bind
from optimum_prune.calibration.data import load_samples
from optimum_prune.pipeline import prune
from optimum_prune.quantiles import AT, MOST, kept_and_removed
from optimum_prune.registry import load
from optimum_prune.scoring import score_groups
from tests.models import llama, source, t5

# Pure


def test_quantiles_by_hand():
    scores = torch.arange(101.0)
    kept = scores >= 80
    found = kept_and_removed(scores.reshape(1, 101), kept.reshape(1, 101))
    assert found == {"kept": [81, 85, 90, 95, 99], "removed": pytest.approx([79 * at for at in AT])}


def test_what_was_not_there_to_be_chosen_does_not_count():
    scores = torch.tensor([-torch.inf, 1, 2, torch.nan])
    kept = torch.tensor([False, False, True, True])
    assert kept_and_removed(scores, kept) == {"removed": [1] * 5, "kept": [2] * 5}
    assert kept_and_removed(scores[:1], kept[:1]) == {}
    assert kept_and_removed(scores[1:3], torch.ones(2, dtype=torch.bool)) == {
        "kept": pytest.approx([1.05, 1.25, 1.5, 1.75, 1.95])
    }


def test_six_digits():
    (found, *_) = kept_and_removed(torch.tensor([1 / 3]), torch.tensor([True]))["kept"]
    assert found == 0.333333


def test_a_sample_of_many_scores_spans_them_all():
    scores = torch.arange(10.0 * MOST)
    found = kept_and_removed(scores, scores >= 5 * MOST)
    assert found["removed"] == pytest.approx([5 * MOST * at for at in AT], abs=20)
    assert found["kept"] == pytest.approx([5 * MOST * (1 + at) for at in AT], abs=20)
    scores[::10] = torch.nan  # what the sample is made of
    assert kept_and_removed(scores, scores > 0) == {}


# In reports


def run(model=None, **options) -> PruningReport:
    model = model or llama()
    calibration = CalibrationConfig(source(model), num_samples=4, seq_len=12)
    return prune(model, PruningConfig(calibration=calibration, **options))


@pytest.mark.parametrize("compensation", ["none", "least_squares"])
def test_of_units(compensation):
    model = llama()
    data = load_samples(CalibrationConfig(source(model), num_samples=4, seq_len=12), model)
    (scores,) = score_groups(model, bind(model), [load("scorers", "wanda")], data=data)
    report = run(model, scorer="wanda", sparsity=0.3, compensation=compensation)
    for group in report.groups:
        kept = torch.zeros(group.before, dtype=torch.bool)
        kept[group.kept] = True
        assert group.scores == kept_and_removed(scores[group.name], kept) and set(group.scores) == {"kept", "removed"}


def test_tied_heads_have_the_scores_that_they_were_ranked_by():
    report = run(t5(), scorer="wanda", sparsity=0.3)
    heads = [group for group in report.groups if group.unit == "kv_group" and group.stack == "encoder.block"]
    assert len({tuple(group.scores["kept"]) for group in heads}) == 1 and heads[0].scores["removed"]


def test_of_the_last_step_alone():
    report = run(scorer="wanda", sparsity=0.5, steps=2, round_to=1)
    for group in report.groups:
        assert group.scores["removed"][-1] <= group.scores["kept"][0]  # a uniform choice inside of one group
    whole = run(scorer="wanda", sparsity=0.5, round_to=1)
    channels = [(a, b) for a, b in zip(report.groups, whole.groups, strict=True) if a.unit == "mlp_channel"]
    # What the first step removed, the lowest of all, is not ranked again.
    assert all(a.scores["removed"][0] > b.scores["removed"][0] for a, b in channels)


def test_of_layers():
    report = run(pattern="layers", scorer="block_influence", sparsity=0.34)
    (gone,) = [group for group in report.groups if not group.after]
    assert list(gone.scores) == ["removed"] and len(set(gone.scores["removed"])) == 1
    assert all(list(group.scores) == ["kept"] for group in report.groups if group.after)


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": "unstructured", "sparsity": 0.5, "scorer": "magnitude"},
        {"pattern": "unstructured", "sparsity": 0.5, "scorer": "magnitude", "allocation": "global"},
        {"pattern": "2:4", "scorer": "magnitude"},
        {"pattern": "2:4", "scorer": "wanda"},
        {"pattern": "2:4", "scorer": "afr"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_of_weights(options):
    report = run(**options)
    for group in report.groups:
        kept, removed = group.scores["kept"], group.scores["removed"]
        assert all(low < high for low, high in zip(removed, kept, strict=True))


@pytest.mark.parametrize("scorer", ["sparsegpt", "si"])
def test_none_of_what_is_solved_or_learned(scorer):
    assert all(group.scores is None for group in run(pattern="2:4", scorer=scorer).groups)


def test_written_and_read():
    report = run(scorer="magnitude", sparsity=0.3)
    data = json.loads(json.dumps(report.to_dict()))
    assert PruningReport.from_dict(data).groups == report.groups
    for group in data["groups"]:
        del group["scores"]  # as in reports of earlier versions
    assert all(group.scores is None for group in PruningReport.from_dict(data).groups)
