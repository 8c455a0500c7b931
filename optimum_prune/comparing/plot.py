"""The picture of a comparison: perplexity over sparsity, or bars where there is one sparsity alone."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optimum_prune.comparing.naming import DENSE
from optimum_prune.comparing.results import Comparison, Row
from optimum_prune.plots.style import COLORS, KEPT, REMOVED, new_figure, plain, png, spread_out, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "os^vDPX<>*"


def picture(comparison: Comparison) -> bytes:
    """Return a PNG."""
    with styled():
        figure = new_figure()
        _draw(figure, comparison)
        return png(figure)


def _draw(figure: "Figure", comparison: Comparison) -> None:
    measure = comparison.measure
    dense = getattr(comparison.dense, measure)
    rows = [row for row in comparison.ranking if math.isfinite(getattr(row, measure))]
    lines = len({row.asked for row in rows}) > 1
    settings = len({row.setting for row in rows})
    figure.set_size_inches(8, 4.8 if lines else 1.4 + 0.42 * max(settings, 2))
    axes = figure.add_subplot()
    (_lines if lines else _bars)(axes, rows, dense, measure)
    values = [dense, *(getattr(row, measure) for row in rows)]
    spread_out(axes.yaxis if lines else axes.xaxis, axes.set_yscale if lines else axes.set_xscale, values)


def _lines(axes: Any, rows: Sequence[Row], dense: float, measure: str) -> None:
    """Draw a line for every setting, named in a legend in the order of their right ends."""
    axes.axhline(dense, color="0.35", linestyle=":", label=DENSE)
    names = list(dict.fromkeys(row.setting for row in rows))
    own = {name: [row for row in rows if row.setting == name] for name in names}
    for i, name in enumerate(names):
        x, y = [row.asked for row in own[name]], [getattr(row, measure) for row in own[name]]
        # After all colours the next markers, and dashes.
        dashes = "-" if i < len(COLORS) else "--"
        style = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "linestyle": dashes}
        axes.plot(x, y, label=plain(name), linewidth=1.6, markersize=5, **style)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    axes.set_xticks(sorted({row.asked for row in rows}))
    axes.set_xlabel("sparsity asked")
    axes.set_ylabel(f"{measure} (lower is better)")
    axes.grid(axis="y", which="both", color="0.9", linewidth=0.6)
    handles, labels = axes.get_legend_handles_labels()
    ends = {plain(name): (own[name][-1].asked, getattr(own[name][-1], measure)) for name in names}
    ends[DENSE] = (-1.0, -1.0)
    order = sorted(range(len(labels)), key=lambda i: ends[labels[i]], reverse=True)
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        fontsize=10,
    )


def _bars(axes: Any, rows: Sequence[Row], dense: float, measure: str) -> None:
    """Draw a bar for every setting, the best on top, with its number."""
    values = [getattr(row, measure) for row in rows]
    bars = axes.barh([plain(row.setting) for row in rows], values, color=KEPT, height=0.65)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the line of the dense model
    axes.bar_label(bars, [f"{value:,.4g}" for value in values], padding=4, fontsize=10, bbox=behind)
    axes.invert_yaxis()
    axes.axvline(dense, color=REMOVED, linestyle=":", linewidth=2)
    over = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 10}
    axes.text(dense, 1.01, f"{DENSE} {dense:,.4g}", **over)
    axes.margins(x=0.12)
    asked = f" at a sparsity of {rows[0].asked:.4g}" if rows else ""
    axes.set_xlabel(f"{measure}{asked} (lower is better)")
