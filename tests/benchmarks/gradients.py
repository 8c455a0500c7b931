"""Peak memory of NTK's gradients: streamed block by block, against one plain backward over all weights.

Each variant runs in a process of its own, on the same data. Resident memory is read from `/proc` (Linux): once when the
model is loaded, and at its highest from then on.
"""

import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from optimum_prune import CalibrationConfig, registry
from optimum_prune.binding import bind
from optimum_prune.calibration.data import load_samples
from optimum_prune.objectives import NTK, Outputs
from optimum_prune.scorers.base import Statistics, unit_scores
from optimum_prune.scoring import score_groups
from tests.benchmarks.smollm2 import load_pruner, texts

BATCH = 4


def run() -> None:
    """Print one table."""
    results = {name: _in_process(name) for name in ("plain", "streamed")}
    print("NTK scores of SmolLM2-135M in float32, 32 x 128 tokens, micro-batches of 4; one process each\n")
    print("| gradients | loaded model, MB | peak above it, MB | seconds |\n|---|---|---|---|")
    for name, result in results.items():
        print(
            f"| {name} | {result['loaded']:.0f} | {result['peak'] - result['loaded']:.0f} | {result['seconds']:.1f} |"
        )
    plain, streamed = results["plain"], results["streamed"]
    memory = (streamed["peak"] - streamed["loaded"]) / (plain["peak"] - plain["loaded"])
    print(f"\nstreamed / plain: {memory:.2f}x memory, {streamed['seconds'] / plain['seconds']:.2f}x time")
    print(f"Scores of all {len(plain['scores']):,} units equal bit for bit: {plain['scores'] == streamed['scores']}")


def _in_process(name: str) -> dict:
    output = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.gradients", name],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # or glibc keeps what is freed, and blurs the figures
    ).stdout
    return json.loads(output.splitlines()[-1])


def _measure(name: str) -> None:
    pruner = load_pruner()
    model, groups = pruner.model, bind(pruner.model)
    _ = sum(float(parameter.detach().sum()) for parameter in model.parameters())  # memory-mapped until touched
    data = load_samples(CalibrationConfig(texts()[1], num_samples=32, seq_len=128), model, pruner.tokenizer)
    scorer = registry.load("scorers", "ntk")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    loaded = _resident_mb("VmRSS")
    start = time.perf_counter()
    if name == "streamed":
        (found,) = score_groups(model, groups, [scorer], data=data, batch_size=BATCH)
        scores = [found[group.name] for group in groups]
    else:
        scores = _plain(model, groups, scorer, data)
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - start,
                "loaded": loaded,
                "peak": _resident_mb("VmHWM"),
                "scores": torch.cat(scores).tolist(),
            }
        )
    )


def _resident_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1024  # pyright: ignore[reportOptionalSubscript]


def _plain(model, groups, scorer, data):
    """Score from one ordinary backward per micro-batch, gradients of all weights held at once."""
    model.requires_grad_(False)
    for group in groups:
        for linear in group.linears:
            linear.weight.requires_grad_(True)
    for batch in data.batches(BATCH, 0):
        logits = model(**batch, use_cache=False).logits
        mask = batch["attention_mask"].bool()
        (NTK.value(Outputs(logits, logits, mask, batch["input_ids"])) * (1 / len(data.samples))).backward()

    def score(linears):
        generator = torch.Generator()
        return [
            scorer.score(linear.weight, Statistics(generator, {NTK.name: linear.weight.grad})) for linear in linears
        ]

    with torch.no_grad():
        return [unit_scores(score(group.writers), score(group.readers), group.num_units) for group in groups]


if __name__ == "__main__":
    _measure(sys.argv[1]) if len(sys.argv) > 1 else run()
