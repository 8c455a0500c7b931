"""What a run asked for and what it achieved: pure data, the same in JSON, printable as a table."""

import hashlib
import json
import os
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from optimum_prune.config import describe_origin, without_paths
from optimum_prune.recovery.report import RecoveryReport

VERSION = 1
WIDTH = 100
"""Columns that the printed table keeps within."""
BAR = 10
"""Columns of a bar."""
GONE = {"layer": "dropped", "attention": "skipped", "mlp": "skipped"}
"""Kind of layer -> what happened to it where it did not stay."""
WEIGHT = "weight"
"""Unit of the patterns that set single weights to zero."""
MADE_UP = {
    "none": ", no compensation",
    "least_squares": ", least squares",
    "sequential": ", sequential least squares",
    "bias": ", shifted biases",
}
"""Compensation -> what the table's first line says of it."""
ZEROS = (
    "In dense storage, zeros are kept and multiplied like any other weight: alone, they make a model neither smaller "
    "nor faster."
)


@dataclass(frozen=True)
class GroupReport:
    """One coupled group before and after; or a linear; or a block, or sub-layer of one, which is a group of one unit.

    Attributes:
        name: full module path, e.g. `model.layers.3.mlp`, before any block was dropped.
        stack: module path of the stack of blocks, e.g. `model.layers`.
        layer: index of the block in its stack, before any was dropped.
        unit: kind of unit, e.g. `"mlp_channel"`.
        before: units before.
        after: units after; of weights, those that are not zero.
        kept: sorted indices of the units kept; empty for weights.
        weights_before: weights in the linears of the group before; biases, norms and embeddings do not count.
        weights_after: the same after.
        scores: quantiles of the scores of the units `kept` and `removed`, at 5, 25, 50, 75 and 95 %; after several
            steps, of those that the last one ranked. None where nothing was ranked.
    """

    name: str
    stack: str
    layer: int
    unit: str
    before: int
    after: int
    kept: list[int]
    weights_before: int
    weights_after: int
    scores: dict[str, list[float]] | None = None


