"""Which layout a run will be able to write: the model's class is asked before the run, with skeletons."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.biases import add_, complete_
from optimum_prune.binding import adapter_for, bind, stacks
from optimum_prune.class_switch import switched_name
from optimum_prune.pools import Pool
from optimum_prune.sizes import measure, why_not_padded, why_not_stock
from optimum_prune.surgery import drop_, slice_


@dataclass(frozen=True)
class Forecast:
    """The layout of a run's result.

    Attributes:
        layout: `"stock"`, `"compact"`, or `"undecided"` where the scores decide whether layers come out equal.
        reason: why it is not `"stock"`; None where it is.
        stock_heads: path of a stack -> counts of its `kv_group`s with which the result would be `"stock"`, if all
            targeted layers kept as many and nothing else were cut; only stacks of which attention is targeted.
        class_switch: class as which `class_switch` makes it `"stock"` after all; None where that does not help.
        not_padded: why it cannot be `"padded"`, or may not; None where it can.
    """

    layout: Literal["stock", "compact", "undecided"]
    reason: str | None
    stock_heads: dict[str, list[int]]
    class_switch: str | None = None
    not_padded: str | None = None


def forecast(model: PreTrainedModel, pools: Sequence[Pool]) -> Forecast:
    """Ask the model's class what a plain config can say.

    Args:
        model: left as it was; a skeleton will do.
        pools: of the run.
    """
    return replace(_forecast(model, pools), not_padded=why_not_padded(model))


def _forecast(model: PreTrainedModel, pools: Sequence[Pool]) -> Forecast:
    stock_heads = _stock_heads(model, [pool for pool in pools if pool.unit == "kv_group"])
    kept = {name: count for pool in pools for name, count in pool.kept.items()}
    if all(count.exact for count in kept.values()):
        skeleton = skeleton_of(model)
        _cut(skeleton, {name: count.lowest for name, count in kept.items()})
        return ask(skeleton, stock_heads)
    for pool in pools:
        equal = _equal_counts(model, pool)
        if not equal:
            return Forecast("compact", f"layers will differ in their {pool.unit}s", stock_heads)
        if pool.unit == "kv_group" and not equal & {*stock_heads[pool.stack]}:
            takes = " or ".join(map(str, stock_heads[pool.stack])) or "no such number of"
            return Forecast("compact", f"{type(model).__name__} takes {takes} kv_groups here", stock_heads)
    return Forecast("undecided", "one ranking decides what each layer keeps; layers seldom come out equal", stock_heads)


def ask(skeleton: PreTrainedModel, stock_heads: Mapping[str, list[int]] | None = None) -> Forecast:
    """Ask the class of a skeleton, cut as the run will cut, whether a plain config can describe it."""
    reason = why_not_stock(skeleton)
    other = None if reason is None else switched_name(skeleton)
    layout = "stock" if reason is None else "compact"
    return Forecast(layout, reason, dict(stock_heads or {}), other, why_not_padded(skeleton))


def ask_with_biases(skeleton: PreTrainedModel, names: Iterable[str]) -> Forecast:
    """Ask as `ask` does, of a run that may create biases; with all that it may create, the skeleton is left."""
    without = ask(skeleton)
    for name in names:
        add_(skeleton.get_submodule(name))  # pyright: ignore[reportArgumentType]
    complete_(skeleton)
    biased = ask(skeleton)
    if without.layout == biased.layout:
        return biased
    reason = f"biases are created where they help, and then {biased.reason}"
    return Forecast("undecided", reason, {}, not_padded=reason)


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model, without its weights: modules, shapes, dtypes and ties, on the meta device."""
    bare = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    bare |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    # Of an offloaded module, the hook holds the weights.
    bare |= {id(hook): hook for module in model.modules() if (hook := getattr(module, "_hf_hook", None)) is not None}
    return copy.deepcopy(model, bare)


def _stock_heads(model: PreTrainedModel, pools: Sequence[Pool]) -> dict[str, list[int]]:
    """Try every count that all heads of a (sub)config can keep, from the largest to the smallest."""
    found: dict[str, list[int]] = {}
    for config in dict.fromkeys(pool.config for pool in pools):
        members = [pool for pool in pools if pool.config == config]
        names = [name for pool in members for name in pool.kept]
        skeleton = _shallow(model)
        stock: list[int] = []
        counts: set[int] = set.intersection(*({*pool.reachable} for pool in members))
        left_alone = set().union(*(_left_alone(model, pool) for pool in members))
        candidates = sorted((count for count in counts if left_alone <= {count}), reverse=True)
        for count in tqdm(candidates, desc=f"Asking {type(model).__name__}", unit="head count", delay=2):
            _cut(skeleton, dict.fromkeys(names, count))  # pyright: ignore[reportArgumentType]
            if why_not_stock(skeleton) is None:
                stock.insert(0, count)
        found |= {pool.stack: stock for pool in members}
    return found


def _shallow(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model without its weights; of blocks that are all alike, one stands for all."""
    skeleton, sizes = skeleton_of(model), measure(model)
    if all(counts == layers[0] for layers in sizes.values() for counts in layers.values()):
        for found in stacks(skeleton, adapter_for(skeleton)):
            if found.stack.depth is not None:
                drop_(skeleton, found, [0])
    return skeleton


def _equal_counts(model: PreTrainedModel, pool: Pool) -> set[int]:
    """Counts that every layer of a pool's stack may come to keep, all the same."""
    left_alone, kept, removed = _left_alone(model, pool), {*pool.kept.values()}, pool.removed
    units = [size.num_units for size in pool.sizes]
    return {
        count
        for count in pool.reachable
        if left_alone <= {count}
        and all(count in bounds for bounds in kept)
        and sum(units) - len(units) * count in removed
    }


def _left_alone(model: PreTrainedModel, pool: Pool) -> set[int]:
    """Counts of the groups of a pool's kind, in its stack, that are not targeted."""
    groups = [group for group in bind(model) if (group.stack, group.unit) == (pool.stack, pool.unit)]
    return {group.num_units for group in groups if group.name not in pool.kept}


def _cut(skeleton: PreTrainedModel, counts: Mapping[str, int]) -> None:
    for group in bind(skeleton):
        if group.name in counts:
            slice_(group, range(counts[group.name]))
