"""A plan, printed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from optimum_prune.bounds import Range
from optimum_prune.report import WEIGHT, WIDTH, ZEROS, align, describe_gamma

if TYPE_CHECKING:
    from optimum_prune.planning.plan import Plan, PlannedGroup

LAYERS = 24
"""Columns that a list of layers may take."""
COSTS = {
    "parameters": "parameters",
    "weight_bytes": "bytes of weights",
    "cache_bytes_per_token": "KV-cache bytes per token",
    "cache_bytes_per_output_token": "KV-cache bytes per output token",
    "cache_bytes_per_input_token": "KV-cache bytes per input token",
}


def table(plan: Plan) -> str:
    """Lay out a plan within the width of a report."""
    gamma = "" if plan.gamma is None else " " + describe_gamma(plan.gamma)
    config = plan.config
    lines = [
        f"{plan.model_type}, {plan.dtype}: {config['pattern']}, {config['scorer']}, {plan.allocation}{gamma}, "
        f"asked {plan.asked:.1%} of the targeted weights",
        "",
        *align(_group_rows(plan)),
        "",
        *align([("", "", "units", "removed", "asked", "achieved"), *_total_rows(plan)]),
        "",
        *align([("", "before", "after", "change"), *_cost_rows(plan)]),
        "",
        *_layout(plan),
        *(f"warning: {warning}" for warning in plan.warnings),
    ]
    return "\n".join(row for line in lines for row in _wrap(line))


def compressed(numbers: Sequence[int]) -> str:
    """Write ascending numbers in short: `1..3`, `8..1536 by 8`, `0..4, 7`."""
    parts: list[str] = []
    rest = list(numbers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        run = 1
        while run < len(rest) and rest[run] - rest[run - 1] == step:
            run += 1
        if run < 3:
            run = 1
            parts.append(str(rest[0]))
        else:
            parts.append(f"{rest[0]}..{rest[run - 1]}" + (f" by {step}" if step > 1 else ""))
        rest = rest[run:]
    return ", ".join(parts) or "none"


def percent(fractions: Iterable[float], sign: str = "") -> str:
    """Write the lowest and the highest of a fraction as percentages; once where they look the same."""
    return " to ".join(dict.fromkeys(f"{fraction:{sign}.1%}" for fraction in fractions))


def _group_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a heading, and a row for all layers of a stack that are alike; the stack's name before its rows."""
    columns = 1 + len(_cells(plan.groups[0]))  # of weights nothing is said of what they can keep
    rows: list[tuple[str, ...]] = [("layers", "unit", "now", "will keep", "can keep")[:columns]]
    for stack, groups in groupby(plan.groups, key=lambda group: group.stack):
        rows.append((stack,))
        alike: dict[tuple[str, ...], list[int]] = {}
        for group in groups:
            alike.setdefault(_cells(group), []).append(group.layer)
        rows += [(_layers(layers), *cells) for cells, layers in alike.items()]
    return rows


def _layers(layers: Sequence[int]) -> str:
    words = compressed(layers)
    return words if len(words) <= LAYERS else f"{len(layers)} layers, {words[: words.index(',')]}, ..."


def _cells(group: PlannedGroup) -> tuple[str, ...]:
    what = f"{group.unit} ({group.site})" if group.site else group.unit
    cells = what, f"{group.now:,}", str(group.kept)
    return cells if group.reachable is None else (*cells, compressed(group.reachable))


def _total_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for total in plan.totals:
        cells = total.unit, f"{total.now:,}", str(total.removed), f"{total.asked:.1%}", percent(total.achieved)
        rows.append((total.stack, *cells))
    return rows


def _cost_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (COSTS[name], f"{before:,}", str(plan.after[name]), _change(before, plan.after[name]))
        for name, before in plan.before.items()
    ]


def _change(before: int, after: Range) -> str:
    return percent([count / before - 1 for count in (after.lowest, after.highest)], sign="+")


def _layout(plan: Plan) -> list[str]:
    forecast = plan.layout
    lines = [f"layout: {forecast.layout}" + (f" ({forecast.reason})" if forecast.reason else "")]
    if forecast.class_switch:
        lines.append(f"layout with class_switch: stock, as {forecast.class_switch}, which computes the same")
    alike: dict[str, list[str]] = {}
    for stack, counts in forecast.stock_heads.items():
        alike.setdefault(compressed(counts), []).append(stack)
    for counts, stacks in alike.items():
        lines.append(f"layout 'stock' takes kv_groups: {counts} (as many in every layer of {' and '.join(stacks)})")
    if plan.totals[0].unit == WEIGHT:
        lines.append(ZEROS)
    if plan.tensor_parallel > 1 and plan.config["pattern"] == "structured":
        lines.append(f"can keep: only what tensor_parallel={plan.tensor_parallel} divides")
    return lines


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ") if len(line) > WIDTH else [line]
