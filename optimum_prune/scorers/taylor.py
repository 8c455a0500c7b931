"""Taylor gates: how much the loss depends on a unit's output. The recommended score for structured pruning."""

from torch import Tensor

from optimum_prune.objectives import LOSS
from optimum_prune.scorers.base import Scorer, Units, no_weights, sum_readers


def score_units(units: Units) -> Tensor:
    """Return `S_u = mean over samples of |sum_t a_tu dL/da_tu|`, `(number,) float32`.

    a is what the readers are given: `down_proj` for channels, `o_proj` for the columns of a KV group, whose products
    are summed with their signs before the one absolute value. Of heads this is Michel et al. 2019, arXiv 1905.10650,
    equation 2; to channels and KV groups it is extended here.
    """
    gates = sum_readers(units, lambda reader: reader.statistics.gates[LOSS.name])  # (samples, number)
    return gates.abs().mean(dim=0)


SCORER = Scorer(
    name="taylor",
    score=no_weights,
    score_units=score_units,
    gates=LOSS,
    allocation="gamma",
    seq_len=512,
    reference="Taylor head importance: Michel, Levy, Neubig 2019, arXiv 1905.10650, equation 2; of KV groups and "
    "channels: an extension of ours",
)
