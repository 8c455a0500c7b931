"""The report as a page: one file with tables and pictures that asks nobody for anything and runs nothing."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from optimum_prune.config import without_paths
from optimum_prune.integrations.card import layer_rows, loss_rows, unit_rows
from optimum_prune.measurements import STAGES, Evaluation, comparison_rows, latest, timing_note
from optimum_prune.plots.pictures import svg_pictures
from optimum_prune.recovery.report import RecoveryReport, describe_training
from optimum_prune.report import (
    WEIGHT,
    ZEROS,
    PruningReport,
    describe_data,
    describe_gamma,
    describe_induction,
    describe_selection,
)


def write_page(path: Path, report: PruningReport, evaluations: Mapping[str, Evaluation], *, title: str) -> Path:
    """Write the page; see `page`."""
    path.write_text(page(report, evaluations, title=title), encoding="utf-8")
    return path


def page(report: PruningReport, evaluations: Mapping[str, Evaluation], *, title: str) -> str:
    """Return an HTML page that a phone can show, in light or dark; whatever the report holds is shown as text.

    Args:
        report: of a pruning.
        evaluations: what was measured, by name; without any, the page says so.
        title: what the checkpoint is called.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    measured = latest(evaluations) if evaluations else None
    pictures = {name: Markup(element) for name, element in svg_pictures(report, evaluations).items()}
    return environment.get_template("page.html").render(
        title=title,
        report=report,
        figures=_figures(report, evaluations),
        pictures=pictures,
        units=[[_plain(cell) for cell in row] for row in unit_rows(report)],
        layers=layer_rows(report),
        zeros=ZEROS if WEIGHT in report.units else None,
        gamma=report.gamma and describe_gamma(report.gamma),
        measured=measured,
        stages=list(evaluations),
        measurements=comparison_rows(evaluations) if measured else [],
        measured_data=measured and _plain(describe_data(without_paths(measured.data))),
        timing=measured and timing_note(evaluations),
        recoveries=[(_plain(describe_training(without_paths(r.data))), _recovery_rows(r)) for r in report.recovery],
        provenance=list(_provenance(report)),
        recipe=yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=True),
    )


def _plain(text: str) -> str:
    """Return a line of Markdown without the marks of code."""
    return text.replace("`", "")


def _figures(report: PruningReport, evaluations: Mapping[str, Evaluation]) -> list[tuple[str, str]]:
    """Return what a reader wants to know first: `(label, value)`."""
    change = report.parameters_after / report.parameters_before - 1
    figures = [
        ("parameters", f"{report.parameters_after:,} ({change:+.1%})"),
        (f"targeted weights {'set to zero' if WEIGHT in report.units else 'removed'}", f"{report.achieved:.1%}"),
    ]
    if report.stage not in evaluations:
        return figures
    heading, *rows = comparison_rows(evaluations)
    for label, *values in rows:
        if label in ("perplexity", "loss per token", "decoding, per token"):
            ratio = f" ({values[-1]})" if heading[-1] not in STAGES and values[-1] else ""
            figures.append((label, f"{values[heading.index(report.stage) - 1]}{ratio}"))
    return figures


def _recovery_rows(recovery: RecoveryReport) -> list[list[str]]:
    return [["held-out loss per token", "cross-entropy", recovery.kl_label], *loss_rows(recovery)]


def _provenance(report: PruningReport) -> Iterator[tuple[str, str]]:
    """Yield what it takes to do it again: `(label, value)`."""
    if report.hub_base_model:
        yield "dense model", " ".join(filter(None, [report.hub_base_model, report.base_revision]))
    if report.calibration is not None:
        yield "calibration", _plain(describe_data(without_paths(report.calibration)))
        if selection := report.calibration.get("selection"):
            yield "selection", describe_selection(selection)
    if report.induction:
        yield "learned masks", describe_induction(report.induction)
    yield "time", f"{report.seconds:,.1f} s"
    yield "versions", ", ".join(f"{library} {version}" for library, version in report.versions.items())
    yield "fingerprint", report.fingerprint
