"""Recovery by LoRA: what it gives, beside the dense model trained alike; and what keeping zeros costs."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optimum_prune import CalibrationConfig, Pruner, PruningConfig, RecoveryConfig
from optimum_prune.plots.style import COLORS, check_installed, new_figure, png, styled
from optimum_prune.recovery.report import RecoveryReport
from optimum_prune.sparsity import masks_of
from tests import lab
from tests.benchmarks.smollm2 import load_pruner, texts

WINDOWS: dict[str, Any] = {"num_samples": 24, "seq_len": 256}
STEPS = 40
PICTURE = Path(__file__).parent / "output" / "recovery.png"
PARTS = ("structured", "masks", "trained")


def run(parts: Iterable[str] = PARTS) -> None:
    """Print a table for each part, and draw the curves of the first."""
    corpus, calibration, evaluation = texts()
    print(f"{corpus}; LoRA rank 8, {STEPS} steps x 4 x 128 tokens; {WINDOWS}\n")
    for part in parts:
        {"structured": _structured, "masks": _masks, "trained": _trained}[part](calibration, evaluation)


def _recovery(calibration: Any, **changes: Any) -> RecoveryConfig:
    return RecoveryConfig(dataset=calibration, max_steps=STEPS, batch_size=4, seq_len=128, **changes)


def _structured(calibration: Any, evaluation: Any) -> None:
    """20 % by two scorers: the loss of the text, and the distance to what the dense model predicts."""
    check_installed()
    print("| 20 % structured | pruned | training | recovered | dense, trained alike | minutes |")
    print("|---|---|---|---|---|---|")
    curves: dict[str, RecoveryReport] = {}
    for scorer in ("ntk", "magnitude"):
        config = PruningConfig(
            scorer=scorer,
            sparsity=0.2,
            allocation="gamma",
            compensation="none",
            calibration=CalibrationConfig(calibration, num_samples=32, seq_len=128),
        )
        for loss in ("lm", "kl") if scorer == "ntk" else ("lm",):
            pruner = load_pruner()
            pruner.prune(config)
            before = pruner.evaluate(evaluation, latency=False, **WINDOWS)
            control = (scorer, loss) == ("ntk", "lm")
            report = pruner.recover(_recovery(calibration, loss=loss), control=control)
            after = pruner.evaluate(evaluation, latency=False, **WINDOWS)
            alike = f"{pruner.evaluations['control'].perplexity:.1f}" if control else "-"
            dense = pruner.evaluations["dense"].perplexity
            print(
                f"| {scorer} (dense {dense:.1f}) | {before.perplexity:,.1f} | {loss} | {after.perplexity:,.1f} "
                f"| {alike} | {report.seconds / 60:.1f} |",
                flush=True,
            )
            if loss == "lm":
                curves[scorer] = report
    _draw(curves)
    print(f"\nHeld-out loss by step: {PICTURE.name}\n")


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
    for merge in ("masked", "remask"):
        pruner = load_pruner()
        pruner.prune(PruningConfig(pattern="2:4", scorer="sparsegpt", calibration=data))
        before = pruner.evaluate(evaluation, latency=False, **WINDOWS)
        report = pruner.recover(_recovery(calibration, merge=merge))
        after = pruner.evaluate(evaluation, latency=False, **WINDOWS)
        assert report.merged is not None
        print(
            f"| {merge} | {before.perplexity:.1f} | {after.perplexity:.1f} | {_sparsity(pruner):.4f} "
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


def _sparsity(pruner: Pruner) -> float:
    masks = masks_of(pruner.model).values()
    return 1 - sum(int(mask.sum()) for mask in masks) / max(1, sum(mask.numel() for mask in masks))


def _is_2_of_4(pruner: Pruner) -> bool:
    masks = masks_of(pruner.model).values()
    return bool(masks) and all(bool((mask.unflatten(-1, (-1, 4)).sum(-1) <= 2).all()) for mask in masks)


if __name__ == "__main__":
    run([part for part in PARTS if part in sys.argv[1:]] or PARTS)
