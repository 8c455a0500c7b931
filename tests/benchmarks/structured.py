"""Structured pruning of attention + MLP: every scorer, with and without least squares, on one draw of data."""

from typing import Any

from optimum_prune import CalibrationConfig, PruningConfig
from tests.benchmarks.smollm2 import load_pruner, texts

WINDOWS: dict[str, Any] = {"num_samples": 24, "seq_len": 256}
SCORERS = {  # scorer -> allocation
    "taylor": "gamma",
    "ntk": "gamma",
    "obs": "uniform",
    "wanda": "uniform",
    "fluctuation": "uniform",
    "magnitude": "gamma",
    "random": "gamma",
}


def run(sparsities: tuple[float, ...] = (0.2, 0.4)) -> None:
    """Print one table."""
    corpus, calibration, evaluation = texts()
    data = CalibrationConfig(calibration, num_samples=32, seq_len=512)
    settings = {
        f"{scorer}, {compensation}": PruningConfig(
            scorer=scorer,
            sparsity=sparsities[0],
            allocation=allocation,
            compensation=compensation,
            calibration=data,
        )
        for scorer, allocation in SCORERS.items()
        for compensation in ("none", "least_squares")
    }
    print(f"Structured, attention + MLP; {corpus}; calibration 32 x 512 tokens; {WINDOWS}\n")
    print(load_pruner().compare(settings, evaluation, sparsities=sparsities, **WINDOWS))


if __name__ == "__main__":
    run()
