"""Kept units layer by layer: the bars are the numbers of the report."""

import pytest

from optimum_prune.plots.kept import draw_kept
from tests.reports import group, masked, report


def heights(axes):
    """Return the heights of the faint bars and of those in front."""
    bars = [bar.get_height() for bar in axes.patches]
    return bars[: len(bars) // 2], bars[len(bars) // 2 :]


def crossed(axes):
    """Return the layers that are marked as gone."""
    return [int(x) for line in axes.get_lines() if line.get_marker() == "x" for x in line.get_xdata()]


def dropped():
    groups = [
        group(f"{stack}.{layer}", layer, "layer", 1, int(layer not in gone), 100, stack)
        for stack, gone in (("encoder.block", {1}), ("decoder.block", {0, 2}))
        for layer in range(3)
    ]
    asked = {"encoder.block": {"layer": 0.3}, "decoder.block": {"layer": 0.6}}
    return report(groups=groups, asked_per_stack=asked, gamma=None)


def test_a_panel_for_every_kind_of_unit(drawn):
    heads, channels = drawn(draw_kept, report())
    assert heights(heads) == ([1, 1, 1], [0.75, 1, 1]) and heights(channels) == ([1, 1, 1], [pytest.approx(2 / 3)] * 3)
    assert heads.get_title(loc="left") == "kv_group: 11 of 12 kept (91.7%)"
    assert channels.get_title(loc="left") == "mlp_channel: 48 of 72 kept (66.7%)"
    assert (channels.get_ylabel(), channels.get_xlabel()) == ("kept", "layer")
    assert channels.get_ylim() == (0, 1) and crossed(heads) == crossed(channels) == []


def test_a_layer_without_a_unit_has_no_bar(drawn):
    found = report()
    heads, _ = drawn(draw_kept, report(groups=[found.groups[0], *found.groups[3:]]))
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in heads.patches] == [0, 2] * 2


def test_layers_that_went_are_crossed_in_every_stack(drawn):
    encoder, decoder = drawn(draw_kept, dropped())
    assert crossed(encoder) == [1] and crossed(decoder) == [0, 2]
    assert encoder.get_title(loc="left") == "encoder.block\nlayer: 2 of 3 kept (66.7%)"
    assert heights(decoder) == ([1, 1, 1], [0, 1, 0])


def test_weights_that_are_not_zero(drawn):
    (axes,) = drawn(draw_kept, masked())
    assert axes.get_title(loc="left") == "47.9% of the weights are not zero" and axes.get_ylabel() == "not zero"
    assert heights(axes)[1] == [56 / 128, 0.5, 0.5]


def test_names_are_drawn_as_they_are(drawn):
    stacks = {name: {"layer": 0.5} for name in ("a$\\frac$b", "_c")}
    groups = [group("x", layer, "layer", 1, layer, 100, stack) for stack in stacks for layer in range(2)]
    first, second = drawn(draw_kept, report(groups=groups, asked_per_stack=stacks, gamma=None))
    assert first.get_title(loc="left").startswith("a\\$\\frac\\$b\n")
    assert second.get_title(loc="left").startswith(" _c\n")
