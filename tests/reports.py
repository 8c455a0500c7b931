"""Small reports and evaluations, made by hand."""

from dataclasses import replace
from typing import Any

from optimum_prune.measurements import Evaluation
from optimum_prune.recovery.report import Losses, RecoveryReport
from optimum_prune.report import GroupReport, PruningReport

DATA = {
    "source": "org/texts:small",
    "samples": 32,
    "tokens": 4096,
    "seq_len": 128,
    "fingerprint": "sha256:" + "ab" * 32,
}


def report(layers: int = 3, **changes: Any) -> PruningReport:
    """Return a report of which the first layer lost one of 4 KV groups, and every layer 8 of 24 channels."""
    groups = []
    for layer in range(layers):
        heads, block = 3 if layer == 0 else 4, f"model.layers.{layer}"
        groups += [
            group(f"{block}.self_attn", layer, "kv_group", 4, heads, 100),
            group(f"{block}.mlp", layer, "mlp_channel", 24, 16, 50),
        ]
    values: dict[str, Any] = {
        "config": {
            "version": 1,
            "pattern": "structured",
            "scorer": "ntk",
            "sparsity": 0.2,
            "units": None,
            "calibration": {"source": "org/texts:small", "num_samples": 32},
        },
        "model_type": "llama",
        "asked": 0.2,
        "asked_per_stack": {"model.layers": {"kv_group": 0.1, "mlp_channel": 0.25}},
        "groups": groups,
        "parameters_before": 10_000,
        "parameters_after": 9_000,
        "allocation": "gamma",
        "gamma": {"model.layers": 2.5},
        "calibration": DATA,
        "seconds": 1.25,
        "versions": {"optimum_prune": "0.1.0", "torch": "2.13.0"},
        "base_model": "org/dense",
        "base_revision": "0123abc",
    }
    return PruningReport(**values | changes)


def group(name: str, layer: int, unit: str, before: int, after: int, weights: int, stack: str = "model.layers"):
    """Return one group of which the first `after` units are kept, `weights` to a unit."""
    return GroupReport(name, stack, layer, unit, before, after, list(range(after)), before * weights, after * weights)


def masked(pattern: str = "2:4", **changes: Any) -> PruningReport:
    """Return a report of two linears in each of 3 layers; of 64 weights, half are zero, and in the first block more."""
    groups = []
    for layer in range(3):
        for name, after in (("self_attn.q_proj", 24 if layer == 0 else 32), ("mlp.up_proj", 32)):
            path = f"model.layers.{layer}.{name}"
            groups.append(GroupReport(path, "model.layers", layer, "weight", 64, after, [], 64, after))
    config = report().config | {"pattern": pattern, "scorer": "wanda", "sparsity": None if ":" in pattern else 0.5}
    values: dict[str, Any] = {
        "config": config,
        "asked": 0.5,
        "asked_per_stack": {"model.layers": {"weight": 0.5}},
        "groups": groups,
        "parameters_after": 10_000,
        "allocation": "row",
        "gamma": None,
    }
    return report(**values | changes)


def recovery(**changes: Any) -> RecoveryReport:
    """Return a recovery of 30 steps, of which the 20th was the best."""
    values: dict[str, Any] = {
        "config": {"rank": 8, "loss": "lm", "merge": "masked", "dataset": "org/texts:small"},
        "data": {"sources": [{"source": "org/texts:small", "share": 1.0}], "samples": 100, "trained_tokens": 12_800},
        "before": Losses(4.0),
        "after": Losses(3.5),
        "merged": Losses(3.5),
        "kept": True,
        "steps": 30,
        "best_step": 20,
        "curve": [
            {"step": 10, "train": 3.5},
            {"step": 20, "train": 3.25},
            {"step": 20, "held_out": 3.5},
            {"step": 30, "train": 3.0},
            {"step": 30, "held_out": 3.75},
        ],
        "trained_parameters": 1_000,
        "zeros_before": 0,
        "zeros_after": 0,
        "seconds": 12.5,
        "machine": "cpu, float32, CPU threads: 2",
    }
    return RecoveryReport(**values | changes)


DENSE = Evaluation(
    perplexity=12.5,
    kl=None,
    tokens=4064,
    sequences=32,
    parameters=10_000,
    weight_bytes=40_000_000,
    device="cpu",
    threads=2,
    dtype="float32",
    data=DATA,
    prefill_ms=50.0,
    decode_ms_per_token=10.0,
    prefill_tokens=128,
    decode_tokens=32,
)
PRUNED = replace(
    DENSE,
    perplexity=25.0,
    kl=0.75,
    parameters=9_000,
    weight_bytes=36_000_000,
    prefill_ms=40.0,
    decode_ms_per_token=9.0,
)
