"""NTK (NIRVANA): the sensitivity of the model's output to each weight."""

from functools import partial

from torch import Tensor

from optimum_prune.errors import InvalidConfig, unknown
from optimum_prune.objectives import LOGSUMEXP, LOSS, MEAN_LOGIT, NTK, Objective
from optimum_prune.scorers.base import Scorer, Statistics

OBJECTIVES = {objective.name: objective for objective in (NTK, LOSS, MEAN_LOGIT, LOGSUMEXP)}
"""Name of the option -> f; `"ntk"` is the published one."""


def score(weight: Tensor, statistics: Statistics, *, objective: str = NTK.name) -> Tensor:
    """Return `S(W_ij) = |df/dW_ij * W_ij|`, `(d_out, d_in) float32` (Ai et al. 2025, arXiv 2509.14230).

    The gradient is accumulated with its sign over the whole calibration set; the absolute value is taken once.
    """
    return (weight.float() * statistics.gradients[objective]).abs()


def ntk(objective: str = NTK.name) -> Scorer:
    """Return the scorer.

    Args:
        objective: f. `"ntk"`: the maximum of each logit over the sequence, as published. Others are ours: `"loss"` of
            the language model, `"mean_logit"`, and `"logsumexp"`, a smooth maximum.
    """
    if objective not in list(OBJECTIVES):  # a list has no hash
        raise InvalidConfig(unknown("objective of ntk", objective, OBJECTIVES))
    chosen: Objective = OBJECTIVES[objective]
    return Scorer(
        name="ntk",
        score=partial(score, objective=chosen.name),
        objectives=(chosen,),
        allocation="gamma",
        seq_len=128,
        reference="NIRVANA: Ai, Wei, Chen, He 2025, arXiv 2509.14230; gamma='auto' is a reconstruction",
        configure=ntk,
    )


SCORER = ntk()
