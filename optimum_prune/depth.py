"""Pruning of depth: which blocks and sub-layers may go, and how many, before a score exists; then which."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.binding import (
    BoundStack,
    adapter_for,
    bind,
    check_names,
    check_patterns,
    check_prunable,
    is_targeted,
    stacks,
)
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.influence import mean_influence
from optimum_prune.config import PruningConfig
from optimum_prune.configs import irregular, kinds_follow_rule, layer_types, stack_config
from optimum_prune.errors import InvalidConfig
from optimum_prune.ranked import RankedTargets, difference
from optimum_prune.report import GroupReport
from optimum_prune.scorers.base import Scorer
from optimum_prune.sizes import describe_
from optimum_prune.skipping import leaders, skipped, why_not_skip
from optimum_prune.surgery import drop_, skip_

BLOCK = "layer"
"""The unit that is a whole block; the others are sub-layers."""


@dataclass(frozen=True)
class Layer:
    """A block, or a sub-layer of a block.

    Attributes:
        name: full module path.
        layer: index of the block in its stack.
        module: the block or sub-layer itself.
        stays: it is exempt, whatever its score says.
    """

    name: str
    layer: int
    module: nn.Module
    stays: bool

    @property
    def weights(self) -> int:
        """Number of weights in all of its linears (biases and norms not counted)."""
        return sum(part.weight.numel() for part in self.module.modules() if isinstance(part, nn.Linear))


@dataclass(frozen=True)
class DepthPool:
    """Layers of one kind in one stack, which are ranked together.

    Attributes:
        found: the stack.
        unit: `"layer"`, `"attention"` or `"mlp"`.
        layers: those that are targeted, in order.
        sparsity: the fraction of them that should go.
        remove: how many of them go.
    """

    found: BoundStack
    unit: str
    layers: list[Layer]
    sparsity: float
    remove: int

    @property
    def stack(self) -> str:
        """Path of the stack."""
        return self.found.path

    def choose(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose what is kept, by name: `[0]` for a layer that stays, `[]` for one that goes. Ties go by position."""
        ranked = sorted(
            (layer for layer in self.layers if not layer.stays), key=lambda layer: float(scores[layer.name])
        )
        going = {layer.name for layer in ranked[: self.remove]}
        return {layer.name: torch.arange(int(layer.name not in going), device="cpu") for layer in self.layers}

    def ranking(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the layers are ranked by, `(1,) float32`, by name."""
        return {layer.name: scores[layer.name].reshape(1) for layer in self.layers}

    def cut_(self, model: PreTrainedModel, kept: Mapping[str, Tensor]) -> list[GroupReport]:
        """Drop the blocks, or skip the sub-layers, that are not kept."""
        reports = [self._report(layer, kept[layer.name].tolist()) for layer in self.layers]
        going = [report.layer for report in reports if not report.after]
        if self.unit == BLOCK:
            drop_(model, self.found, [layer for layer in range(len(self.found.blocks)) if layer not in going])
        else:
            for layer in going:
                skip_(model, self.found, layer, self.unit)
        return reports

    def follows_rule(self, model: PreTrainedModel) -> bool:
        """Tell whether the class would derive the kinds of attention of the stack's layers; see `kinds_follow_rule`."""
        return kinds_follow_rule(stack_config(model.config, self.found.stack))

    def _report(self, layer: Layer, kept: list[int]) -> GroupReport:
        return GroupReport(
            name=layer.name,
            stack=self.found.path,
            layer=layer.layer,
            unit=self.unit,
            before=1,
            after=len(kept),
            kept=kept,
            weights_before=layer.weights,
            weights_after=layer.weights * len(kept),
        )


@dataclass(frozen=True)
class DepthTargets(RankedTargets):
    """Blocks and sub-layers that a config targets: one ranking over all layers of a pool; see `RankedTargets`."""

    pools: list[DepthPool]

    def check(self, model: PreTrainedModel) -> None:
        """Refuse weights that cannot be pruned, before anything is touched."""
        paths = {pool.found.path for pool in self.pools}
        check_prunable(model, [group for group in bind(model) if group.stack in paths])

    def rehearse_(self, skeleton: PreTrainedModel, config: PruningConfig) -> None:
        """Cut the skeleton that the targets were found in, by scores that mean nothing: as many layers go."""
        layers = [layer for pool in self.pools for layer in pool.layers]
        scores = {layer.name: torch.tensor(float(layer.layer), dtype=torch.float32, device="cpu") for layer in layers}
        self.cut_(skeleton, self.choose(scores))

    def score(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> dict[str, Tensor]:
        """Score every layer, by its name: `() float32`; larger = keep."""
        names = [layer.name for pool in self.pools for layer in pool.layers]
        if scorer.influence is None:
            assert scorer.draw is not None, "a scorer of layers measures their influence, or draws"
            generator = torch.Generator().manual_seed(config.seed)
            return {name: scorer.draw(generator) for name in names}
        assert data is not None, "the pipeline loads calibration data for every scorer that measures"
        found = {pool.found.path: pool.found for pool in self.pools}
        # Any id will do for padding: it is masked in attention, and no statistic looks at it.
        batches = list(data.batches(config.calibration.batch_size, pad_token_id=0))
        influence = mean_influence(model, found.values(), batches, scorer.influence)
        return {name: torch.tensor(influence[name], dtype=torch.float32, device="cpu") for name in names}

    @contextmanager
    def hidden(self, model: PreTrainedModel, kept: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model compute for a while as if what is not kept were gone."""
        handles = [
            layer.module.register_forward_hook(_pass_by if pool.unit == BLOCK else _add_nothing, with_kwargs=True)
            for pool in self.pools
            for layer in pool.layers
            if not len(kept[layer.name])
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cut_(self, model: PreTrainedModel, kept: Mapping[str, Tensor]) -> list[GroupReport]:
        """Drop and skip, and make the config truthful."""
        regular = [pool for pool in self.pools if pool.follows_rule(model)]
        reports = [report for pool in self.pools for report in pool.cut_(model, kept)]
        self.note(irregular(pool.stack, "no longer") for pool in regular if not pool.follows_rule(model))
        describe_(model)
        return reports


def find_depth_targets(model: PreTrainedModel, config: PruningConfig, scorer: Scorer) -> DepthTargets:
    """Find what a config targets, and fix how many layers go. Reads shapes alone, so a skeleton will do.

    Every pool loses the same fraction of its targeted layers; those that have to stay count as targeted.

    Raises:
        PruningError: whatever can be refused before weights and data are looked at.
    """
    bind(model)  # refuses what is not the plain model that the adapter describes
    live = stacks(model, adapter_for(model))
    check_names(config.stacks, [found.stack for found in live])
    chosen = [f for f in live if (f.stack.default if config.stacks is None else f.stack.name in config.stacks)]
    layers = {
        (i, unit): _layers(model, f, unit, config) for i, f in enumerate(chosen) for unit in config.units or [BLOCK]
    }
    names = [layer.name for members in layers.values() for layer in members]
    check_patterns([*(config.include or ()), *(config.exclude or ())], names, list(dict.fromkeys(names)))
    pools, untouched = [], []
    for (i, unit), members in layers.items():
        if targeted := [layer for layer in members if is_targeted([layer.name], config.include, config.exclude)]:
            remove, reason = _number_to_remove(chosen[i], unit, targeted, len(members), config)
            pools.append(DepthPool(chosen[i], unit, targeted, config.fraction, remove))
            untouched += [(pools[-1], reason)] if reason else []
    if not pools:
        raise InvalidConfig(
            f"Nothing is left to prune: stacks={config.stacks}, units={config.units}, include={config.include}, "
            f"exclude={config.exclude} leave none of {sum(map(len, layers.values()))} layers."
        )
    if len(untouched) == len(pools):
        what = [f"{pool.unit}: {len(pool.layers)} targeted in {pool.stack}, of which {why}." for pool, why in untouched]
        raise InvalidConfig(f"{' '.join(what)} Change the sparsity, or target other layers.")
    notes = [difference(pool.unit, pool.stack, pool.sparsity, f"{0:.1%}", reason) for pool, reason in untouched]
    return DepthTargets(pools, allocation="global", gamma={}, sparsity=config.fraction, notes=notes)


def generation_warnings(model: PreTrainedModel) -> list[str]:
    """Warn where transformers cannot generate with its own cache, whose length is taken from the encoder."""
    lengths = {found.stack.name: len(found.blocks) for found in stacks(model, adapter_for(model))}
    encoder, decoder = lengths.get("encoder"), lengths.get("decoder")
    if encoder is None or decoder is None or encoder >= decoder:
        return []
    return [
        f"The encoder has {encoder} blocks and the decoder {decoder}, but transformers makes its cache for generation "
        "as long as the encoder, and fails with an IndexError. Pass use_cache=False, or "
        "past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()), or drop blocks of the decoder too."
    ]


def _layers(model: PreTrainedModel, found: BoundStack, unit: str, config: PruningConfig) -> list[Layer]:
    """List the blocks of a stack, or those of its sub-layers that are not skipped yet."""
    stack, blocks = found.stack, found.blocks
    kinds = layer_types(stack_config(model.config, stack))
    if stack.depth is None:
        raise InvalidConfig(
            f"Stack {stack.name!r} cannot lose blocks: the model takes the output of a certain one of them."
        )
    if unit != BLOCK and unit not in stack.sublayers:
        raise InvalidConfig(
            f"{type(model).__name__} has no {unit} in {found.path} that can be skipped. Drop whole blocks instead: "
            "units=['layer']."
        )
    skips = [skipped(stack, block) for block in blocks]
    has_skipped_attention = any("attention" in names for names in skips)
    layers = []
    for i, block in enumerate(blocks):
        stays = i < config.keep_first or i >= len(blocks) - config.keep_last
        if unit == BLOCK:
            # The next of its kind may have no attention, which a leader must have.
            stays = stays or (has_skipped_attention and i in leaders(kinds))
            layers.append(Layer(f"{found.path}.{i}", i, block, stays))
        elif unit not in skips[i]:
            path = stack.sublayers[unit]
            stays = stays or why_not_skip(stack, kinds, i, unit) is not None
            layers.append(Layer(f"{found.path}.{i}.{path}", i, block.get_submodule(path), stays))
    return layers


def _number_to_remove(
    found: BoundStack, unit: str, targeted: Sequence[Layer], present: int, config: PruningConfig
) -> tuple[int, str | None]:
    """Return the nearest number of layers, and why that is none where some should go.

    Raises:
        InvalidConfig: fewer can go.
    """
    count, sparsity = len(targeted), config.fraction
    remove = math.floor(sparsity * count + 0.5 + 1e-9)  # half up; 0.29 * 100 is 28.999999999999996
    most = min(sum(not layer.stays for layer in targeted), present - 1)
    if remove > most:
        reason = (
            f"{remove} would have to go ({sparsity:.4g}), but at most {most} can: {_what_stays(found, unit, config)}"
        )
        if most:
            raise InvalidConfig(f"{unit}: {count} targeted in {found.path}, of which {reason}. Lower the sparsity.")
        return 0, reason
    if remove == 0 and sparsity > 0:
        reachable = [f"{number / count:.3g}" for number in range(1, most + 1)]
        shown = reachable if len(reachable) <= 6 else [*reachable[:3], "...", reachable[-1]]
        return 0, f"a sparsity of {sparsity:.4g} removes none (reachable: {', '.join(shown) or 'none'})"
    return remove, None


def _what_stays(found: BoundStack, unit: str, config: PruningConfig) -> str:
    reasons = [f"the first {config.keep_first} and the last {config.keep_last} blocks stay (keep_first, keep_last)"]
    if unit == "attention":
        reasons.append("so does the attention of the first block of every kind, off which generation reads positions")
    elif unit == BLOCK and any("attention" in skipped(found.stack, block) for block in found.blocks):
        reasons.append("so do the first blocks, as long as others have their attention skipped")
    return ", ".join([*reasons, "and one of each stack always does"])


def _pass_by(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Let a block give back what it was given."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _add_nothing(sublayer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Let a sub-layer add nothing to the residual stream."""
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)
