"""All pictures that a report has something to show in."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from optimum_prune.measurements import Evaluation
from optimum_prune.plots.kept import draw_kept
from optimum_prune.plots.measured import draw_measured
from optimum_prune.plots.recovery import draw_recovery
from optimum_prune.plots.scores import draw_scores, has_scores
from optimum_prune.plots.style import is_installed, new_figure, png, styled, svg
from optimum_prune.report import PruningReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

Measured = Mapping[str, Evaluation]


def save_pictures(folder: str | Path, report: PruningReport, evaluations: Measured) -> list[Path]:
    """Write the pictures as `kept.png`, `measured.png`, `recovery.png` and `scores.png`: those that show something.

    Args:
        folder: made if it is not there.
        report: of a pruning.
        evaluations: what was measured.

    Returns:
        The files; none, with a line in the log, where matplotlib is not installed.
    """
    if not is_installed():
        logger.info("No pictures are drawn without matplotlib: pip install 'optimum-prune[plots]'.")
        return []
    Path(folder).mkdir(exist_ok=True)
    files = []
    for name, draw in _drawers(report, evaluations).items():
        files.append(Path(folder) / f"{name}.png")
        with styled():
            files[-1].write_bytes(png(_drawn(draw)))
    return files


def svg_pictures(report: PruningReport, evaluations: Measured) -> dict[str, str]:
    """Return the same pictures by name, as elements for a page; needs matplotlib."""
    with styled():
        return {name: svg(_drawn(draw), name) for name, draw in _drawers(report, evaluations).items()}


def _drawn(draw: Callable[["Figure"], None]) -> "Figure":
    figure = new_figure()
    draw(figure)
    return figure


def _drawers(report: PruningReport, evaluations: Measured) -> dict[str, Callable[["Figure"], None]]:
    shown = {
        "kept": (True, lambda figure: draw_kept(figure, report)),
        "measured": (bool(evaluations), lambda figure: draw_measured(figure, evaluations)),
        "recovery": (bool(report.recovery), lambda figure: draw_recovery(figure, report)),
        "scores": (has_scores(report), lambda figure: draw_scores(figure, report)),
    }
    return {name: draw for name, (is_there, draw) in shown.items() if is_there}
