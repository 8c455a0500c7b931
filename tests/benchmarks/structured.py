"""Perplexity after structured pruning: NTK against magnitude and random, attention + MLP."""

import gc

from optimum_prune import CalibrationConfig, PruningConfig
from tests.benchmarks.smollm2 import load_pruner, texts

WINDOWS = {"num_samples": 24, "seq_len": 256}
ROWS = [  # scorer, allocation
    ("ntk", "gamma"),
    ("ntk", "uniform"),
    ("magnitude", "uniform"),
    ("magnitude", "gamma"),
    ("random", "uniform"),
    ("random", "gamma"),
]


def run(sparsities: tuple[float, ...] = (0.2, 0.4)) -> None:
    """Print one table."""
    corpus, calibration, evaluation = texts()
    pruner = load_pruner()
    dense = pruner.evaluate(evaluation, latency=False, **WINDOWS)
    print(f"Structured pruning, {corpus}; {dense.machine}; {WINDOWS}; dense perplexity {dense.perplexity:.2f}\n")
    print("| scorer | allocation | asked | achieved | perplexity | KL | seconds |\n|---|---|---|---|---|---|---|")
    reference = pruner._reference
    for sparsity in sparsities:
        for scorer, allocation in ROWS:
            del pruner
            gc.collect()
            pruner = load_pruner()
            pruner._reference = reference
            config = PruningConfig(
                scorer=scorer,
                sparsity=sparsity,
                allocation=allocation,
                calibration=CalibrationConfig(calibration, num_samples=32, seq_len=128),
            )
            report = pruner.prune(config)
            result = pruner.evaluate(evaluation, latency=False, **WINDOWS)
            print(
                f"| {scorer} | {allocation} | {sparsity:.0%} | {report.achieved:.1%} | {result.perplexity:.1f} "
                f"| {result.kl:.3f} | {report.seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    run()
