"""Structured pruning: which units may go, and how many, before a score exists; then which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optimum_prune.allocation import FLOOR, Budget, Size, budgets, choose, gamma_auto
from optimum_prune.binding import BoundGroup, bind, check_prunable, select
from optimum_prune.bounds import Range, kept_ranges, reachable, removed_range
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.config import PruningConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.ranked import RankedTargets
from optimum_prune.report import GroupReport
from optimum_prune.scorers.base import Scorer
from optimum_prune.scoring import score_groups
from optimum_prune.sizes import describe_, measure
from optimum_prune.surgery import slice_


@dataclass(frozen=True)
class Pool:
    """Units of one kind in one stack, among which a budget is spread.

    Attributes:
        stack: path of the stack.
        unit: kind of unit.
        entries: groups that are cut alike; most entries hold one group.
        sizes: of the entries.
        budget: how many units go.
    """

    stack: str
    unit: str
    entries: list[list[BoundGroup]]
    sizes: list[Size]
    budget: Budget

    def choose(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose the kept units of every group, by name, from the scores of every group."""
        totals = [torch.stack([scores[group.name] for group in entry]).sum(dim=0) for entry in self.entries]
        kept = choose(totals, self.budget)
        if self.budget.sparsity > 0 and all(
            len(keep) == size.num_units for keep, size in zip(kept, self.sizes, strict=True)
        ):
            raise self._spared()
        return {group.name: keep for entry, keep in zip(self.entries, kept, strict=True) for group in entry}

    @property
    def sparsity(self) -> float:
        """Fraction that should go."""
        return self.budget.sparsity

    @property
    def config(self) -> str:
        """Which of the model's configs describes the stack; `""` is the model's own."""
        return self.entries[0][0].declared.config

    @property
    def kept(self) -> dict[str, Range]:
        """How many units each group keeps, by its name, as far as that is known before the scores."""
        ranges = kept_ranges(self.sizes, self.budget)
        return {group.name: kept for entry, kept in zip(self.entries, ranges, strict=True) for group in entry}

    @property
    def reachable(self) -> list[int]:
        """Counts that every group can keep, ascending."""
        counts = [{*reachable(size.num_units, self.budget)} for size in self.sizes]
        return sorted(set.intersection(*counts))

    @property
    def removed(self) -> Range:
        """How many units go in all entries together."""
        return removed_range(self.sizes, self.budget)

    def check(self) -> None:
        """Refuse a budget of which rounding leaves nothing, whatever the scores."""
        if self.budget.sparsity > 0 and self.removed.highest == 0:
            raise self._spared()

    def _spared(self) -> InvalidConfig:
        return InvalidConfig(
            f"{self.unit}: rounding every kept count up to a multiple of {self.budget.round_to} spares what a "
            f"sparsity of {self.budget.sparsity:.4g} condemns. Lower round_to or raise the sparsity."
        )


@dataclass(frozen=True)
class Targets(RankedTargets):
    """Groups of units that a config targets; see `RankedTargets`.

    Attributes:
        groups: those of all pools, in the order of the model.
    """

    pools: list[Pool]
    groups: list[BoundGroup]

    def check(self, model: PreTrainedModel) -> None:
        """Refuse weights that cannot be pruned, before anything is touched."""
        check_prunable(model, self.groups)

    def score(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> dict[str, Tensor]:
        """Score the units of every group, by its name."""
        batch_size = config.calibration.batch_size
        scores = score_groups(model, self.groups, scorer, data=data, batch_size=batch_size, seed=config.seed)
        return {group.name: score for group, score in zip(self.groups, scores, strict=True)}

    def cut_(self, model: PreTrainedModel, kept: Mapping[str, Tensor]) -> list[GroupReport]:
        """Slice every group, and make the config truthful."""
        before = {group.name: (group.num_units, group.weights) for group in self.groups}
        for group in self.groups:
            slice_(group, kept[group.name])
        describe_(model)
        return [
            GroupReport(
                name=group.name,
                stack=group.stack,
                layer=group.layer,
                unit=group.unit,
                before=before[group.name][0],
                after=group.num_units,
                kept=kept[group.name].tolist(),
                weights_before=before[group.name][1],
                weights_after=group.weights,
            )
            for group in self.groups
        ]


def find_targets(model: PreTrainedModel, config: PruningConfig, scorer: Scorer) -> Targets:
    """Find what a config targets, and fix how many units go. Reads shapes alone, so a skeleton will do.

    Raises:
        PruningError: whatever can be refused before weights and data are looked at.
    """
    measure(model)  # refuses what no config can say, before it is cut
    groups = select(bind(model), config.units, config.include, config.exclude, config.stacks)
    allocation = _allocation(config, scorer)
    gamma: dict[str, float] = {}
    pools: list[Pool] = []
    for path in dict.fromkeys(group.stack for group in groups):
        entries = _entries([group for group in groups if group.stack == path])
        sizes = [_size(entry) for entry in entries]
        if allocation == "gamma" and (ratio := _gamma(config, entries, sizes)) is not None:
            gamma[path] = ratio
        plan = budgets(
            sizes,
            config.fraction,
            allocation,
            gamma=gamma.get(path, 1.0),
            round_to=config.round_to,
        )
        for unit, budget in plan.items():
            chosen = [i for i, size in enumerate(sizes) if size.unit == unit]
            pools.append(Pool(path, unit, [entries[i] for i in chosen], [sizes[i] for i in chosen], budget))
            pools[-1].check()
    if config.gamma != "auto" and not gamma:
        raise InvalidConfig(f"gamma={config.gamma} couples MLP and attention, but only one of them is targeted.")
    return Targets(pools, allocation, gamma, config.fraction, groups)


def _allocation(config: PruningConfig, scorer: Scorer) -> str:
    """Resolve `"auto"`, and refuse a ranking that means nothing for the scorer."""
    allocation = config.allocation
    if allocation == "auto":
        allocation = "gamma" if config.gamma != "auto" else scorer.allocation
    if allocation != "uniform" and scorer.comparable != "model":
        raise InvalidConfig(
            f"allocation={allocation!r} ranks all layers together, but {scorer.name} scores are only comparable inside "
            f"one {scorer.comparable}. Use allocation='uniform'."
        )
    return allocation


def _entries(groups: Sequence[BoundGroup]) -> list[list[BoundGroup]]:
    """Put groups together that have to keep the same units."""
    entries: dict[tuple[str, str | int], list[BoundGroup]] = {}
    for group in groups:
        layer = "all" if group.group.tied == "units" else group.layer
        entries.setdefault((group.group.site, layer), []).append(group)
    return list(entries.values())


def _size(entry: Sequence[BoundGroup]) -> Size:
    first = entry[0]
    tied = first.group.tied is not None
    return Size(first.name, first.unit, first.num_units, sum(group.weights for group in entry), tied)


def _gamma(config: PruningConfig, entries: Sequence[Sequence[BoundGroup]], sizes: Sequence[Size]) -> float | None:
    """Return gamma of one stack; None where only one kind of unit is targeted there."""
    weights = {unit: sum(size.weights for size in sizes if size.unit == unit) for unit in FLOOR}
    if not all(weights.values()):
        return None
    if config.gamma != "auto":
        return float(config.gamma)
    heads = [group.counts().values() for entry in entries for group in entry if group.unit == "kv_group"]
    queries_per_group = max(max(counts) // min(counts) for counts in heads)
    return gamma_auto(weights["kv_group"], weights["mlp_channel"], queries_per_group)
