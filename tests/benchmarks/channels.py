"""MLP channels alone: AFR and each of its repairs against other scores, and single weights in the same number."""

from typing import Any

from optimum_prune import CalibrationConfig, PruningConfig
from tests.benchmarks.smollm2 import load_pruner, texts

WINDOWS: dict[str, Any] = {"num_samples": 24, "seq_len": 256}
PAPER = {"refer": "feature", "power": 2, "signed": True, "trim": [2, 98]}
NAIVE = {"refer": "feature", "power": 1, "signed": False, "trim": None}
AFR = {
    "afr (default)": {},
    "afr, all three repairs": PAPER,
    "afr, naive": NAIVE,
    "afr, power alone": NAIVE | {"power": 2},
    "afr, signs alone": NAIVE | {"signed": True},
    "afr, trimming alone": NAIVE | {"trim": [2, 98]},
}
OTHERS = ("taylor", "obs", "wanda", "fluctuation", "magnitude", "random")
REPAIRED = ("afr", "wanda")
"""Scorers that are also measured with least squares."""


def run(sparsities: tuple[float, ...] = (0.2, 0.5)) -> None:
    """Print two tables: channels, then single weights."""
    corpus, calibration, evaluation = texts()
    base = {"sparsity": sparsities[0], "calibration": CalibrationConfig(calibration, num_samples=32, seq_len=512)}
    channels = base | {"units": ["mlp_channel"], "allocation": "uniform"}
    settings = {
        name: PruningConfig(scorer="afr", scorer_options=options or None, compensation="none", **channels)
        for name, options in AFR.items()
    }
    settings |= {name: PruningConfig(scorer=name, compensation="none", **channels) for name in OTHERS}
    settings |= {
        f"{name}, least squares": PruningConfig(scorer=name, compensation="least_squares", **channels)
        for name in REPAIRED
    }
    print(f"MLP channels, uniform; {corpus}; calibration 32 x 512 tokens; {WINDOWS}\n")
    pruner = load_pruner()
    print(pruner.compare(settings, evaluation, sparsities=sparsities, **WINDOWS))
    weights = base | {"pattern": "unstructured", "include": ["*.mlp"]}
    settings = {
        "afr (default)": PruningConfig(scorer="afr", **weights),
        "afr, feature": PruningConfig(scorer="afr", scorer_options={"refer": "feature"}, **weights),
        "wanda": PruningConfig(scorer="wanda", **weights),
        "magnitude": PruningConfig(scorer="magnitude", **weights),
    }
    print("\nSingle weights of the MLPs, as many as the channels hold\n")
    print(pruner.compare(settings, evaluation, sparsities=sparsities, **WINDOWS))


if __name__ == "__main__":
    run()
