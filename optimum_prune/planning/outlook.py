"""What the planner of each pattern finds out."""

from dataclasses import dataclass

from optimum_prune.bounds import Range
from optimum_prune.planning.layout import Forecast
from optimum_prune.planning.plan import PlannedGroup, PlannedTotal


@dataclass(frozen=True)
class Outlook:
    """What a run will do.

    Attributes:
        groups: as in `Plan`.
        totals: as in `Plan`.
        removed: what goes with each total: name of a cost -> how much of it.
        layout: as in `Plan`.
        warnings: those that only this pattern has.
    """

    groups: list[PlannedGroup]
    totals: list[PlannedTotal]
    removed: list[dict[str, Range]]
    layout: Forecast
    warnings: list[str]
