"""What evaluation data has in common with the data that a model was calibrated or trained on, in sentences."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from optimum_prune.calibration.passages import share
from optimum_prune.calibration.samples import CalibrationData
from optimum_prune.config import IN_MEMORY, describe_origin, without_paths
from optimum_prune.report import PruningReport

logger = logging.getLogger(__name__)

LEAST = 0.01
"""Fraction of passages in common from which on it is mentioned: below it, texts quote one another."""
SPLIT = re.compile(r"(?<![a-z])(train|training|valid|validation|val|dev|test|testing|eval|evaluation)(?![a-z])", re.I)
"""Names of splits in the names of files."""


@dataclass(frozen=True)
class Seen:
    """Data that shaped a model.

    Attributes:
        role: what was done with it: "calibrated" or "trained".
        sources: `CalibrationData.origin` of each source.
        passages: of all samples together, see `calibration.passages`; None where they are not known.
    """

    role: str
    sources: Sequence[dict[str, Any]]
    passages: str | None = None


def seen_by(report: PruningReport | None) -> list[Seen]:
    """Return all data that the prunings and trainings of a report have used."""
    if report is None:
        return []
    found: list[Seen] = []
    for record in report.previous:
        if record.get("calibration"):
            found.append(Seen("calibrated", [record["recipe"]["calibration"]]))
        found += [Seen("trained", training["data"]["sources"]) for training in record.get("recovery") or ()]
    if report.calibration is not None:
        found.append(Seen("calibrated", [report.calibration], report.calibration.get("passages")))
    trainings = [training.data for training in report.recovery if training.kept]
    return found + [Seen("trained", data["sources"], data.get("passages")) for data in trainings]


def context(seen: Iterable[Seen], data: CalibrationData) -> list[str]:
    """Return sentences that say whether a model is measured on what it was calibrated or trained on; warn if it is.

    The same source, another split of it, and another source are told by their names; the same text is told by its
    passages, whatever its source is called.
    """
    # by relation and names of the sources: what was done with them, and the share of passages in common
    roles: dict[tuple[str, str], dict[str, float]] = {}
    for one in seen:
        relation, common = _relation(one, data)
        found = roles.setdefault((relation, " and ".join(map(_name, one.sources))), {})
        found[one.role] = max(common, found.get(one.role, 0.0))
    sentences = []
    for (relation, name), found in roles.items():
        sentences.append(_sentence(relation, name, " and ".join(found), max(found.values())))
        if relation in ("same", "part"):
            logger.warning("%s", sentences[-1])
    return sentences


def _relation(seen: Seen, data: CalibrationData) -> tuple[str, float]:
    """Return how seen data is related to evaluation data, and the share of passages in common."""
    common = 0.0 if seen.passages is None else share(seen.passages, data.rows())
    if any(_is_same(source, data.origin) for source in seen.sources):
        return "same", common
    if common >= LEAST:
        return "part", common
    return ("kind" if any(_is_kin(source, data.origin) for source in seen.sources) else "other"), common


def _sentence(relation: str, name: str, roles: str, common: float) -> str:
    """Return a sentence about data that was used in some `roles`, e.g. "calibrated and trained"."""
    known, risk = f"the model was {roles} on ({name}", "on other text it may have lost more."
    passages = f"{common:.0%} of the measured passages"
    if relation == "same":
        among = f"; {passages} were among its samples" if common >= LEAST else ""
        return f"Measured on the data that {known}{among}): {risk}"
    if relation == "part":
        part = "" if common == 1 else "in part "
        return f"Measured {part}on the data that {known}; {passages} are in it): {risk}"
    if relation == "kind":
        return f"Measured on the kind of text that {known}): {risk}"
    return f"Measured on another source than {known})."


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return _is_named(one) and (one["source"], one.get("split")) == (other["source"], other.get("split"))


def _is_kin(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two sources are one dataset, or two files whose names differ in the split alone."""
    return _is_named(one) and SPLIT.sub("", one["source"]) == SPLIT.sub("", other["source"])


def _is_named(source: dict[str, Any]) -> bool:
    """Tell whether a name stands for one source: a dataset in memory is named by its columns, a list by its hash."""
    return not source["source"].startswith(IN_MEMORY) or ", sha256 " in source["source"]


def _name(source: dict[str, Any]) -> str:
    return "text that it wrote itself" if source["source"] == "self" else describe_origin(without_paths(source))
