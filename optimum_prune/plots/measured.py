"""What was measured, stage by stage: quality, size and latency, as bars."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from optimum_prune.measurements import STAGES, Evaluation, latest
from optimum_prune.plots.style import DENSE, KEPT, WIDTH, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR = 0.28
"""Inches of height."""
TITLE = 0.55
"""The same of a title and the space around it."""


class Panel(NamedTuple):
    """One measure of several stages."""

    title: str
    values: dict[str, float]


def draw_measured(figure: "Figure", evaluations: Mapping[str, Evaluation]) -> None:
    """Draw a panel for every measure that was taken; stages that were measured otherwise than the last are left out."""
    panels = list(_panels(evaluations))
    heights = [TITLE + BAR * len(panel.values) for panel in panels]
    figure.set_size_inches(WIDTH, sum(heights))
    drawn = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, panel in zip(drawn, panels, strict=True):
        _bars(axes, panel)


def _panels(evaluations: Mapping[str, Evaluation]) -> Iterator[Panel]:
    final = latest(evaluations)
    shown = {stage: evaluations[stage] for stage in STAGES if stage in evaluations}
    timed = ("machine", "prefill_tokens", "decode_tokens")
    for title, name, unit, same in (
        ("loss per token", "loss", 1, ["data"])
        if final.data.get("task")
        else ("perplexity (lower is better)", "perplexity", 1, ["data"]),
        ("weights, MB", "weight_bytes", 1e6, []),
        (f"prefill of {final.prefill_tokens} tokens, ms", "prefill_ms", 1, timed),
        ("decoding of a token, ms", "decode_ms_per_token", 1, timed),
    ):
        alike = [s for s, e in shown.items() if all(getattr(e, fact) == getattr(final, fact) for fact in same)]
        values = {stage: getattr(shown[stage], name) for stage in alike}
        finite = {stage: value / unit for stage, value in values.items() if value is not None and math.isfinite(value)}
        if finite:
            yield Panel(title, finite)


def _bars(axes: "Axes", panel: Panel) -> None:
    """Draw a bar for every stage, the first on top, with its number; the axis says no more, and is left out."""
    colors = [DENSE if stage in ("dense", "control") else KEPT for stage in panel.values]
    bars = axes.barh([plain(stage) for stage in panel.values], list(panel.values.values()), color=colors, height=0.8)
    axes.bar_label(bars, [f"{value:,.4g}" for value in panel.values.values()], padding=4)
    axes.set_title(panel.title)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.margins(x=0.2)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines["bottom"].set_visible(False)
