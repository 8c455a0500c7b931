"""ADMM: the best quality of the masking scorers, at some more time than SparseGPT."""

from optimum_prune.scorers.base import Scorer, no_weights
from optimum_prune.solvers import admm

SCORER = Scorer(
    name="admm",
    score=no_weights,
    patterns=("unstructured", "n:m"),
    inputs="hessian",
    solve=admm,
    comparable="row",
    scope="row",
    reference="ADMM weight update: Boza 2024, arXiv 2401.02938; the schedule of the free mask is ours",
)
