"""Bars of what was measured: the numbers, and no comparison of what was measured differently."""

import math
from dataclasses import replace

from optimum_prune.plots.measured import draw_measured
from tests.reports import DENSE, PRUNED


def shown(panels):
    """Return title -> stage -> length of its bar."""
    return {
        axes.get_title(loc="left"): dict(
            zip(
                [label.get_text() for label in axes.get_yticklabels()],
                [b.get_width() for b in axes.patches],
                strict=True,
            )
        )
        for axes in panels
    }


def test_a_panel_for_every_measure(drawn):
    assert shown(drawn(draw_measured, {"pruned": PRUNED, "dense": DENSE})) == {
        "perplexity (lower is better)": {"dense": 12.5, "pruned": 25},
        "weights, MB": {"dense": 40, "pruned": 36},
        "prefill of 128 tokens, ms": {"dense": 50, "pruned": 40},
        "decoding of a token, ms": {"dense": 10, "pruned": 9},
    }


def test_bars_have_their_numbers_and_begin_at_zero(drawn):
    perplexity, *_ = drawn(draw_measured, {"dense": DENSE, "pruned": replace(PRUNED, perplexity=1234.56)})
    assert [text.get_text() for text in perplexity.texts] == ["12.5", "1,235"]
    assert perplexity.get_xlim()[0] == 0 and perplexity.yaxis_inverted()


def test_what_was_measured_otherwise_is_left_out(drawn):
    other = replace(DENSE, device="another", data=DENSE.data | {"fingerprint": "sha256:other"})
    found = shown(drawn(draw_measured, {"dense": other, "pruned": PRUNED}))
    assert {title: list(bars) for title, bars in found.items()} == {
        "perplexity (lower is better)": ["pruned"],
        "weights, MB": ["dense", "pruned"],
        "prefill of 128 tokens, ms": ["pruned"],
        "decoding of a token, ms": ["pruned"],
    }


def test_what_was_not_measured_has_no_panel(drawn):
    untimed = {"prefill_ms": None, "decode_ms_per_token": None, "prefill_tokens": None, "decode_tokens": None}
    endless = replace(PRUNED, perplexity=math.inf, **untimed)
    assert shown(drawn(draw_measured, {"pruned": endless})) == {"weights, MB": {"pruned": 36}}


def test_answers_are_judged_by_their_loss(drawn):
    answers = replace(PRUNED, data=PRUNED.data | {"task": "text2text"})
    found = shown(drawn(draw_measured, {"pruned": answers, "recovered": replace(answers, perplexity=math.exp(2))}))
    assert found["loss per token"] == {"pruned": math.log(25), "recovered": 2}
    others = {"dense": DENSE, "pruned": answers}
    assert shown(drawn(draw_measured, others))["loss per token"] == {"pruned": math.log(25)}
