"""Time and memory of publishing and loading back a checkpoint of 300 MB, through a Hub on this machine."""

import tempfile
from pathlib import Path

import pytest
import torch

from optimum_prune import Pruner, PruningConfig
from tests.integrations.hub_server import Hub, elsewhere
from tests.models import llama
from tests.processes import answer

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 8192}
MEASURE = """
import json, re, sys, time
from pathlib import Path
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
def measured(call, *arguments):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now (Linux)
    before, start = peak(), time.perf_counter()
    call(*arguments)
    print(json.dumps([time.perf_counter() - start, peak() - before]))
"""
PUSH = """
from optimum_prune.integrations.hub import Destination, prepare, upload
measured(upload, sys.argv[1], prepare(Destination("me/it")))
"""
DOWNLOAD = """
from huggingface_hub import snapshot_download
measured(snapshot_download, "me/it")
"""
LOAD = """
from optimum_prune import Pruner
measured(Pruner.from_pretrained, "me/it")
"""


def run() -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        pruner = Pruner(llama(**SIZES))
        pruner.prune(PruningConfig(scorer="magnitude", sparsity=0.1, allocation="global"))
        checkpoint = Path(root, "it")
        pruner.save_pretrained(checkpoint)
        size = sum(path.stat().st_size for path in checkpoint.iterdir()) / 1e6
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        (folder := Path(root, "hub")).mkdir()
        with Hub(folder) as hub:
            steps = {"upload": PUSH, "upload again": PUSH, "download": DOWNLOAD, "load, downloaded": LOAD}
            print(f"A compact checkpoint of {size:.0f} MB, one file; memory: peak above the start\n")
            print("| | s | MB/s | memory, MB |\n|---|---|---|---|")
            for name, script in steps.items():
                seconds, memory = answer(elsewhere(hub) + MEASURE + script, checkpoint)
                print(f"| {name} | {seconds:.2f} | {size / seconds:.0f} | {memory:.0f} |")


if __name__ == "__main__":
    run()
