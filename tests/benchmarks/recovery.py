"""Recovery by LoRA: what it gives, beside the dense model trained alike; and what keeping zeros costs."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optimum_prune import CalibrationConfig, Pruner, PruningConfig, RecoveryConfig
from optimum_prune.plots.style import COLORS, check_installed, new_figure, png, styled
from optimum_prune.recovery.report import RecoveryReport
from optimum_prune.sparsity import masks_of
from tests import lab
from tests.benchmarks.smollm2 import load_pruner, manual, texts

WINDOWS: dict[str, Any] = {"num_samples": 24, "seq_len": 256}
STEPS = 40
PICTURE = Path(__file__).with_suffix(".png")
PARTS = ("structured", "masks", "trained")
TRAININGS: dict[str, dict[str, Any]] = {
    "cross-entropy": {},
    "KL": {"loss": "kl"},
    "cross-entropy, half of it written by the dense model": {"dataset": None},
    "KL, half of it written by the dense model": {"dataset": None, "loss": "kl"},
    "cross-entropy, learning rate 2e-4": {"learning_rate": 2e-4},
    "cross-entropy, learning rate 1e-3": {"learning_rate": 1e-3},
}
CONTROLLED = tuple(TRAININGS)[0:3:2]
"""With the dense model trained alike; towards itself it cannot be."""


def run(parts: Iterable[str] = PARTS) -> None:
    """Print a table for each part, and draw the curves of the first."""
    corpus, calibration, evaluation = texts()
    print(f"{corpus}; LoRA rank 8, {STEPS} steps x 4 x 128 tokens; {WINDOWS}; test split / other text\n")
    for part in parts:
        {"structured": _structured, "masks": _masks, "trained": _trained}[part](calibration, evaluation)


def _recovery(calibration: Any, **changes: Any) -> RecoveryConfig:
    return RecoveryConfig(**{"dataset": calibration} | changes, max_steps=STEPS, batch_size=4, seq_len=128)


def _perplexities(pruner: Pruner, evaluation: Any) -> dict[str, tuple[float, float]]:
    """Return the perplexity of every stage: on text like that of the training, and on other text."""
    found: dict[str, list[float]] = {}
    for text in (evaluation, manual()):
        pruner.evaluate(text, latency=False, **WINDOWS)
        for stage, measured in pruner.evaluations.items():
            found.setdefault(stage, []).append(measured.perplexity)
    return {stage: (own, other) for stage, (own, other) in found.items()}


def _structured(calibration: Any, evaluation: Any) -> None:
    """20 % by two scorers: the loss of the text, and the distance to what the dense model predicts."""
    check_installed()
    curves: dict[str, RecoveryReport] = {}
    for scorer, trainings in {"ntk": TRAININGS, "magnitude": {"cross-entropy": TRAININGS["cross-entropy"]}}.items():
        config = PruningConfig(
            scorer=scorer,
            sparsity=0.2,
            allocation="gamma",
            compensation="none",
            calibration=CalibrationConfig(calibration, num_samples=32, seq_len=128),
        )
        for number, (name, changes) in enumerate(trainings.items()):
            pruner = load_pruner()
            pruner.prune(config)
            if number == 0:
                found = _perplexities(pruner, evaluation)
                print(f"\n{scorer}, 20 % structured: dense {_pair(found['dense'])}, pruned {_pair(found['pruned'])}\n")
                print("| training | recovered | dense, trained alike | held-out loss before, after | minutes |")
                print("|---|---|---|---|---|", flush=True)
            start = time.perf_counter()
            report = pruner.recover(_recovery(calibration, **changes), control=scorer == "ntk" and name in CONTROLLED)
            both = time.perf_counter() - start
            found = _perplexities(pruner, evaluation)
            control = f"{_pair(found['control'])} ({(both - report.seconds) / 60:.1f} min)" if report.control else "-"
            print(
                f"| {name} | {_pair(found['recovered'])} | {control} | {report.before.lm:.3f}, {report.after.lm:.3f} "
                f"| {report.seconds / 60:.1f} |",
                flush=True,
            )
            curves.setdefault(scorer, report)
    _draw(curves)
    print(f"\nHeld-out loss by step: {PICTURE.name}\n")


def _pair(found: tuple[float, float]) -> str:
    return " / ".join(f"{perplexity:,.1f}" for perplexity in found)


def _draw(curves: dict[str, RecoveryReport]) -> None:
    with styled():
        figure = new_figure()
        axes = figure.subplots()
        for (scorer, report), color in zip(curves.items(), COLORS, strict=False):
            points = [(0.0, report.before.lm), *((p["step"], p["held_out"]) for p in report.curve if "held_out" in p)]
            axes.plot(*zip(*points, strict=True), marker="o", color=color, label=scorer)
        axes.set(title="Held-out loss, 20 % structured", xlabel="step", ylabel="nats per token")
        axes.legend()
        PICTURE.write_bytes(png(figure))


def _masks(calibration: Any, evaluation: Any) -> None:
    """2:4 by SparseGPT: what becomes of the zeros, and of the loss."""
    print("| 2:4, sparsegpt | pruned | recovered | zeros | 2:4 | held-out loss of adapter, merged | seconds |")
    print("|---|---|---|---|---|---|---|")
    data = CalibrationConfig(calibration, num_samples=32, seq_len=256)
    for merge in ("masked", "remask", "plain"):
        pruner = load_pruner()
        pruner.prune(PruningConfig(pattern="2:4", scorer="sparsegpt", calibration=data))
        before, weights = _perplexities(pruner, evaluation)["pruned"], _weights(pruner)
        report = pruner.recover(_recovery(calibration, merge=merge))
        after = _perplexities(pruner, evaluation)["recovered"]
        assert report.merged is not None
        print(
            f"| {merge} | {_pair(before)} | {_pair(after)} | {report.zeros_after / weights:.4f} "
            f"| {_is_2_of_4(pruner)} | {report.after.lm:.5f}, {report.merged.lm:.5f} | {report.seconds:.0f} |",
            flush=True,
        )


def _trained(_calibration: Any, _evaluation: Any) -> None:
    """40 % of the lab's models, which have texts, pairs or pictures of their own."""
    print("| lab | scorer | dense | pruned | recovered | held-out loss before, after | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in lab.NAMES:
        lengths: dict[str, Any] = {} if name == "llava" else {"seq_len": 128}
        data = CalibrationConfig(lab.calibration(name), num_samples=32, **lengths)
        for scorer in ("ntk", "magnitude"):
            pruner = Pruner.from_pretrained(lab.folder(name))
            pruner.prune(
                PruningConfig(scorer=scorer, sparsity=0.4, allocation="global", compensation="none", calibration=data)
            )
            before = pruner.evaluate(lab.evaluation(name), latency=False, num_samples=64, **lengths)
            training = RecoveryConfig(lab.calibration(name), max_steps=60, batch_size=8, learning_rate=2e-3, **lengths)
            report = pruner.recover(training)
            after = pruner.evaluate(lab.evaluation(name), latency=False, num_samples=64, **lengths)
            print(
                f"| {name} | {scorer} | {pruner.evaluations['dense'].loss:.3f} | {before.loss:.3f} | {after.loss:.3f} "
                f"| {report.before.lm:.3f}, {report.after.lm:.3f} | {report.seconds:.0f} |",
                flush=True,
            )


def _weights(pruner: Pruner) -> int:
    return sum(mask.numel() for mask in masks_of(pruner.model).values())


def _is_2_of_4(pruner: Pruner) -> bool:
    masks = masks_of(pruner.model).values()
    return bool(masks) and all(bool((mask.unflatten(-1, (-1, 4)).sum(-1) <= 2).all()) for mask in masks)


if __name__ == "__main__":
    run([part for part in PARTS if part in sys.argv[1:]] or PARTS)
