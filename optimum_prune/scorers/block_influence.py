"""Block influence: how far a layer turns the hidden state of a token."""

from torch import Tensor
from torch.nn.functional import normalize

from optimum_prune.scorers.base import Scorer, no_weights


def influence(before: Tensor, after: Tensor) -> Tensor:
    """Return `1 - cos(before, after)` of every token, `(T,) float32`, in [0, 2].

    Its mean over tokens is the block influence (BI) of a layer: Men et al. 2024, arXiv 2403.03853, equation 1. For
    attention and MLPs the same measure is taken of the residual stream before and after them (He et al. 2024, arXiv
    2406.15786).

    The cosine is not computed. With the unit vectors `u = before / |before|` and `v = after / |after|`,
    `|u - v|^2 = |u|^2 + |v|^2 - 2 u.v = 2 (1 - cos)`, so that half the squared distance is the same number. States
    that are equal give exactly 0 on every processor, and a small angle keeps its digits, where `1 - cos` would return
    the rounding of a cosine close to 1.

    A state of norm 0 has no direction: two of them count as equal, one of them gives 1/2.

    Args:
        before: `(T, d)`, any float dtype: the residual stream in front of the layer.
        after: `(T, d)`, the residual stream behind it.
    """
    return (_directions(before) - _directions(after)).square().sum(dim=-1) / 2


def _directions(states: Tensor) -> Tensor:
    # Contiguous, so that the norms of equal states are summed in the same order.
    return normalize(states.float().contiguous(), dim=-1)


SCORER = Scorer(
    name="block_influence",
    score=no_weights,
    influence=influence,
    patterns=("layers",),
    reference="ShortGPT: Men et al. 2024, arXiv 2403.03853; of attention and MLPs: He et al. 2024, arXiv 2406.15786",
)
