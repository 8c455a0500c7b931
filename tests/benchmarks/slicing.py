"""Slicing equals masking on a trained model: the logits of the smaller model and of the dense one with zeros."""

import copy
from pathlib import Path

import torch

from optimum_prune import CalibrationConfig, PruningConfig
from optimum_prune.binding import bind
from tests.benchmarks.smollm2 import load_pruner, texts


@torch.no_grad()
def run() -> None:
    """Print one line."""
    pruner = load_pruner()
    masked = copy.deepcopy(pruner.model)
    _, calibration, evaluation = texts()
    config = PruningConfig(sparsity=0.2, calibration=CalibrationConfig(calibration, num_samples=8, seq_len=128))
    report = pruner.prune(config)
    kept = {group.name: group.kept for group in report.groups}
    for group in bind(masked):
        removed = torch.ones(group.num_units, dtype=torch.bool)
        removed[kept[group.name]] = False
        for linear in group.readers:
            linear.weight.view(linear.out_features, group.num_units, -1)[:, removed] = 0
    text = Path(evaluation).read_text(encoding="utf-8") if isinstance(evaluation, str) else evaluation[0]
    ids = pruner.tokenizer(text[:2000], return_tensors="pt").input_ids
    sliced_logits, masked_logits = pruner.model(ids).logits, masked(ids).logits
    difference = (sliced_logits - masked_logits).abs().max().item()
    print(
        f"Slicing against masking, SmolLM2-135M, NTK {report.achieved:.1%}, {ids.shape[1]} tokens, float32: largest "
        f"difference of a logit {difference:.1e}, {difference / masked_logits.abs().max().item():.1e} of the largest"
    )


if __name__ == "__main__":
    run()
