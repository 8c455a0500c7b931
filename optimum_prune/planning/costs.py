"""What a model holds, and what goes with a unit or a layer: parameters, bytes of weights, bytes of keys and values."""

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.adapters.base import CoupledGroup
from optimum_prune.binding import BoundGroup, bind
from optimum_prune.bounds import Range, kept_ranges
from optimum_prune.depth import BLOCK, DepthPool, Layer
from optimum_prune.evaluation import weight_bytes
from optimum_prune.pools import Pool

TARGETED = "targeted_weights"
PARAMETERS = "parameters"
WEIGHT_BYTES = "weight_bytes"
CACHE = "cache_bytes_per_token"
CROSS_CACHE = ("cache_bytes_per_output_token", "cache_bytes_per_input_token")
"""In the order of a block's attentions: a decoder with an encoder keeps keys and values of the tokens that it wrote,
and then of those that the encoder read."""


def model_costs(model: PreTrainedModel) -> dict[str, int]:
    """Measure a model; a skeleton will do."""
    found = Counter({PARAMETERS: model.num_parameters(), WEIGHT_BYTES: weight_bytes(model)})
    found.update(dict.fromkeys(CROSS_CACHE if model.config.is_encoder_decoder else [CACHE], 0))
    for group in bind(model):
        found.update(_cache(group))
    return dict(found)


def cost_of_units(pool: Pool) -> dict[str, Range]:
    """Bound what goes with the units that a pool loses."""
    per_unit = [_unit(entry) for entry in pool.entries]
    kept, units = kept_ranges(pool.sizes, pool.budget), pool.removed
    removed = {}
    for name in _names(per_unit):
        costs = [entry[name] for entry in per_unit]
        if all(count.exact for count in kept):
            gone = [size.num_units - count.lowest for size, count in zip(pool.sizes, kept, strict=True)]
            total = sum(cost * number for cost, number in zip(costs, gone, strict=True))
            removed[name] = Range(total, total)
        else:
            removed[name] = Range(min(costs) * units.lowest, max(costs) * units.highest)
    return removed


def cost_of_layers(pool: DepthPool, bound: Sequence[BoundGroup]) -> dict[str, Range]:
    """Bound what goes with the layers that a pool loses; `bound` are the groups of the model."""
    costs = {layer: _layer(pool, layer, bound) for layer in pool.layers}
    removed = {}
    for name in _names(costs.values()):
        ascending = sorted(cost[name] for layer, cost in costs.items() if not layer.stays)
        removed[name] = Range(sum(ascending[: pool.remove]), sum(ascending[len(ascending) - pool.remove :]))
    return removed


def _unit(entry: Sequence[BoundGroup]) -> Counter[str]:
    """Measure one unit of groups that are cut alike."""
    found: Counter[str] = Counter()
    for group in entry:
        tensors = [tensor for linear in group.writers for tensor in linear.parameters(recurse=False)]
        whole = _tensors([*tensors, *(module.weight for module in (*group.readers, *group.tables))])
        whole += Counter({TARGETED: group.weights}) + _cache(group)
        found += Counter({name: count // group.num_units for name, count in whole.items()})
    return found


def _layer(pool: DepthPool, layer: Layer, bound: Sequence[BoundGroup]) -> Counter[str]:
    first = pool.found.stack.first if pool.unit == BLOCK else {}
    stays = tuple(f"{path}.{attribute}" for path, attributes in first.items() for attribute in attributes)
    state = layer.module.state_dict(keep_vars=True)
    found = _tensors(tensor for name, tensor in state.items() if not name.startswith(stays))
    found += Counter({TARGETED: layer.weights})
    for group in bound:
        if f"{group.name}.".startswith(f"{layer.name}."):
            found += _cache(group)
    return found


def _tensors(tensors: Iterable[Tensor]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[PARAMETERS] += tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        found[WEIGHT_BYTES] += tensor.nbytes
    return found


def _cache(group: BoundGroup) -> Counter[str]:
    """Bytes of keys and values that a group keeps of one token."""
    attentions = [one for one in group.declared.groups if isinstance(one, CoupledGroup) and one.cached]
    if group.group not in attentions:
        return Counter()
    name = CACHE if len(attentions) == 1 else CROSS_CACHE[attentions.index(group.group)]
    return Counter({name: sum(linear.weight[:, 0].nbytes for linear in group.writers[:2])})


def _names(costs: Iterable[Counter[str]]) -> list[str]:
    return list(dict.fromkeys(name for cost in costs for name in cost))
