"""Spread of scores: the marks are the quantiles of the report."""

from dataclasses import replace

from optimum_prune.plots.scores import draw_scores, has_scores
from tests.reports import masked, report

KEPT, LOST = [2.0, 3, 4, 5, 6], [0.5, 1, 1.5, 1.75, 2]


def scored(found, *spreads):
    """Return a report whose groups have these spreads, in order."""
    groups = [replace(group, scores=scores) for group, scores in zip(found.groups, spreads, strict=False)]
    return replace(found, groups=groups + found.groups[len(groups) :])


def medians(axes):
    return {line.get_marker(): line.get_xydata().tolist() for line in axes.get_lines() if len(line.get_xdata())}


def spans(axes):
    """Return the ends of all vertical lines, by where they stand."""
    lines = [path.vertices.tolist() for lines in axes.collections for path in lines.get_paths()]
    return sorted((round(x, 2), low, high) for (x, low), (_, high) in lines)


def test_quantiles_of_kept_and_removed(drawn):
    heads, channels = drawn(draw_scores, scored(report(1), {"kept": KEPT, "removed": LOST}, {"kept": KEPT}))
    assert medians(heads) == {"^": [[-0.2, 1.5]], "o": [[0.2, 4]]}
    assert spans(heads) == [(-0.2, 0.5, 2), (-0.2, 1, 1.75), (0.2, 2, 6), (0.2, 3, 5)]
    assert medians(channels) == {"o": [[0.2, 4]]}
    assert [axes.get_title(loc="left") for axes in (heads, channels)] == ["kv_group", "mlp_channel"]
    (legend,) = heads.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["removed", "kept"]


def test_scores_that_lie_far_apart_are_logarithmic(drawn):
    near, far = {"kept": KEPT}, {"kept": [1, 2, 3, 4, 20.0]}
    heads, channels = drawn(draw_scores, scored(report(1), near, far))
    assert (heads.get_yscale(), channels.get_yscale()) == ("linear", "log")
    negative = {"kept": [-1.0, 2, 3, 4, 20]}
    assert drawn(draw_scores, scored(report(1), negative))[0].get_yscale() == "linear"


def test_a_panel_for_the_same_linear_of_all_layers(drawn):
    panels = drawn(draw_scores, scored(masked(), *[{"kept": KEPT}] * 6))
    assert [axes.get_title(loc="left") for axes in panels] == ["self_attn.q_proj", "mlp.up_proj"]
    assert medians(panels[1]) == {"o": [[0.2, 4], [1.2, 4], [2.2, 4]]}


def test_whether_there_are_any():
    assert has_scores(scored(report(), {"kept": KEPT})) and not has_scores(report())
