"""Size and loading time of packed storage against dense: SmolLM2-135M, bfloat16, half of the linears' weights zero."""

import gc
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from optimum_prune.binding import named_linears
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.layouts.packing import BITMAP
from optimum_prune.masks import n_of_m_mask, row_mask
from tests.benchmarks.smollm2 import load_pruner

FILE = "model.safetensors"
ROUNDS = 5
WAYS = {  # a dense file is only mapped by loading: it is read where a weight is first used
    "mapped, in cache": {"read": False, "cold": False},
    "every weight read, in cache": {"read": True, "cold": False},
    "every weight read, from disk": {"read": True, "cold": True},
}
MASKS = {
    "50% unstructured": lambda scores: row_mask(scores, scores.shape[1] // 2),
    "2:4": lambda scores: n_of_m_mask(scores, 2, 4),
}


def run() -> None:
    """Print two tables."""
    sizes, times = [], []
    for name, mask in MASKS.items():
        model = _with_zeros(mask)
        with tempfile.TemporaryDirectory() as root:
            folders = {storage: Path(root, storage) for storage in ("dense", "packed")}
            for storage, folder in folders.items():
                save_checkpoint(model, folder, storage=storage)
            _check_equal(model, folders["packed"])
            linears = set(named_linears(model))
            inside = {storage: _bytes(folder, linears) for storage, folder in folders.items()}
            files = {storage: (folder / FILE).stat().st_size for storage, folder in folders.items()}
            sizes.append(f"| {name} | {_ratio(inside):.4f} | {_ratio(files):.4f} |")
            for way, options in WAYS.items():
                took = _times(folders, **options)
                times.append(f"| {name} | {way} | {took['dense']:.0f} | {took['packed']:.0f} | {_ratio(took):.2f}x |")
    threads = torch.get_num_threads()
    print(f"Packed storage, SmolLM2-135M, bfloat16, CPU threads: {threads}; times: medians of {ROUNDS}, in turn")
    print("\n| zeros | linears, packed / dense | file, packed / dense |\n|---|---|---|", *sizes, sep="\n")
    print("\n| zeros | load | dense, ms | packed, ms | ratio |\n|---|---|---|---|---|", *times, sep="\n")


@torch.no_grad()
def _with_zeros(mask):
    model = load_pruner().model.bfloat16()
    generator = torch.Generator().manual_seed(0)
    for linear in named_linears(model).values():
        scores = torch.rand(linear.weight.shape, generator=generator)
        linear.weight.masked_fill_(~mask(scores), 0)
    return model


def _check_equal(model, folder):
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int16), loaded[name].view(torch.int16)), name


def _bytes(folder, linears):
    """Bytes that the weights of the linears take in a file, bitmaps included."""
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        names = [name for name in tensors.keys() if name.removesuffix(BITMAP).removesuffix(".weight") in linears]  # noqa: SIM118
        return sum(tensors.get_tensor(name).nbytes for name in names)


def _times(folders, *, read, cold):
    """Median milliseconds of a load, by storage."""
    times = {storage: [] for storage in folders}
    for _ in range(ROUNDS):
        for storage, folder in folders.items():
            gc.collect()  # the model before, whose weights may be pages of the file
            if cold:
                _forget(folder / FILE)
            start = time.perf_counter()
            model = AutoModelForCausalLM.from_pretrained(folder)
            if read:
                for parameter in model.parameters():
                    parameter.detach().clone()
            times[storage].append(1000 * (time.perf_counter() - start))
            del model
    return {storage: statistics.median(found) for storage, found in times.items()}


def _forget(file):
    """Drop a file from the system's cache (Linux)."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _ratio(figures):
    return figures["packed"] / figures["dense"]


if __name__ == "__main__":
    run()
