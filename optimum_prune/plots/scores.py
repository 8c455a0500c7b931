"""How the scores of every layer are spread: those of what it kept beside those of what it lost."""

from typing import TYPE_CHECKING

from optimum_prune.plots.style import KEPT, REMOVED, WIDTH, plain, spread_out
from optimum_prune.report import WEIGHT, GroupReport, PruningReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 2.3
"""Inches of height."""
LINE = 0.25
"""The same of a line of text."""
PARTS = {"removed": (-0.2, REMOVED, "^"), "kept": (0.2, KEPT, "o")}
"""Part of the units -> place beside the layer's number, colour and marker of the median."""


def has_scores(report: PruningReport) -> bool:
    """Tell whether the report says how scores are spread."""
    return any(group.scores for group in report.groups)


def draw_scores(figure: "Figure", report: PruningReport) -> None:
    """Draw the middle 90 %, the middle half and the median of the scores, in a panel for every kind that is ranked."""
    panels: dict[str, list[GroupReport]] = {}
    for group in report.groups:
        if group.scores:
            panels.setdefault(_kind(group, several=len(report.per_stack) > 1), []).append(group)
    figure.set_size_inches(WIDTH, PANEL * len(panels) + 2 * LINE)
    drawn = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (title, groups) in zip(drawn, panels.items(), strict=True):
        axes.set_title(plain(title))
        _spreads(axes, groups)
    drawn[-1].set_xlabel("layer")
    handles = [drawn[0].plot([], [], color=color, marker=marker, linewidth=3)[0] for _, color, marker in PARTS.values()]
    figure.legend(handles, list(PARTS), loc="outside upper right", ncols=2)


def _kind(group: GroupReport, several: bool) -> str:
    """Name the groups that a group is shown with: of weights, the same linear of all layers."""
    path = group.name.removeprefix(f"{group.stack}.{group.layer}.")
    kind = path if group.unit == WEIGHT else group.unit
    return f"{group.stack}\n{kind}" if several else kind


def _spreads(axes: "Axes", groups: list[GroupReport]) -> None:
    from matplotlib.ticker import MaxNLocator

    for part, (shift, color, marker) in PARTS.items():
        found = [(group.layer + shift, group.scores[part]) for group in groups if group.scores and part in group.scores]
        x, spreads = [place for place, _ in found], [spread for _, spread in found]
        lowest, low, middle, high, highest = zip(*spreads, strict=True) if spreads else [()] * 5
        axes.vlines(x, lowest, highest, color=color, linewidth=1)
        axes.vlines(x, low, high, color=color, linewidth=3)
        axes.plot(x, middle, marker, color=color, markersize=4)
    values = [value for group in groups for spread in (group.scores or {}).values() for value in spread]
    spread_out(axes.yaxis, axes.set_yscale, values)
    axes.set_xlim(min(group.layer for group in groups) - 0.7, max(group.layer for group in groups) + 0.7)
    axes.set_ylabel("score")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
