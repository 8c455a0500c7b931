"""Prune a checkpoint with llm-compressor: `python llm_compressor.py MODEL TOKENS OUTPUT METHOD PATTERN`.

Imports nothing of this project: it runs in an environment of its own (requirements.txt).
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]
from llmcompressor.modifiers.pruning import (  # pyright: ignore[reportMissingImports]
    SparseGPTModifier,
    WandaPruningModifier,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

MODIFIERS = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}


def main(model_path: str, tokens: str, output: str, method: str, pattern: str) -> None:
    """Prune and save; print what the pruning alone took."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = load_file(tokens)["input_ids"].tolist()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    start = time.perf_counter()
    oneshot(
        model=model,
        dataset=data,
        recipe=MODIFIERS[method](
            sparsity=0.5,
            mask_structure="0:0" if pattern == "unstructured" else pattern,
            targets=["Linear"],
            ignore=["re:.*lm_head"],
        ),
        tokenizer=AutoTokenizer.from_pretrained(model_path),
        max_seq_length=len(ids[0]),
        num_calibration_samples=len(ids),
    )
    seconds = time.perf_counter() - start
    model.save_pretrained(output)
    print(json.dumps({"seconds": seconds, "peak": _peak()}))


def _peak() -> float:
    """Return the peak of this process's resident memory, in MB.

    Not `ru_maxrss`: of a child process, that begins with the parent's own peak.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
