"""Block influence: how far a layer turns the hidden state of a token."""

from torch import Tensor
from torch.nn.functional import cosine_similarity

from optimum_prune.scorers.base import Scorer, no_weights


def influence(before: Tensor, after: Tensor) -> Tensor:
    """Return `1 - cos(x_l, x_{l+1})` of every token, `(T,) float32` (Men et al. 2024, arXiv 2403.03853).

    Its mean over tokens is what the paper defines as the block influence (BI) of layer l. For attention and MLPs the
    same measure is taken of the residual stream before and after them (He et al. 2024, arXiv 2406.15786).

    Args:
        before: `(T, d)`, the residual stream in front of the layer.
        after: `(T, d)`, the same behind it.
    """
    return 1 - cosine_similarity(before.float(), after.float(), dim=-1)


SCORER = Scorer(
    name="block_influence",
    score=no_weights,
    influence=influence,
    patterns=("layers",),
    reference="ShortGPT: Men et al. 2024, arXiv 2403.03853; of attention and MLPs: He et al. 2024, arXiv 2406.15786",
)
