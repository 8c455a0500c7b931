"""What every layer kept: a bar for each, in a panel for every stack and kind of unit."""

from typing import TYPE_CHECKING

from optimum_prune.plots.style import DENSE, KEPT, REMOVED, WIDTH, plain
from optimum_prune.report import GONE, WEIGHT, PruningReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 1.7
"""Inches of height."""
STRIP = 0.8
"""The same of a panel whose layers are there or not."""
LINE = 0.25
"""The same of a line of text."""


def draw_kept(figure: "Figure", report: PruningReport) -> None:
    """Draw the share of its units that every layer kept, or of its weights that are not zero."""
    panels = [(stack, unit, totals) for stack, units in report.per_stack.items() for unit, totals in units.items()]
    several = len(report.per_stack) > 1
    heights = [(STRIP if unit in GONE else PANEL) + LINE * several for _, unit, _ in panels]
    figure.set_size_inches(WIDTH, sum(heights) + LINE)
    drawn = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (stack, unit, totals) in zip(drawn, panels, strict=True):
        title = _title(unit, totals)
        axes.set_title(plain(f"{stack}\n{title}" if several else title))
        _bars(axes, report, stack, unit)
    drawn[-1].set_xlabel("layer")


def _title(unit: str, totals: dict[str, float]) -> str:
    after, before = totals["after"], totals["before"]
    if unit == WEIGHT:
        return f"{after / before:.1%} of the weights are not zero"
    return f"{unit}: {after:,} of {before:,} kept ({after / before:.1%})"


def _bars(axes: "Axes", report: PruningReport, stack: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = {layer: found for (path, layer), found in report.per_layer.items() if path == stack}
    counts = {layer: found[unit] for layer, found in rows.items() if unit in found}
    layers = list(counts)
    axes.bar(layers, [1.0] * len(layers), color=DENSE, alpha=0.25)
    axes.bar(layers, [after / before for after, before in counts.values()], color=KEPT)
    axes.set_xlim(min(layers) - 0.7, max(layers) + 0.7)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    axes.set_yticks([] if unit in GONE else [0, 0.5, 1])
    if unit not in GONE:
        axes.set_ylabel("not zero" if unit == WEIGHT else "kept")
    gone = [layer for layer, (after, _) in counts.items() if after == 0]
    axes.plot(gone, [0.5] * len(gone), "x", color=REMOVED, markersize=7, markeredgewidth=2.5)
