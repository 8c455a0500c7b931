"""Models that have to compute the same after a rescaling: drawn scales, outputs in float64, their distance."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.rescaling import Site
from tests.models import inputs


@torch.no_grad()
def as_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model in float64, with weights of its norms that differ: fresh ones are all alike."""
    torch.manual_seed(0)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 1:
            weight.add_(torch.rand_like(weight) - 0.5)
    return model.double()


def draw(sites: Iterable[Site], seed: int = 0) -> dict[str, Tensor]:
    """Draw scales between 1/4 and 4, by name of the site."""
    generator = torch.Generator().manual_seed(seed)
    return {site.name: torch.exp2(4 * torch.rand(site.width, generator=generator) - 2) for site in sites}


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Return what a model makes of drawn inputs, in its own dtype."""
    given = inputs(model, 3, 16)
    return model(**{key: given[key].to(model.dtype) if key == "pixel_values" else given[key] for key in given}).logits


def distance(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, against the largest value."""
    return ((got - expected).abs().max() / expected.abs().max()).item()
