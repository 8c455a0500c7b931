"""What a comparison found: data, the same in JSON; printed and written as tables."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optimum_prune.comparing.naming import DENSE
from optimum_prune.config import without_paths
from optimum_prune.errors import InvalidConfig
from optimum_prune.measurements import Evaluation, megabytes
from optimum_prune.report import align, describe_data

VERSION = 1
NOTHING = "-"
NAME = "comparison"
"""Of the files, without their suffixes."""


@dataclass(frozen=True)
class Row:
    """One setting at one sparsity.

    Attributes:
        setting: its name.
        asked: fraction of the targeted weights that should go.
        achieved: fraction of them that went.
        perplexity: of the pruned model.
        kl: `KL(dense || pruned)` in nats per token; None where it cannot be measured.
        accuracy: share of predicted tokens that have the largest logit.
        scoring_seconds: for scores, and the choice of a calibration batch; None where scoring and pruning take turns.
        pruning_seconds: for choosing, hiding and compensation; for scoring too, where both take turns.
        peak_bytes: what scoring takes on top of the model, at most; with pruning, where both take turns. None where it
            cannot be measured.
        notes: what the user should know.
    """

    setting: str
    asked: float
    achieved: float
    perplexity: float
    kl: float | None
    accuracy: float | None
    scoring_seconds: float | None
    pruning_seconds: float
    peak_bytes: int | None
    notes: list[str] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a predicted token, in nats."""
        return math.log(self.perplexity)


@dataclass
class Comparison:
    """Several settings on one draw of data; `str()` is a table.

    Attributes:
        settings: name -> `PruningConfig.to_dict()`; at several sparsities, of the first.
        dense: measurements of the model as it came in, and is again.
        rows: in the order in which they were measured.
        correlations: name of a setting -> the same -> Spearman's correlation of their scores inside of a group, mean
            over groups and kinds of unit; None where they rank no group in common. Of structured settings alone.
        calibration: `CalibrationData.to_dict()` of what the settings were given, but for those that choose among more
            of the same draw; None where no setting looks at data.
        versions: library -> version.
    """

    settings: dict[str, dict[str, Any]]
    dense: Evaluation
    rows: list[Row]
    correlations: dict[str, dict[str, float | None]]
    calibration: dict[str, Any] | None
    versions: dict[str, str]

    @property
    def ranking(self) -> list[Row]:
        """Rows by sparsity, then perplexity, best first."""
        return sorted(self.rows, key=lambda row: (row.asked, math.isnan(row.perplexity), row.perplexity))

    @property
    def measure(self) -> str:
        """What the rows are judged by: of running text the perplexity, of answers and captions the loss."""
        return "loss" if self.dense.data.get("task") else "perplexity"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; the rows best first."""
        return {"version": VERSION} | asdict(self) | {"rows": [asdict(row) for row in self.ranking]}

    def write_json(self, directory: str | os.PathLike[str]) -> None:
        """Write `comparison.json`, whole or not at all."""
        text = json.dumps(self.to_dict(), indent=2)
        _write(Path(directory) / f"{NAME}.json", f"{text}\n".encode())

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `comparison.json`, `comparison.md` and `comparison.png` into an existing folder."""
        from optimum_prune.comparing.plot import picture  # here, because it brings matplotlib

        self.write_json(directory)
        _write(Path(directory) / f"{NAME}.md", self.to_markdown().encode())
        _write(Path(directory) / f"{NAME}.png", picture(self))

    def to_markdown(self) -> str:
        """Return the tables in Markdown."""
        parts = ["# Comparison", f"![{self.measure} by sparsity]({NAME}.png)", _markdown(self._table())]
        if self.correlations:
            parts += ["## Correlation of the scores", _markdown(self._matrix())]
        return "\n\n".join([*parts, *self._remarks()]) + "\n"

    def __str__(self) -> str:
        """Return the table, the correlations, and what both were measured on."""
        lines = align(self._table())
        if self.correlations:
            lines += ["", "correlation of the scores", *align(self._matrix())]
        return "\n".join([*lines, "", *self._remarks()])

    def _table(self) -> list[list[str]]:
        heading = ["setting", "asked", "achieved", self.measure, "KL", "right", "scoring", "pruning", "memory"]
        dense = [DENSE, "", "", _number(getattr(self.dense, self.measure)), "", _percent(self.dense.accuracy)]
        return [heading, [*dense, "", "", ""], *(self._cells(row) for row in self.ranking)]

    def _cells(self, row: Row) -> list[str]:
        return [
            row.setting,
            _percent(row.asked),
            _percent(row.achieved),
            _number(getattr(row, self.measure)),
            NOTHING if row.kl is None else f"{row.kl:.4f}",
            _percent(row.accuracy),
            NOTHING if row.scoring_seconds is None else f"{row.scoring_seconds:.1f} s",
            f"{row.pruning_seconds:.1f} s",
            NOTHING if row.peak_bytes is None else megabytes(row.peak_bytes),
        ]

    def _matrix(self) -> list[list[str]]:
        def cell(value: float | None) -> str:
            return NOTHING if value is None else f"{value:.2f}"

        numbers = {name: f"[{i}]" for i, name in enumerate(self.correlations, 1)}
        rows = [[f"{numbers[name]} {name}", *map(cell, row.values())] for name, row in self.correlations.items()]
        return [["", *numbers.values()], *rows]

    def _remarks(self) -> list[str]:
        lines = [f"measured on {describe_data(without_paths(self.dense.data))}; {self.dense.machine}"]
        lines += self.dense.context
        if self.calibration is not None:
            lines.append(f"calibration: {describe_data(without_paths(self.calibration))}")
        if any(row.scoring_seconds is None for row in self.rows):
            lines.append(f"scoring {NOTHING}: scoring and pruning take turns; the time of pruning is that of both.")
        notes: dict[str, dict[str, None]] = {}
        for row in self.ranking:
            for note in row.notes:
                notes.setdefault(note, {})[row.setting] = None
        return [*lines, *(f"note ({', '.join(names)}): {note}" for note, names in notes.items())]


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    heading, *others = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heading, [":--", *["--:"] * (len(heading) - 1)], *others])


def _write(path: Path, content: bytes) -> None:
    """Write a file in one step: who reads it meanwhile reads the old one."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InvalidConfig(f"{str(path)!r} cannot be written: {error.strerror}.") from error
