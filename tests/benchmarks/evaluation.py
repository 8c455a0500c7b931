"""Peak memory of commands that measure a model, in units of its weights.

The weights are saved in float32 and loaded in bfloat16, so that they are allocated: a file of the dtype that is asked
for is only mapped on a CPU, and takes memory that the system can have back.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open

from optimum_prune.integrations.layouts import save_checkpoint
from tests.benchmarks.smollm2 import load_pruner, texts

START = "import sys; import optimum_prune.pruner, optimum_prune.recovery.recover; from optimum_prune import *; "
CLI = START + "from optimum.commands.optimum_cli import main; sys.argv[0] = 'optimum-cli'; main()"
LATE = START + (
    "model, output, source = sys.argv[1:]; "
    "pruner = Pruner.from_pretrained(model, dtype='bfloat16'); "
    "pruner.prune(PruningConfig(scorer='magnitude', sparsity=0.2, units=['mlp_channel'])); "
    "pruner.evaluate(source, num_samples=4, seq_len=256, latency=False); pruner.save_pretrained(output)"
)
AMOUNT = ["--num-samples", "4", "--seq-len", "256"]
EVALUATE = ["--evaluate-num-samples", "4", "--evaluate-seq-len", "256"]


def run(model: str | None = None) -> None:
    """Print one table.

    Args:
        model: folder of a float32 model; by default SmolLM2-135M.
    """
    with tempfile.TemporaryDirectory() as root:
        if model is None:
            pruner = load_pruner()
            model = f"{root}/dense"
            save_checkpoint(pruner.model, model)
            pruner.tokenizer.save_pretrained(model)
            del pruner
        source = f"{root}/text.txt"
        given = texts()[2]
        Path(source).write_text(Path(given).read_text() if isinstance(given, str) else "\n".join(given))
        weights = _weight_bytes(model)
        out, bfloat16 = f"{root}/out", ["--dtype", "bfloat16", "--no-latency"]
        how = ["--scorer", "magnitude", "--sparsity", "0.2", "--units", "mlp_channel", "--dtype", "bfloat16"]
        base = _peak(START)
        rows = {
            "prune run": _peak(CLI, "prune", "run", "--model", model, "--output", out, *how),
            "prune(), then evaluate(): both models": _peak(LATE, model, out, source),
            "prune run --evaluate": _peak(
                CLI,
                "prune",
                "run",
                "--model",
                model,
                "--output",
                out,
                *how,
                "--evaluate",
                source,
                *EVALUATE,
                "--no-latency",
            ),
            "prune evaluate --dense": _peak(
                CLI, "prune", "evaluate", out, "--dense", model, "--dataset", source, *AMOUNT, *bfloat16
            ),
        }
    print(f"Peak of allocated memory on top of the imports; weights: {weights / 1e6:,.0f} MB; 4 x 256 tokens measured")
    print("\n| what | peak / weights |\n|---|---|")
    for what, peak in rows.items():
        print(f"| {what} | {(peak - base) / weights:.2f}x |")


def _weight_bytes(folder: str) -> int:
    """Return the bytes of the weights in bfloat16."""
    numbers = 0
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            numbers += sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
    return 2 * numbers


def _peak(script: str, *arguments: str) -> int:
    """Run a script in a fresh process and return the most bytes of anonymous memory that it held."""
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        found = [line.split() for line in status.read_text().splitlines() if line.startswith("RssAnon:")]
        peak = max(peak, *(1024 * int(line[1]) for line in found), 0)
        time.sleep(0.005)
    if process.returncode:
        raise RuntimeError(f"{script} {arguments} ended with {process.returncode}")
    return peak


if __name__ == "__main__":
    run(*sys.argv[1:])
