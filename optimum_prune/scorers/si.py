"""SI: Wanda, whose masks are then learned; what learns them is `induction.py`."""

from dataclasses import replace

from optimum_prune.scorers import wanda

SCORER = replace(
    wanda.SCORER,
    name="si",
    score_units=None,
    patterns=("unstructured", "n:m"),
    reference="Sparsity induction: Jiang et al. 2026, arXiv 2602.21652, equations 3 and 11, on top of Wanda; "
    "the learning rate, the start and the choice by held-out data are ours",
)
