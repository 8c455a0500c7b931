"""SparseGPT: second-order pruning, column by column, in which the weights to the right make up for what goes."""

from optimum_prune.scorers.base import Scorer, no_weights
from optimum_prune.solvers import sparsegpt, sparsegpt_masked

SCORER = Scorer(
    name="sparsegpt",
    score=no_weights,
    patterns=("unstructured", "n:m"),
    inputs="hessian",
    solve=sparsegpt,
    solve_masked=sparsegpt_masked,
    comparable="matrix",
    scope="matrix",
    reference="SparseGPT: Frantar & Alistarh 2023, arXiv 2301.00774, algorithm 1",
)