@dataclass
class PruningReport:
    """What was asked, what was achieved, and what it takes to do it again; `str()` is a table.

    Attributes:
        config: `PruningConfig.to_dict()`.
        model_type: as in the model's config.
        asked: fraction of the targeted weights that should go.
        asked_per_stack: the same by path of the stack and kind of unit, after gamma has spread it.
        groups: the targeted groups.
        parameters_before: parameters of the whole model, tied ones counted once.
        parameters_after: the same, after.
        allocation: the one used; never `"auto"`.
        gamma: path of a stack -> MLP sparsity over attention sparsity; None where the allocation has none.
        calibration: `CalibrationData.to_dict()`; None where no data was used.
        seconds: of the whole run.
        versions: library -> version.
        base_model: what the dense model was loaded from: a Hub id or a path.
        base_revision: commit of the dense model, where it came from the Hub.
        previous: records of earlier prunings of the same model, the oldest first.
        warnings: whatever the user should know, a sentence each.
        compensation: how the units that stay make up for those that went; None where no units went.
        induction: of learned masks, by block: `block`, its held-out losses `base` and `induced`, whether the learned
            masks were `kept`, and how many biases were `shifted` and `created`; None where none were learned.
        recovery: what was trained since, the oldest first.
    """

    config: dict[str, Any]
    model_type: str
    asked: float
    asked_per_stack: dict[str, dict[str, float]]
    groups: list[GroupReport]
    parameters_before: int
    parameters_after: int
    allocation: str
    gamma: dict[str, float] | None
    calibration: dict[str, Any] | None
    seconds: float
    versions: dict[str, str]
    base_model: str | None = None
    base_revision: str | None = None
    previous: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    compensation: str | None = None
    induction: list[dict[str, Any]] | None = None
    recovery: list[RecoveryReport] = field(default_factory=list)

    @property
    def achieved(self) -> float:
        """Fraction of the targeted weights that was removed."""
        return _removed(self.groups)

    @property
    def per_stack(self) -> dict[str, dict[str, dict[str, float]]]:
        """By stack and kind of unit: `asked` and `achieved` (fractions of its weights), units `before` and `after`."""
        table: dict[str, dict[str, dict[str, float]]] = {}
        for stack, units in self.asked_per_stack.items():
            for unit, asked in units.items():
                groups = [group for group in self.groups if (group.stack, group.unit) == (stack, unit)]
                table.setdefault(stack, {})[unit] = {
                    "asked": asked,
                    "achieved": _removed(groups),
                    "before": sum(group.before for group in groups),
                    "after": sum(group.after for group in groups),
                }
        return table

    @property
    def units(self) -> list[str]:
        """Kinds of unit, in the order of the groups."""
        return list(dict.fromkeys(group.unit for group in self.groups))

    @property
    def steps(self) -> int:
        """In how many steps units went."""
        return self.config.get("steps", 1)  # older reports have none

    @property
    def stage(self) -> str:
        """What the model is by now, in the words of `measurements.STAGES`."""
        return "recovered" if any(recovery.kept for recovery in self.recovery) else "pruned"

    @property
    def dense_again(self) -> bool:
        """Whether a training filled zeros that the pruning had left."""
        return self.zeros > 0 and any(r.kept and r.zeros_after < r.zeros_before for r in self.recovery)

    @property
    def options(self) -> str:
        """What was chosen of the scorer's options, in words; empty where nothing was."""
        return ", ".join(f"{name}={value}" for name, value in (self.config.get("scorer_options") or {}).items())

    @property
    def scorer(self) -> str:
        """Name of the scorer, with the options that were chosen."""
        return f"{self.config['scorer']} ({self.options})" if self.options else self.config["scorer"]

    @property
    def zeros(self) -> int:
        """Weights of the targeted linears that are zero after a run whose units are weights; else 0."""
        return sum(group.before - group.after for group in self.groups if group.unit == WEIGHT)

    @property
    def per_layer(self) -> dict[tuple[str, int], dict[str, tuple[int, int]]]:
        """`(stack, layer)` -> `{unit: (units after, units before)}`."""
        table: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
        for group in self.groups:
            # A block may have several groups of a kind, as T5's self- and cross-attention.
            counts = table.setdefault((group.stack, group.layer), {})
            after, before = counts.get(group.unit, (0, 0))
            counts[group.unit] = (after + group.after, before + group.before)
        return table

    @property
    def gone(self) -> dict[str, dict[str, list[int]]]:
        """Path of a stack -> kind of unit -> blocks that lost all of it: that were dropped, or had a sub-layer skipped.

        The indices are those of the model as it came in.
        """
        gone: dict[str, dict[str, list[int]]] = {}
        for group in self.groups:
            if group.after == 0 and group.unit in GONE:
                gone.setdefault(group.stack, {}).setdefault(group.unit, []).append(group.layer)
        return gone

    @property
    def fingerprint(self) -> str:
        """Hash of config, data, versions and base revision: equal for runs that should give equal results."""
        data = None if self.calibration is None else self.calibration["fingerprint"]
        identity = json.dumps([self.recipe, data, self.versions, self.base_revision], sort_keys=True)
        return f"sha256:{hashlib.sha256(identity.encode()).hexdigest()}"

    @property
    def hub_base_model(self) -> str | None:
        """`base_model` if it is a Hub id. A path says nothing to others, so it is not published."""
        return self.base_model if self.base_model and is_hub_id(self.base_model) else None

    @property
    def recipe(self) -> dict[str, Any]:
        """`config` as it is published."""
        return without_paths(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types. What can be derived is there too, for readers without this package."""
        derived = {"achieved": self.achieved, "per_stack": self.per_stack, "fingerprint": self.fingerprint}
        return {"version": VERSION} | asdict(self) | derived

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "PruningReport":
        """Read what `to_dict` returned. What a newer version added is ignored, with a warning."""
        if data["version"] > VERSION:
            warnings.warn(
                f"The report has version {data['version']}, newer than {VERSION}: what is new is ignored.",
                stacklevel=2,
            )
        report = cls(**_known(cls, data))
        report.groups = [GroupReport(**_known(GroupReport, group)) for group in data["groups"]]
        report.recovery = [RecoveryReport.from_dict(recovery) for recovery in data.get("recovery", [])]
        return report

    def record(self) -> dict[str, Any]:
        """Return the short form that is kept in `config.json`."""
        data = self.calibration
        record = {
            "version": VERSION,
            "library": f"optimum_prune {self.versions['optimum_prune']}",
            "base_model": self.hub_base_model,
            "base_revision": self.base_revision,
            "recipe": self.recipe,
            "achieved": {
                "parameters_before": self.parameters_before,
                "parameters_after": self.parameters_after,
                "sparsity": self.achieved,
            },
            "dropped_layers": {stack: units["layer"] for stack, units in self.gone.items() if "layer" in units} or None,
            "skipped": {stack: units for stack, units in self.gone.items() if "layer" not in units} or None,
            "calibration": data and {"fingerprint": data["fingerprint"], "tokens": data["tokens"]},
            "fingerprint": self.fingerprint,
            "previous": self.previous or None,
            "recovery": [recovery.record() for recovery in self.recovery if recovery.merged is not None] or None,
        }
        return {key: value for key, value in record.items() if value is not None}

    def name_base(self, base_model: str) -> None:
        """Note the Hub id of the dense model, where it was loaded from a folder."""
        if base_model != self.base_model:
            self.base_model, self.base_revision = base_model, None
            self.previous = [
                {key: value for key, value in cut.items() if key != "base_revision"} | {"base_model": base_model}
                for cut in self.previous
            ]

    def save(self, path: str | os.PathLike[str], **more: Any) -> None:
        """Write `to_dict`, and what more there is to say, as a JSON file."""
        # On one line: with a line for every kept index, a large model's report has hundreds of thousands.
        Path(path).write_text(json.dumps(self.to_dict() | more) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        """Return a table: what was asked and achieved, and what each layer kept."""
        gamma = "" if self.gamma is None else " " + describe_gamma(self.gamma)
        made_up = MADE_UP.get(self.compensation or "", "")
        if self.steps > 1:
            made_up += f", {self.steps} steps"
        change = self.parameters_after / self.parameters_before - 1
        lines = [
            f"{self.config['pattern']}, {self.scorer}, {self.allocation}{gamma}{made_up}: "
            f"asked {self.asked:.1%}, achieved {self.achieved:.1%} of the targeted weights",
            *self._table(),
            f"parameters {self.parameters_before:,} -> {self.parameters_after:,} ({change:+.1%})",
            *([ZEROS] if WEIGHT in self.units else []),
            *([describe_induction(self.induction)] if self.induction else []),
            f"took {self.seconds:.1f} s",
        ]
        if self.calibration is not None:
            lines.append(f"calibration: {describe_data(self.calibration)}")
            lines += [describe_selection(found) for found in [self.calibration.get("selection")] if found]
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [line for recovery in self.recovery for line in str(recovery).splitlines()]
        return "\n".join(row for line in lines for row in _wrap(line))

    def _table(self) -> list[str]:
        per_stack = self.per_stack
        most = {unit: max(t[unit]["before"] for t in per_stack.values() if unit in t) for unit in self.units}

        def count(unit: str, after: float, before: float) -> str:
            digits = len(str(most[unit]))
            bar = "#" * int(BAR * after / before)  # rounded down: it is full only where nothing went
            return f"{after:>{digits}}/{before:<{digits}} {bar:.<{BAR}}"

        def cell(unit: str, after: int, before: int) -> str:
            if unit in GONE:
                return "kept" if after else GONE[unit]
            return count(unit, after, before)

        rows = [("layer", *self.units)]
        for stack, layers in groupby(self.per_layer.items(), key=lambda item: item[0][0]):
            totals = per_stack[stack]
            rows.append((stack,))
            for (_, layer), counts in layers:
                rows.append((str(layer), *(cell(unit, *counts[unit]) if unit in counts else "" for unit in self.units)))
            rows.append(
                (
                    "all",
                    *(
                        count(unit, totals[unit]["after"], totals[unit]["before"]) if unit in totals else ""
                        for unit in self.units
                    ),
                )
            )
            for word in ("asked", "achieved"):
                rows.append((word, *(f"{totals[unit][word]:.1%}" if unit in totals else "" for unit in self.units)))
        return align(rows)


def describe_gamma(gamma: dict[str, float]) -> str:
    """Word the gamma of every stack; a single one needs no name."""
    if len(gamma) == 1:
        return f"{next(iter(gamma.values())):.3g}"
    return ", ".join(f"{ratio:.3g} ({stack})" for stack, ratio in gamma.items())


def is_hub_id(name: str) -> bool:
    """Tell a Hub id (`namespace/name`) from a path: it names nothing here, and does not end like a file."""
    return bool(_HUB_ID.fullmatch(name)) and Path(name).suffix not in _FILES and not os.path.exists(name)


def describe_data(data: dict[str, Any]) -> str:
    """Describe a `CalibrationData.to_dict()` in one line of Markdown."""
    begins = f", each window begins with `{data['begins_with']}`" if data.get("begins_with") else ""
    return f"{describe_origin(data)}, {data['samples']:,} samples, {data['tokens']:,} tokens{begins}"


def describe_induction(blocks: Sequence[dict[str, Any]]) -> str:
    """Word what learned masks were worth; a block that kept the scorer's own gained nothing."""
    changes = [block["induced"] / block["base"] - 1 if block["kept"] else 0.0 for block in blocks]
    gained = sum(block["kept"] for block in blocks)
    biases = {done: sum(block.get(done, 0) for block in blocks) for done in ("shifted", "created")}
    words = "".join(f", {count:,} biases {done}" for done, count in biases.items() if count)
    return (
        f"induction: {gained} of {len(blocks)} blocks gained, median {median(changes):+.1%} held-out difference to the "
        f"dense block{words}"
    )


def describe_selection(selection: dict[str, Any]) -> str:
    """Word a `Selection.to_dict()` in one line."""
    kl, chosen = selection["kl"], selection["chosen"]
    return (
        f"selection: candidate {chosen + 1} of {len(kl)}, KL {kl[chosen]:.4f} ({min(kl):.4f} to {max(kl):.4f}) on "
        f"{selection['tokens']:,} held-out tokens, {selection['seconds']:.1f} s"
    )


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows of cells as lines; a row of one cell is a heading and widens no column."""
    table = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES = {".csv", ".gguf", ".gz", ".json", ".jsonl", ".md", ".parquet", ".txt"}


def _known(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    return {option.name: data[option.name] for option in fields(cls) if option.name in data}


def _removed(groups: Sequence[GroupReport]) -> float:
    return 1 - sum(group.weights_after for group in groups) / sum(group.weights_before for group in groups)


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ") if len(line) > WIDTH else [line]
