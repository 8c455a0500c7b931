"""Run benchmarks, all or those named: `python tests/benchmarks/run.py [slicing] [gradients] [structured] ...`."""

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the tests are not installed

BENCHMARKS = (
    "slicing",
    "perplexity",
    "gradients",
    "structured",
    "channels",
    "selection",
    "lab",
    "packing",
    "masks",
    "induction",
    "recovery",
    "evaluation",
    "hub",
)

if __name__ == "__main__":
    names = sys.argv[1:] or BENCHMARKS
    for name in names:
        if name not in BENCHMARKS:
            sys.exit(f"Unknown benchmark {name!r}; there are: {', '.join(BENCHMARKS)}.")
    for name in names:
        import_module(f"tests.benchmarks.{name}").run()
        print()
