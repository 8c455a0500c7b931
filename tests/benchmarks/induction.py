"""Learned masks: perplexity and time of three scorers with and without them; and what new scores cost."""

import gc
import sys
import time

import torch

from optimum_prune import CalibrationConfig, PruningConfig
from optimum_prune.calibration.moments import second_moment
from optimum_prune.config import InductionConfig
from optimum_prune.masks import n_of_m_mask, row_mask
from optimum_prune.scales import metric
from tests.benchmarks.smollm2 import load_pruner, texts

WINDOWS = {"num_samples": 24, "seq_len": 256}
SCORERS = ("magnitude", "wanda", "sparsegpt")
PATTERNS = ("unstructured", "2:4")
TARGETS = {("magnitude", "unstructured"): 1 / 4, ("magnitude", "2:4"): 1 / 6, ("wanda", "2:4"): 0.92}
"""At most this much of the scorer's own perplexity is to be left."""
TOKENS, ROWS, WIDTH = 32 * 256, 1536, 576
"""Of the refresh: what a gate of SmolLM2 reads, and its weight."""


def run(scorers: tuple[str, ...] = SCORERS, patterns: tuple[str, ...] = PATTERNS) -> None:
    """Print two tables."""
    corpus, calibration, evaluation = texts()
    pruner = load_pruner()
    dense = pruner.evaluate(evaluation, latency=False, **WINDOWS)
    print(
        f"50 % zeros, {corpus}; 32 x 256 calibration tokens; {dense.machine}; dense perplexity {dense.perplexity:.2f}\n"
    )
    print("| pattern | scorer | perplexity | seconds | learned: perplexity | seconds | change | target | blocks |")
    print("|---|---|---|---|---|---|---|---|---|")
    data = CalibrationConfig(calibration, num_samples=32, seq_len=256)
    for pattern in patterns:
        for scorer in scorers:
            found = []
            for induction in (None, InductionConfig()):
                del pruner
                gc.collect()
                pruner = load_pruner()
                config = PruningConfig(
                    pattern=pattern, scorer=scorer, sparsity=0.5, calibration=data, induction=induction
                )
                report = pruner.prune(config)
                result = pruner.evaluate(evaluation, latency=False, **WINDOWS)
                found.append((result.perplexity, report.seconds))
            (before, quick), (after, slow) = found
            target = TARGETS.get((scorer, pattern))
            blocks = report.induction or []
            print(
                f"| {pattern} | {scorer} | {before:.1f} | {quick:.1f} | {after:.1f} | {slow:.1f} "
                f"| {after / before - 1:+.1%} | {'-' if target is None else f'{target - 1:+.1%}'} "
                f"| {sum(block['kept'] for block in blocks)} of {len(blocks)} |",
                flush=True,
            )
    _refresh()


def _refresh() -> None:
    """Compare new scores from the cached diagonal with new scores from the tokens."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(ROWS, WIDTH, generator=generator)
    theta = torch.randn(WIDTH, generator=generator) * 0.3
    root = second_moment("x", [x], full=False).sqrt()

    def again() -> torch.Tensor:
        return weight.abs() * second_moment("x", [x * theta.exp()], full=False).sqrt()

    torch.testing.assert_close(metric(weight, root, theta), again())
    cached, measured = _seconds(lambda: metric(weight, root, theta)), _seconds(again)
    whole = _seconds(lambda: weight.abs() * second_moment("x", [x * theta.exp()], full=True).diagonal().sqrt())
    print(f"\nNew scores of a {ROWS} x {WIDTH} linear, {TOKENS} tokens, 1 thread, in ms\n")
    print("| | from the cached diagonal | diagonal measured again | whole Hessian measured again |\n|---|---|---|---|")
    for what, extra in {
        "scores": 0.0,
        "with 50 % per row chosen": _seconds(lambda: row_mask(metric(weight, root, theta), WIDTH // 2)) - cached,
        "with 2:4 chosen": _seconds(lambda: n_of_m_mask(metric(weight, root, theta), 2, 4)) - cached,
    }.items():
        row = [cached + extra, measured + extra, whole + extra]
        print(f"| {what} | {' | '.join(f'{1e3 * s:.2f} ({s / row[0]:.0f}x)' for s in row)} |")


def _seconds(call, repetitions: int = 20) -> float:
    call()
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    given = sys.argv[1:]
    run(tuple(s for s in SCORERS if s in given) or SCORERS, tuple(p for p in PATTERNS if p in given) or PATTERNS)
