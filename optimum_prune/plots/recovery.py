"""How the loss fell while the pruned model was trained: a panel for every training."""

from typing import TYPE_CHECKING

from optimum_prune.plots.style import DENSE, KEPT, REMOVED, WIDTH
from optimum_prune.recovery.report import RecoveryReport
from optimum_prune.report import PruningReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 2.8
"""Inches of height."""


def draw_recovery(figure: "Figure", report: PruningReport) -> None:
    """Draw the losses over the steps of every training that followed the pruning."""
    figure.set_size_inches(WIDTH, PANEL * len(report.recovery))
    drawn = figure.subplots(len(report.recovery), squeeze=False)[:, 0]
    for axes, recovery in zip(drawn, report.recovery, strict=True):
        _curves(axes, recovery)
    drawn[-1].set_xlabel("step")


def _curves(axes: "Axes", recovery: RecoveryReport) -> None:
    from matplotlib.ticker import MaxNLocator

    held_out = _held_out(recovery)
    axes.plot(*_points(recovery, "train"), color=DENSE, linewidth=1, label="trained on")
    axes.plot(list(held_out), list(held_out.values()), "o-", color=KEPT, linewidth=2, markersize=5, label="held out")
    if recovery.control is not None:
        control = _held_out(recovery.control)
        label = "held out, dense trained alike"
        axes.plot(list(control), list(control.values()), "s--", color=KEPT, linewidth=1, markersize=4, label=label)
    best, label = recovery.best_step, f"kept: step {recovery.best_step:,}"
    if recovery.kept and best in held_out:
        axes.plot(best, held_out[best], "*", color=REMOVED, markersize=14, label=label)
    loss = recovery.config["loss"]
    axes.set_ylabel("loss per token" if loss == "lm" else f"trained loss ({loss})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.legend(fontsize=10)


def _held_out(recovery: RecoveryReport) -> dict[float, float]:
    """Return step -> loss on held-out sequences; that of no step too, where no distance is mixed in."""
    start = {0: recovery.before.lm} if recovery.before.kl is None else {}
    return start | dict(zip(*_points(recovery, "held_out"), strict=True))


def _points(recovery: RecoveryReport, name: str) -> tuple[list[float], list[float]]:
    """Return the steps, and the losses of that name there."""
    rows = [row for row in recovery.curve if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]
