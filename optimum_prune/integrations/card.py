"""The model card of a pruned checkpoint: what was asked, what was achieved, and measured numbers only."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from optimum_prune import registry
from optimum_prune.config import IN_MEMORY, without_paths
from optimum_prune.errors import InvalidConfig
from optimum_prune.integrations.signature import sign_
from optimum_prune.measurements import Evaluation, comparison_rows, megabytes, timing_note
from optimum_prune.recovery.report import RecoveryReport, describe_training
from optimum_prune.report import (
    WEIGHT,
    PruningReport,
    describe_data,
    describe_gamma,
    describe_induction,
    describe_selection,
    is_hub_id,
)

SPREAD = {
    "row": "ranked inside of every row of a matrix",
    "matrix": "ranked inside of every matrix",
    "global": "one ranking of all targeted weights",
}
"""Allocation of zeros -> what it means."""


def model_card(
    report: PruningReport,
    *,
    evaluations: Mapping[str, Evaluation],
    layout: str,
    storage: str = "dense",
    architecture: str | None = None,
    reads_images: bool = False,
    file_bytes: int | None = None,
    parameters: int | None = None,
    adapter: bool = False,
    pictures: Iterable[str] = (),
    left: Mapping[str, str] | None = None,
    derived_from: str | list[str] | None = None,
    card_data: Mapping[str, Any] | None = None,
) -> ModelCard:
    """Write the card of a pruned model. Where it was pruned before, the card tells of all cuts from the dense model on.

    Args:
        report: of the run.
        evaluations: what was measured, by the words of `STAGES`; sections without numbers are left out.
        layout: as which the checkpoint is written: `"stock"`, `"compact"` or `"padded"`.
        storage: how its weights are: `"dense"` or `"packed"`.
        architecture: class of the saved model, as which the card loads it; None for a causal language model.
        reads_images: whether a processor is saved along, not a tokenizer alone.
        file_bytes: size of the weight files.
        parameters: of the model that loads, those of its padding too.
        adapter: whether the adapter of a recovery is saved along.
        pictures: paths of those that are saved along, relative to the card.
        left: files of the model's source that are not saved along -> the reason.
        derived_from: Hub ids of what the dense model was made of, for the metadata; used where it has no id itself.
        card_data: metadata that is known otherwise, e.g. from `inherited_metadata`; lists are added to ours.
    """
    given = dict(card_data or {})
    cuts = [*report.previous, report.record()]
    runs = _runs(report)
    base_model = given.get("base_model") or cuts[0].get("base_model")
    scorer = report.config["scorer"]
    name = f"{(base_model or report.model_type).split('/')[-1]}-{scorer}{_amount(report)}"
    measured = evaluations.get(report.stage)
    earlier = evaluations.get("pruned")  # of a model that was trained since
    calibration = _dataset(report.calibration["source"])[0] if report.calibration else None
    metadata = {
        "base_model": base_model or derived_from,
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if reads_images else _pipeline_tag(architecture),
        **given,
        "tags": _merge(given.get("tags"), ["pruned", "optimum_prune", scorer, report.config["pattern"]]),
        "datasets": _merge(given.get("datasets"), [calibration] if calibration else []) or None,
    }
    if results := _eval_results(measured):
        metadata |= {"model_name": name, "eval_results": results}
    card = ModelCard.from_template(
        ModelCardData(**metadata),
        template_path=str(Path(__file__).with_name("card.md")),
        name=name,
        base_model=base_model,
        base_revision=cuts[0].get("base_revision"),
        parameters_before=cuts[0]["achieved"]["parameters_before"],
        report=report,
        cut=len(cuts),
        units=unit_rows(report),
        gamma=report.gamma and describe_gamma(report.gamma),
        layers=layer_rows(report),
        zeros=WEIGHT in report.units,
        dense_again=report.dense_again,
        n_of_m=report.config["pattern"].split(":") if ":" in report.config["pattern"] else None,
        spread=SPREAD.get(report.allocation),
        calibration_data=report.calibration and describe_data(without_paths(report.calibration)),
        selection=(found := (report.calibration or {}).get("selection")) and describe_selection(found),
        in_memory=bool(report.calibration) and report.calibration["source"].startswith(IN_MEMORY),
        induction=report.induction and describe_induction(report.induction),
        recoveries=[_recovery(recovery) for recovery in report.recovery],
        trained=any(recovery.kept for recovery in report.recovery),
        controlled=any(recovery.control for recovery in report.recovery),
        has_control="control" in evaluations,
        pictures=[(Path(picture).stem, picture) for picture in pictures],
        recipes={name: run.text for name, run in runs.items()},
        commands=_commands(base_model or "path/to/the/dense/model", runs),
        reference=_reference(scorer),
        layout=layout,
        padded_to=parameters if layout == "padded" else None,
        packed=storage == "packed",
        plugin=_plugin(layout, storage),
        model_class="AutoModelForCausalLM" if _is_causal(architecture) else architecture,
        reader="AutoProcessor" if reads_images else "AutoTokenizer",
        adapter=adapter,
        file_size=None if file_bytes is None else megabytes(file_bytes),
        measured=measured,
        shown=(shown := measured or earlier),
        measurements=comparison_rows(evaluations) if shown else None,
        measured_data=shown and describe_data(without_paths(shown.data)),
        left=dict(left or {}),
        timing=shown and timing_note(evaluations),
    )
    sign_(card)
    return card


def _plugin(layout: str, storage: str) -> str:
    """Say why loading needs this package; empty where it does not."""
    reasons = {"compact": "its layers differ in size", "packed": "its weights are packed"}
    return " and ".join(reason for kind, reason in reasons.items() if kind in (layout, storage)).capitalize()


def _is_causal(architecture: str | None) -> bool:
    return architecture is None or architecture.endswith("ForCausalLM")


def _pipeline_tag(architecture: str | None) -> str | None:
    if _is_causal(architecture):
        return "text-generation"
    return "text-classification" if str(architecture).endswith("ForSequenceClassification") else None


def _recovery(recovery: RecoveryReport) -> dict[str, Any]:
    """Return what the card says of a training: where, on what, and the losses before and after."""
    rows = [["", "loss per token", recovery.kl_label], *loss_rows(recovery)]
    if recovery.before.kl is None:
        rows = [row[:2] for row in rows]
    return {"report": recovery, "losses": rows, "data": describe_training(without_paths(recovery.data))}


def loss_rows(recovery: RecoveryReport) -> list[list[str]]:
    """Return a row for every model whose held-out loss was measured: its name, cross-entropy, distance to the dense."""
    return [
        [label, f"{losses.lm:.4f}", "" if losses.kl is None else f"{losses.kl:.4f}"]
        for label, losses in recovery.losses
    ]


@dataclass(frozen=True)
class _Run:
    """A command that was run, with its recipe; `dense` says that it needs the dense model beside."""

    verb: str
    recipe: Mapping[str, Any]
    dense: bool = False
    control: bool = False

    @property
    def text(self) -> str:
        return yaml.safe_dump(dict(self.recipe), sort_keys=False, allow_unicode=True).strip()


def _runs(report: PruningReport) -> dict[str, _Run]:
    """Return file name -> every pruning and every training that counts, in order."""
    runs = []
    kept = [recovery.record() for recovery in report.recovery if recovery.kept]
    for cut in [*report.previous, report.record() | {"recovery": kept}]:
        runs.append(_Run("run", cut["recipe"]))
        for recovery in cut.get("recovery", []):
            config, control = recovery["config"], recovery["control"]
            writes = config["dataset"] in (None, "self") or "self" in config["dataset"]
            runs.append(_Run("recover", config, dense=writes or config["loss"] != "lm" or control, control=control))
    names = ["recipe.yaml"] if len(runs) == 1 else [f"recipe-{number}.yaml" for number in range(1, len(runs) + 1)]
    return dict(zip(names, runs, strict=True))


def _commands(dense: str, runs: Mapping[str, _Run]) -> list[str]:
    """Return a command for every recipe; each goes on with what the one before wrote."""
    models = [dense, *(f"pruned-{number}" for number in range(1, len(runs))), "pruned"]
    return [
        f"optimum-cli prune {run.verb} --model {model} --output {output} --recipe {recipe}"
        f"{f' --dense {dense}' * run.dense}{' --control' * run.control}"
        for (model, output), (recipe, run) in zip(pairwise(models), runs.items(), strict=True)
    ]


def _eval_results(measured: Evaluation | None) -> list[EvalResult]:
    if measured is None:
        return []
    dataset, config = _dataset(measured.data["source"])
    metrics = {
        "perplexity": ("Perplexity", measured.perplexity),
        "kl_divergence": ("KL(dense || pruned), nats per token", measured.kl),
        "exact_match": ("Answers of which every token is predicted right", measured.exact_match),
    }
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset or "text",
            dataset_name=without_paths(measured.data)["source"],
            dataset_config=config,
            dataset_args={key: value for key, value in measured.data.items() if key != "source"},
            metric_type=metric,
            metric_name=name,
            metric_value=value,
        )
        for metric, (name, value) in metrics.items()
        if value is not None and math.isfinite(value)
    ]


def _dataset(source: str) -> tuple[str | None, str | None]:
    """Split a source into a dataset's Hub id and configuration, both None where it is none of the Hub's."""
    path, _, config = source.partition(":")
    return (path, config or None) if is_hub_id(path) else (None, None)


def unit_rows(report: PruningReport) -> list[list[str]]:
    """Return a heading, and a row for every kind of unit, with what was asked and achieved of it."""
    rows = [["", "asked", "achieved", "units kept"]]
    for stack, units in report.per_stack.items():
        for unit, total in units.items():
            label = f"`{unit}`" if len(report.per_stack) == 1 else f"`{unit}` of `{stack}`"
            kept = f"{total['after']:,} of {total['before']:,}"
            rows.append([label, f"{total['asked']:.1%}", f"{total['achieved']:.1%}", kept])
    return [*rows, ["all", f"{report.asked:.1%}", f"{report.achieved:.1%}", ""]]


def _amount(report: PruningReport) -> str:
    """Return the end of a model's name: the percentage asked, or `-2:4`, which says it better."""
    pattern = report.config["pattern"]
    return f"-{pattern}" if ":" in pattern else f"{100 * report.asked:.0f}"


