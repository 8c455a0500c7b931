"""Calibration chosen by KL: is the chosen batch at least as good as the median candidate, on other text?"""

from statistics import median
from typing import Any

from optimum_prune import CalibrationConfig, Pruner, PruningConfig
from optimum_prune.calibration.data import load_samples
from optimum_prune.report import PruningReport
from optimum_prune.selection import widened
from tests import lab

CANDIDATES, SEEDS = 8, 3
CONFIG: dict[str, Any] = {"scorer": "ntk", "sparsity": 0.4, "allocation": "global", "compensation": "none"}


def run(names: tuple[str, ...] = ("llama", "qwen2", "qwen3", "opt")) -> None:
    """Print one table."""
    print(f"Held-out loss of {CANDIDATES} candidate batches, NTK 40 %, by model of the lab and seed\n")
    print("| model | seed | best | chosen | median | worst |\n|---|---|---|---|---|---|")
    for name in names:
        for seed in range(SEEDS):
            losses, chosen = _losses(name, seed)
            print(
                f"| {name} | {seed} | {min(losses):.4f} | {losses[chosen]:.4f} | {median(losses):.4f} "
                f"| {max(losses):.4f} |",
                flush=True,
            )


def _losses(name: str, seed: int) -> tuple[list[float], int]:
    """Return the loss of every candidate, and which of them is chosen."""
    drawn_by = CalibrationConfig(
        lab.calibration(name), num_samples=8, seq_len=128, seed=seed, selection="kl", candidates=CANDIDATES
    )
    report = _pruned(name, drawn_by)[1]
    assert report.calibration is not None
    model, tokenizer = (pruner := Pruner.from_pretrained(lab.folder(name))).model, pruner.tokenizer
    drawn = load_samples(widened(drawn_by, 128), model, tokenizer)
    losses = []
    for i in range(CANDIDATES):
        rows = [row.tolist() for row in drawn.samples[i * 8 : (i + 1) * 8]]
        pruner, _ = _pruned(name, CalibrationConfig(rows, num_samples=8, seq_len=128))
        losses.append(pruner.evaluate(lab.evaluation(name), num_samples=64, latency=False).loss)
    return losses, report.calibration["selection"]["chosen"]


def _pruned(name: str, calibration: CalibrationConfig) -> tuple[Pruner, PruningReport]:
    pruner = Pruner.from_pretrained(lab.folder(name))
    pruner._stages.load_dense = None  # the loss alone is wanted
    return pruner, pruner.prune(PruningConfig(calibration=calibration, **CONFIG))


if __name__ == "__main__":
    run()
