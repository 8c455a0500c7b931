"""Train models, all or those named, and say how well: `python -m tests.lab [llama] [t5]`."""

import sys

from tests import lab

if __name__ == "__main__":
    names = sys.argv[1:] or lab.NAMES
    if unknown := set(names) - set(lab.NAMES):
        sys.exit(f"Unknown: {', '.join(sorted(unknown))}; there are: {', '.join(lab.NAMES)}.")
    rows = {name: lab.figures(name) for name in names}
    print(f"{'model':8}{'parameters':>12}{'seconds':>9}  held out")
    for name, row in rows.items():
        parameters, seconds = row.pop("parameters"), row.pop("seconds")
        measured = ", ".join(f"{what} {value:.3f}" for what, value in row.items())
        print(f"{name:8}{parameters:12,.0f}{seconds:9.1f}  {measured}")