def layer_rows(report: PruningReport) -> list[list[str]]:
    """Return a heading, and a row for every layer: its path, and how many units it kept, or how many are zero."""
    if WEIGHT in report.units:
        return [["layer", "zeros in the targeted weights"], *_zero_rows(report)]
    rows = [["layer", *report.units]]
    for (stack, layer), counts in report.per_layer.items():
        cells = [counts.get(unit) for unit in report.units]
        rows.append([f"{stack}.{layer}", *(f"{cell[0]} of {cell[1]}" if cell else "" for cell in cells)])
    return rows


def _zero_rows(report: PruningReport) -> Iterator[list[str]]:
    for (stack, layer), counts in report.per_layer.items():
        after, before = counts[WEIGHT]
        zeros = before - after
        yield [f"{stack}.{layer}", f"{zeros:,} of {before:,} ({zeros / before:.1%})"]


def _reference(scorer: str) -> str | None:
    try:
        return getattr(registry.load("scorers", scorer), "reference", None)
    except InvalidConfig:  # another package's scorer, which is not installed where the card is written
        return None


def _merge(given: str | Iterable[str] | None, ours: Iterable[str]) -> list[str]:
    given = [given] if isinstance(given, str) else given or []
    return list(dict.fromkeys([*given, *ours]))
