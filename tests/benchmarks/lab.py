"""Loss after structured pruning on every model of the lab: gradient scores against magnitude and random, one table."""

from statistics import mean

from optimum_prune import CalibrationConfig, Pruner, PruningConfig
from tests import lab

COLUMNS = {
    "taylor": ("taylor", "none", 1),
    "taylor, least squares": ("taylor", "least_squares", 1),
    "ntk": ("ntk", "none", 1),
    "ntk, least squares": ("ntk", "least_squares", 1),
    "magnitude": ("magnitude", "none", 1),
    "random": ("random", "none", 3),
}
"""Name -> scorer, compensation, and over how many seeds its loss is averaged."""
EVALUATION = {"num_samples": 64, "seq_len": 128, "latency": False}


def run(sparsities: tuple[float, ...] = (0.2, 0.4)) -> None:
    """Print one table."""
    print(
        "Held-out loss in nats per token (LLaVA: and captions all right); attention + MLP, allocation global for all\n"
    )
    print(f"| model | dense | asked | {' | '.join(COLUMNS)} |\n|---|---|---|{'---|' * len(COLUMNS)}")
    for name in lab.NAMES:
        dense = _told(Pruner.from_pretrained(lab.folder(name)), name)
        for sparsity in sparsities:
            cells = [
                _cell([_pruned(name, scorer, compensation, sparsity, seed) for seed in range(n)])
                for scorer, compensation, n in COLUMNS.values()
            ]
            print(f"| {name} | {_cell([dense])} | {sparsity:.0%} | {' | '.join(cells)} |", flush=True)


def _pruned(name: str, scorer: str, compensation: str, sparsity: float, seed: int) -> tuple[float, float | None]:
    pruner = Pruner.from_pretrained(lab.folder(name))
    calibration = CalibrationConfig(lab.calibration(name), num_samples=32, seq_len=128)
    pruner.prune(
        PruningConfig(
            scorer=scorer,
            sparsity=sparsity,
            allocation="global",
            compensation=compensation,
            seed=seed,
            calibration=calibration,
        )
    )
    return _told(pruner, name)


def _told(pruner: Pruner, name: str) -> tuple[float, float | None]:
    pruner._stages.load_dense = None  # the loss alone is wanted
    found = pruner.evaluate(lab.evaluation(name), **EVALUATION)
    return found.loss, found.exact_match if name == "llava" else None


def _cell(found: list[tuple[float, float | None]]) -> str:
    captions = [exact for _, exact in found if exact is not None]
    return f"{mean(loss for loss, _ in found):.3f}" + (f" ({mean(captions):.0%})" if captions else "")


if __name__ == "__main__":
    run()
