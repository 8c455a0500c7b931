"""Zeros: perplexity, time and memory of magnitude, Wanda, SparseGPT and ADMM, and of llm-compressor on the same tokens.

Every run is a process of its own that loads the same checkpoint, prunes it on the same tokens and saves it; then this
process measures all. llm-compressor runs where `OPTIMUM_PRUNE_PEERS` names the Python of an environment made of
peers/requirements.txt. Threads of all runs sleep while they wait, so that CPU seconds count work alone.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from optimum_prune import CalibrationConfig, Pruner, PruningConfig
from optimum_prune.calibration.data import load_samples
from tests.benchmarks.smollm2 import load_pruner, texts

OUTPUT = Path(__file__).parent / "output" / "masks"
PEER = Path(__file__).parent / "peers" / "llm_compressor.py"
RUNS = [
    ("ours", "magnitude"),
    ("ours", "wanda"),
    ("llm-compressor", "wanda"),
    ("ours", "sparsegpt"),
    ("llm-compressor", "sparsegpt"),
    ("ours", "admm"),
]


def run(patterns: tuple[str, ...] = ("unstructured", "2:4")) -> None:
    """Print one table."""
    corpus, calibration, evaluation = texts()
    dense, tokens = OUTPUT / "dense", OUTPUT / "tokens.safetensors"
    pruner = load_pruner()
    pruner.save_pretrained(dense)
    data = load_samples(CalibrationConfig(calibration, num_samples=32, seq_len=256), pruner.model, pruner.tokenizer)
    save_file({"input_ids": torch.stack(data.samples)}, tokens)
    windows = {"num_samples": 48, "seq_len": 256, "latency": False}
    before = pruner.evaluate(evaluation, **windows)
    print(f"50 % zeros, {corpus}; 32 x 256 calibration tokens; 2 threads; dense perplexity {before.perplexity:.2f}\n")
    print("| pattern | method | by | perplexity | zeros | pruning, s | whole process, s | its CPU, s | peak, MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for pattern in patterns:
        for by, method in RUNS:
            python = sys.executable if by == "ours" else os.environ.get("OPTIMUM_PRUNE_PEERS")
            if python is None:
                continue
            folder = OUTPUT / f"{by}-{method}-{pattern.replace(':', '')}"
            script = ["-m", "tests.benchmarks.masks"] if by == "ours" else [str(PEER)]
            figures = _measured([python, *script, str(dense), str(tokens), str(folder), method, pattern])
            pruned = Pruner.from_pretrained(folder)
            pruned.tokenizer = pruner.tokenizer  # which a peer does not save along
            linears = [w for n, w in pruned.model.named_parameters() if "proj" in n]
            zeros = sum(int((w == 0).sum()) for w in linears) / sum(w.numel() for w in linears)
            perplexity = pruned.evaluate(evaluation, **windows).perplexity
            print(
                f"| {pattern} | {method} | {by} | {perplexity:.2f} | {zeros:.4f} | {figures['seconds']:.1f} "
                f"| {figures['process']:.1f} | {figures['cpu']:.1f} | {figures['peak']:.0f} |",
                flush=True,
            )


def _measured(command: list[str]) -> dict[str, float]:
    """Run a process; return what it says of itself, its wall time and its CPU time (of all threads)."""
    start = time.perf_counter()
    passive = {"OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | passive
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{command} failed"
    figures = json.loads(output.splitlines()[-1])
    return figures | {"process": time.perf_counter() - start, "cpu": usage.ru_utime + usage.ru_stime}


def _ours(model: str, tokens: str, output: str, method: str, pattern: str) -> None:
    torch.set_num_threads(2)
    pruner = Pruner.from_pretrained(model)
    ids = load_file(tokens)["input_ids"].tolist()
    start = time.perf_counter()
    pruner.prune(
        PruningConfig(
            pattern=pattern,
            scorer=method,
            sparsity=0.5,
            calibration=CalibrationConfig(ids, num_samples=len(ids), seq_len=len(ids[0])),
        )
    )
    seconds = time.perf_counter() - start
    pruner.save_pretrained(output)
    print(json.dumps({"seconds": seconds, "peak": _peak()}))


def _peak() -> float:
    """Return the peak of this process's resident memory, in MB.

    Not `ru_maxrss`: of a child process, that begins with the parent's own peak.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    _ours(*sys.argv[1:]) if len(sys.argv) > 1 else run()
