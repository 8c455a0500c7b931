"""The table that sets a pruned model beside its dense one."""

import json
from dataclasses import replace

import pytest

from optimum_prune.measurements import Evaluation, Latency, Spread, comparison, comparison_rows, timing_note
from tests.reports import DATA, DENSE, PRUNED


def ratios(dense, pruned):
    return {row[0]: row[3] for row in comparison_rows({"dense": dense, "pruned": pruned})}


def test_the_table():
    assert (
        comparison({"dense": DENSE, "pruned": PRUNED})
        == """\
                       dense    pruned   ratio
perplexity             12.50    25.00    2.00x
KL to the dense model           0.7500
parameters             10,000   9,000    0.90x
weights                40.0 MB  36.0 MB  0.90x
prefill of 128 tokens  50.0 ms  40.0 ms  0.80x
decoding, per token    10.0 ms  9.0 ms   0.90x
measured on org/texts:small, 32 samples, 4,096 tokens; cpu, float32, CPU threads: 2"""
    )


@pytest.mark.parametrize(
    ("perplexity", "row"),
    [
        (13.625, ("13.62", "1.09x")),
        (535888.9, ("535,889", "42,871x")),
        (float("inf"), ("inf", "infx")),
        (float("nan"), ("nan", "nanx")),
    ],
)
def test_large_and_broken_numbers(perplexity, row):
    assert comparison_rows({"dense": DENSE, "pruned": replace(PRUNED, perplexity=perplexity)})[1][2:] == row


def test_recovered_and_control():
    recovered, control = replace(PRUNED, perplexity=20.0, kl=0.5), replace(DENSE, perplexity=10.0, prefill_ms=None)
    rows = comparison_rows({"control": control, "dense": DENSE, "recovered": recovered, "pruned": PRUNED})
    assert rows[:3] == [
        ("", "dense", "pruned", "recovered", "control", "recovered / dense"),
        ("perplexity", "12.50", "25.00", "20.00", "10.00", "1.60x"),
        ("KL to the dense model", "", "0.7500", "0.5000", "", ""),
    ]
    assert rows[5] == ("prefill of 128 tokens", "50.0 ms", "40.0 ms", "40.0 ms", "", "0.80x")


def test_how_windows_begin():
    begun = replace(DENSE, data={**DENSE.data, "begins_with": "<bos>"})
    assert "4,096 tokens, each window begins with `<bos>`; cpu" in str(begun)


def test_alone():
    assert str(DENSE) == comparison({"pruned": DENSE})
    assert (
        str(replace(DENSE, prefill_ms=None, decode_ms_per_token=None))
        == """\
perplexity  12.50
parameters  10,000
weights     40.0 MB
measured on org/texts:small, 32 samples, 4,096 tokens; cpu, float32, CPU threads: 2"""
    )


def test_no_ratio_of_what_was_measured_differently():
    other = replace(DENSE, data=DATA | {"fingerprint": "sha256:0"})
    assert ratios(other, PRUNED)["perplexity"] == ""
    assert ratios(other, PRUNED)["prefill of 128 tokens"] == "0.80x"
    for change in (
        {"threads": 1},
        {"device": "gpu"},
        {"dtype": "bfloat16"},
        {"prefill_tokens": 64},
        {"decode_tokens": 8},
    ):
        measured = ratios(replace(DENSE, **change), PRUNED)
        assert measured["perplexity"] == "2.00x"
        assert measured["prefill of 128 tokens"] == measured["decoding, per token"] == ""


def test_a_dense_model_that_was_not_timed():
    assert ratios(replace(DENSE, prefill_ms=None), PRUNED)["prefill of 128 tokens"] == ""


def test_round_trip():
    assert Evaluation.from_dict(json.loads(json.dumps(PRUNED.to_dict()))) == PRUNED
    assert Evaluation.from_dict(PRUNED.to_dict() | {"novelty": 1}) == PRUNED


def test_reports_of_earlier_versions_know_fewer_fields():
    old = PRUNED.to_dict()
    del old["timed_at"]
    assert Evaluation.from_dict(old) == PRUNED
    with pytest.raises(TypeError, match="perplexity"):
        Evaluation.from_dict({name: value for name, value in old.items() if name != "perplexity"})


@pytest.mark.parametrize(
    ("later", "apart"),
    [
        ("10:00:50", "50 seconds"),
        ("10:01:59", "119 seconds"),
        ("10:12:10", "12 minutes"),
        ("13:40:00", "4 hours"),
        ("09:59:30", "30 seconds"),
    ],
)
def test_models_that_were_timed_apart(later, apart):
    dense = replace(DENSE, timed_at="2026-01-01T10:00:00+00:00")
    pruned = replace(PRUNED, timed_at=f"2026-01-01T{later}+00:00")
    note = f"The latencies of the two models were measured {apart} apart, not in turn."
    assert timing_note({"dense": dense, "pruned": pruned}) == note
    assert comparison({"dense": dense, "pruned": pruned}).endswith(f"\n{note}")
    assert timing_note({"dense": dense, "pruned": PRUNED, "recovered": pruned}) == note


def test_models_that_were_timed_in_turn_or_not_both():
    dense, pruned = (replace(found, timed_at="2026-01-01T10:00:00+00:00") for found in (DENSE, PRUNED))
    later = replace(pruned, timed_at="2026-01-01T11:00:00+00:00")
    untimed = replace(later, prefill_ms=None)
    for found in ((dense, pruned), (DENSE, later), (dense, PRUNED), (dense, untimed)):
        assert timing_note(dict(zip(("dense", "pruned"), found, strict=True))) == ""
    assert timing_note({"dense": dense}) == timing_note({"pruned": later}) == ""


def test_timed():
    latency = Latency(Spread(30, 20, 50), Spread(3, 2, 5), 64, 16, 1, 5, "2026-01-01T10:00:00+00:00")
    timed = replace(PRUNED, prefill_ms=None).timed(latency)
    assert (timed.prefill_ms, timed.decode_ms_per_token, timed.prefill_tokens, timed.decode_tokens) == (
        30,
        3,
        64,
        16,
    )
    assert timed.perplexity == PRUNED.perplexity
    assert timed.timed_at == "2026-01-01T10:00:00+00:00"


def test_spread():
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(median=3.0, lowest=1.0, highest=10.0)
    with pytest.raises(AttributeError):
        Spread.of([1.0]).median = 2.0  # pyright: ignore[reportAttributeAccessIssue]
