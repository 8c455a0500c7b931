"""The exact equivalent transform: scale what linears read, channel by channel, and undo it in what feeds them.

The model computes the same, and its weights say something else: magnitude, ranked per row, then sees what Wanda sees.
It is the reparameterisation of Sparsity Induction (Jiang et al. 2026, arXiv 2602.21652, equation 3) without its shift.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.adapters.base import Rescaling
from optimum_prune.binding import DTYPES, adapter_for, bind, stacks, submodule
from optimum_prune.errors import InvalidConfig, UnsupportedModel, unknown

ROUNDINGS = 4
"""By how many roundings a channel may miss its value. A norm that holds its weight less 1 loses two at a scale of 4."""


@dataclass(frozen=True)
class Site:
    """Where a scale per channel cancels. Names are module paths.

    Attributes:
        name: of the norm in front, or of what undoes the scales.
        width: of the vector of scales.
        divided: norm or linear whose outputs are divided by them.
        readers: linears whose input columns are multiplied by them.
        multiplied: norm or linear whose outputs are multiplied instead, or None.
        head: channels that lie together in a head.
        repeats: query heads that read one KV head, and share its scales.
        rotated: channels i and i + head / 2 share a scale.
    """

    name: str
    width: int
    divided: str
    readers: tuple[str, ...]
    multiplied: str | None
    head: int
    repeats: int
    rotated: bool

    @property
    def note(self) -> str:
        """Say which channels share a scale; empty where each has its own."""
        shared = []
        if self.rotated:
            shared.append(f"Channels i and i + {self.head // 2} of each head share a scale, since RoPE mixes them.")
        if self.repeats > 1:
            shared.append(f"The {self.repeats} query heads that read a KV head share its scales.")
        return " ".join(shared)

    def spread(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale of every channel of `divided`, and of every channel that is multiplied."""
        heads = scale.reshape(-1, self.head // 2).repeat(1, 2) if self.rotated else scale.reshape(-1, self.head)
        return heads.flatten(), heads.repeat_interleave(self.repeats, dim=0).flatten()


def rescaling_sites(model: PreTrainedModel) -> list[Site]:
    """List where scales can be absorbed exactly.

    What would not be exact is not listed: an activation other than ReLU in between, or a norm whose output is the
    residual stream too.

    Args:
        model: a transformers model of a supported architecture.

    Raises:
        UnsupportedArchitecture: no adapter knows the model's type.
        UnsupportedModel: the modules are not where the adapter says, or are not plain linears.
    """
    return [site for site in _sites(model).values() if isinstance(site, Site)]


@torch.no_grad()
def equivalent_rescale_(model: PreTrainedModel, scales: Mapping[str, Tensor]) -> None:
    """Multiply what linears read by scales, channel by channel, and divide what feeds them, in place.

    The model computes the same up to the rounding of its dtype. Nothing is changed if one scale cannot be applied. A
    weight that belongs to several sites is rounded once. Zeros stay zeros, so masks are kept.

    Args:
        model: a transformers model of a supported architecture, with plain weights.
        scales: name of a site of `rescaling_sites` -> `(width,)`, positive and finite.

    Raises:
        InvalidConfig: a site that the model does not have, or scales of another shape, not positive, not finite, or so
            far from 1 that the dtype of a weight cannot hold the result.
        UnsupportedModel: a weight that is quantised, not in memory, not finite, or shared with another module.
    """
    factors = _factors(model, scales)
    _check_weights(model, factors)
    # Computed twice: all must fit before the first weight changes, and new weights beside the old may be too many.
    for name, found in tqdm(factors.items(), desc="Checking scales", unit="module", delay=2):
        for kind, parameter, scaled, used in _scaled(model.get_submodule(name), found):
            if not _fits(scaled, used, parameter.dtype):
                raise InvalidConfig(
                    f"{name}.{kind} ({parameter.dtype}) cannot hold its scaled values. Give scales closer to 1, or "
                    "convert the model to float32 first."
                )
    for name, found in tqdm(factors.items(), desc="Rescaling", unit="module", delay=2):
        for _, parameter, scaled, _ in _scaled(model.get_submodule(name), found):
            parameter.copy_(scaled)


# From declarations to sites


def _sites(model: PreTrainedModel) -> dict[str, Site | str]:
    """Find every declared site that the model has, by name; instead of one that is not exact, say why."""
    adapter = adapter_for(model)
    bind(model, adapter)  # refuses what is no plain linear
    found = {}
    for stack in stacks(model, adapter):
        for layer, block in enumerate(stack.blocks):
            for alternatives in stack.stack.rescalings:
                declared = _alternative(alternatives, block)
                if declared is not None:
                    name = _name(declared, block)
                    found[f"{stack.path}.{layer}.{name}"] = _obstacle(declared, block) or _bound(
                        declared, block, f"{stack.path}.{layer}.", name
                    )
    return found


def _alternative(declared: Rescaling | tuple[Rescaling, ...], block: nn.Module) -> Rescaling | None:
    """Of alternatives, choose the first whose modules the block has: a skipped sub-layer has none of them."""
    alternatives = (declared,) if isinstance(declared, Rescaling) else declared
    return next((one for one in alternatives if all(submodule(block, path) for path in _paths(one))), None)


def _paths(declared: Rescaling) -> list[str]:
    return [declared.divided, *declared.readers, *filter(None, [declared.multiplied])]


def _name(declared: Rescaling, block: nn.Module) -> str:
    in_front = not isinstance(block.get_submodule(declared.divided), nn.Linear)
    return declared.multiplied or (declared.divided if in_front else declared.readers[0])


def _obstacle(declared: Rescaling, block: nn.Module) -> str | None:
    """Say why a scale would not cancel, if it would not."""
    for path in _paths(declared):
        if _weight(block, path) is None:
            return f"{path} has no weight"
    if declared.norm_first and not getattr(block, declared.norm_first):
        return f"what comes out of {declared.divided} is the residual stream too"
    activation = block.get_submodule(declared.relu) if declared.relu else None
    if activation is not None and not isinstance(activation, nn.ReLU):
        return f"{declared.divided} is followed by {type(activation).__name__}, and only a ReLU lets scales pass"
    return None


def _bound(declared: Rescaling, block: nn.Module, prefix: str, name: str) -> Site:
    channels = len(_weight(block, declared.divided))
    undone = declared.multiplied
    read = len(_weight(block, undone)) if undone else _weight(block, declared.readers[0]).shape[1]
    return Site(
        name=prefix + name,
        width=channels // 2 if declared.rotated else channels,
        divided=prefix + declared.divided,
        readers=tuple(prefix + path for path in declared.readers),
        multiplied=undone and prefix + undone,
        head=attrgetter(declared.head_dim)(block) if declared.head_dim else channels,
        repeats=read // channels,
        rotated=declared.rotated,
    )


def _weight(module: nn.Module, path: str) -> Tensor:
    return getattr(module.get_submodule(path), "weight", None)  # pyright: ignore[reportReturnType]


# From scales to factors of weights


class _Factors(NamedTuple):
    """What the outputs `(d_out,)` and inputs `(d_in,)` of a module are multiplied by, float64 on the CPU."""

    outputs: Tensor
    inputs: Tensor


def _factors(model: PreTrainedModel, scales: Mapping[str, Tensor]) -> dict[str, _Factors]:
    """Collect the factors of every module that changes, by its path: a module may belong to several sites."""
    known, found = _sites(model), {}

    def of(name: str) -> _Factors:
        shape = _weight(model, name).shape
        ones = (torch.ones(width, dtype=torch.float64, device="cpu") for width in (shape[0], shape[-1]))
        return found.setdefault(name, _Factors(*ones))

    for name, scale in scales.items():
        site = _known(known, name)
        divided, read = site.spread(_checked(site, scale))
        of(site.divided).outputs.div_(divided)
        if site.multiplied:
            of(site.multiplied).outputs.mul_(read)
        for reader in site.readers:
            of(reader).inputs.mul_(read)
    return found


def _known(sites: Mapping[str, Site | str], name: str) -> Site:
    if name not in sites:
        exact = [known for known, site in sites.items() if isinstance(site, Site)]
        raise InvalidConfig(unknown("rescaling site", name, exact))
    if isinstance(site := sites[name], str):
        raise InvalidConfig(f"{name} cannot be rescaled exactly: {site}. Choose from rescaling_sites(model).")
    return site


def _checked(site: Site, scale: Tensor) -> Tensor:
    if not isinstance(scale, Tensor) or scale.shape != (site.width,):
        given = list(scale.shape) if isinstance(scale, Tensor) else repr(scale)
        raise InvalidConfig(f"The scales of {site.name} must be a tensor of shape [{site.width}], got {given}.")
    scale = scale.detach().cpu().double()
    wrong = scale[~((scale > 0) & scale.isfinite())].tolist()
    if wrong:
        raise InvalidConfig(f"The {site.width} scales of {site.name} must be positive and finite, got {wrong[0]}.")
    return scale


def _check_weights(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Refuse weights that cannot be scaled, or not alone, by name."""
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in names:
        for kind, parameter in _parameters(model.get_submodule(name)):
            if type(parameter) is not nn.Parameter or parameter.dtype not in DTYPES:
                reason = f"is a {type(parameter).__name__} of {parameter.dtype}: rescale the plain model, then quantise"
            elif parameter.is_meta:
                reason = "is not in memory (meta device): load the model with every layer on a CPU or GPU"
            elif parameter.is_inference():
                reason = "was made under torch.inference_mode() and cannot change: load the model outside"
            elif owners[id(parameter)] > 1:
                reason = "is shared with another module, which would change too"
            elif not parameter.isfinite().all():
                reason = "holds NaN or infinite values: the checkpoint is damaged, reload it"
            else:
                continue
            raise UnsupportedModel(f"{name}.{kind} {reason}.")


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weight and the bias, if it has one."""
    return ((kind, getattr(module, kind)) for kind in ("weight", "bias") if getattr(module, kind, None) is not None)


# From factors to weights


def _scaled(module: nn.Module, factors: _Factors) -> Iterator[tuple[str, nn.Parameter, Tensor, Tensor]]:
    """Yield name, parameter, its scaled values before they are rounded, and these as the module uses them.

    Vectors are computed in float64 on the CPU, matrices on their device, in float32 at least.
    """
    for kind, parameter in _parameters(module):
        if parameter.dim() == 2:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            outputs, inputs = (factor.to(dtype).to(parameter.device) for factor in factors)
            scaled = used = parameter.to(dtype) * outputs[:, None] * inputs
        elif isinstance(module, nn.Linear) or kind == "bias":
            scaled = used = parameter.cpu().double() * factors.outputs
        else:
            offset = _offset(module)
            scaled = parameter.cpu().double() * factors.outputs + offset * (factors.outputs - 1)
            used = (scaled + offset)[None]  # a row: each gain is a channel of its own
        yield kind, parameter, scaled, used


def _offset(norm: nn.Module) -> float:
    """Return what a norm adds to its weight: 1 in Gemma's, which multiply by `1 + weight`."""
    blank = {kind: torch.zeros_like(parameter) for kind, parameter in _parameters(norm)}
    probe = torch.zeros_like(blank["weight"])
    probe[0] = 1
    return float((functional_call(norm, blank, (probe[None],)) != 0).any())


def _fits(scaled: Tensor, used: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a dtype holds values so well that no channel is lost: to overflow, underflow or cancellation.

    Args:
        scaled: values to hold.
        used: the same as they are used, with rows and columns that are channels.
        dtype: of the parameter.
    """
    error, size = (scaled.to(dtype).to(scaled.dtype) - scaled).abs().view_as(used), used.abs()
    allowed = ROUNDINGS * torch.finfo(dtype).eps
    return all((error.amax(dim) <= allowed * size.amax(dim)).all() for dim in range(used.dim()))
