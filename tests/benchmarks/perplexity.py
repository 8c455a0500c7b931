"""Perplexity by the package and by a plain transformers loop, on models whose tokenizers begin texts with BOS or not.

Besides SmolLM2, the models are the folders in `$OPTIMUM_PRUNE_MODELS`, if there are any.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from optimum_prune import CalibrationConfig, Pruner
from optimum_prune.calibration.data import load_samples
from optimum_prune.evaluation import evaluate_model
from tests.benchmarks.smollm2 import load_pruner, texts

NUM, LENGTH = 24, 256  # windows, tokens of each
TOLERANCE = 0.01


def run() -> None:
    """Print one table; fail where package and loop differ by more than one percent."""
    corpus, _, evaluation = texts()
    print(f"{corpus}; {NUM} windows of {LENGTH} tokens, float32\n")
    print("| model | each window begins with | this package | plain loop | the other way |\n|---|---|---|---|---|")
    for name, pruner in _models():
        config = CalibrationConfig(evaluation, num_samples=NUM, seq_len=LENGTH)
        data = load_samples(config, pruner.model, pruner.tokenizer, order="first")
        found, begins = evaluate_model(pruner.model, data), data.begins_with
        own, other = (_plain_loop(pruner, _windows(pruner.tokenizer, evaluation, bos)) for bos in (begins, not begins))
        print(f"| {name} | {begins or 'text'} | {found.perplexity:.2f} | {own:.2f} | {other:.2f} |", flush=True)
        assert abs(found.perplexity / own - 1) < TOLERANCE, name


def _models() -> Iterator[tuple[str, Pruner]]:
    yield "SmolLM2-135M-Instruct", load_pruner()
    folders = Path(os.environ["OPTIMUM_PRUNE_MODELS"]) if "OPTIMUM_PRUNE_MODELS" in os.environ else None
    for folder in sorted(folders.iterdir()) if folders else ():
        yield folder.name, Pruner.from_pretrained(folder, dtype=torch.float32)


def _windows(tokenizer: Any, source: str | list[str], bos: object) -> Tensor:
    """Cut the beginning of the text into windows, `(NUM, LENGTH) int64`, each behind BOS if that is asked for."""
    text = Path(source).read_text(encoding="utf-8-sig") if isinstance(source, str) else source[0]
    head = [tokenizer.bos_token_id] * bool(bos)
    step = LENGTH - len(head)
    ids = tokenizer(text[: NUM * LENGTH * 8], add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([head + ids[i * step : (i + 1) * step] for i in range(NUM)])


@torch.no_grad()
def _plain_loop(pruner: Pruner, windows: Tensor) -> float:
    losses = []
    for window in windows:
        logits = pruner.model(window[None]).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, window[1:]).item())
    return math.exp(sum(losses) / len(losses))


if __name__ == "__main__":
    run()
