"""Structured pruning: which units may go, and how many, before a score exists; then which."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from optimum_prune.ranked import RankedTargets, with_scores
from optimum_prune.refit import check_compensation, compensate_
from optimum_prune.report import GroupReport
from optimum_prune.scorers.base import Scorer
from optimum_prune.scoring import score_groups
from optimum_prune.sizes import describe_, measure
from optimum_prune.surgery import cutting, hide_, kept_aside, slice_


@dataclass(frozen=True)
class Pool:
    """Units of one kind in one stack, among which a budget is spread.

    Attributes:
        stack: path of the stack.
        unit: kind of unit.
        entries: groups that are cut alike; most entries hold one group.
        sizes: of the entries.
        budget: how many units go.
        combine: of the scorer; see `Scorer`.
    """

    stack: str
    unit: str
    entries: list[list[BoundGroup]]
    sizes: list[Size]
    budget: Budget
    combine: Callable[[Sequence[Tensor], bool], list[Tensor]] | None

    def choose(
        self, scores: Mapping[str, Tensor], left: Mapping[str, Tensor] | None = None, share: float = 1.0
    ) -> dict[str, Tensor]:
        """Choose the kept units of every group.

        Args:
            scores: name of a group -> scores of its units; as many groups as the pool has.
            left: name of a group -> units that did not go in an earlier step; all others go anyway.
            share: of the budget, that goes up to this step.

        Returns:
            Name of a group -> kept units, sorted int64.
        """
        kept = choose(self.ranked(scores, left), self.budget.part(share))
        if share == 1 and self.budget.sparsity > 0 and all(map(_is_whole, kept, self.sizes)):
            raise self._spared()
        return {group.name: keep for entry, keep in zip(self.entries, kept, strict=True) for group in entry}

    def ranked(self, scores: Mapping[str, Tensor], left: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """Return what the units of every entry are ranked by, `(num_units,) float32`; see `choose`."""
        totals = [torch.stack([scores[group.name] for group in entry]).sum(dim=0) for entry in self.entries]
        candidates = [left[entry[0].name] for entry in self.entries] if left else [slice(None)] * len(totals)
        ranked = [total[candidate] for total, candidate in zip(totals, candidates, strict=True)]
        if self.combine is not None:
            ranked = self.combine(ranked, isinstance(self.budget.remove, int))
        for i, candidate in enumerate(candidates):
            totals[i] = totals[i].new_full((len(totals[i]),), -torch.inf)
            totals[i][candidate] = ranked[i]
        return totals

    def ranking(self, scores: Mapping[str, Tensor], left: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the same by name of a group."""
        ranked = self.ranked(scores, left)
        return {group.name: ranks for entry, ranks in zip(self.entries, ranked, strict=True) for group in entry}

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


def _is_whole(kept: Tensor, size: Size) -> bool:
    return len(kept) == size.num_units


@dataclass(frozen=True)
class Targets(RankedTargets):
    """Groups of units that a config targets; see `RankedTargets`.

    Attributes:
        groups: those of all pools, in the order of the model.
        compensation: how what stays makes up for what goes; never `"auto"`.
    """

    pools: list[Pool]
    groups: list[BoundGroup]
    compensation: str

    def check(self, model: PreTrainedModel) -> None:
        """Refuse weights that cannot be pruned, before anything is touched."""
        check_prunable(model, self.groups)

    def score(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> dict[str, Tensor]:
        """Score the units of every group, by its name."""
        batch_size = config.calibration.batch_size
        return score_groups(model, self.groups, [scorer], data=data, batch_size=batch_size, seed=config.seed)[0]

    @contextmanager
    def hidden(self, model: PreTrainedModel, kept: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model compute for a while as if what is not kept were gone."""
        with kept_aside([linear.weight for group in self.groups for linear in group.readers]):
            for group in self.groups:
                hide_(group, kept[group.name])
            yield

    def prune_(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> list[GroupReport]:
        """Score, choose and cut; in several steps, all but the last only hide what goes."""
        if config.steps == 1 and self.compensation == "none":
            return super().prune_(model, scorer, data, config)
        # One step writes once, at its end, and says itself if it could not: no copies then.
        with kept_aside(self._changing, always=False) if config.steps > 1 else nullcontext():
            kept, ranking = self._hide_in_steps_(model, scorer, data, config)
        with cutting():
            return with_scores(self.cut_(model, kept), ranking)

    @contextmanager
    def rehearsal(
        self,
        model: PreTrainedModel,
        scorer: Scorer,
        data: CalibrationData | None,
        config: PruningConfig,
        scores: Mapping[str, Tensor] | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Let the model compute for a while as it will after `prune_`, steps and compensation included.

        Args:
            model: left as it was.
            scorer: of the config.
            data: calibration samples.
            config: of the run.
            scores: of the first step, where they are known.

        Yields:
            Name of a group -> kept units, sorted int64.
        """
        with kept_aside(self._changing):
            yield self._hide_in_steps_(model, scorer, data, config, scores)[0]

    def _hide_in_steps_(
        self,
        model: PreTrainedModel,
        scorer: Scorer,
        data: CalibrationData | None,
        config: PruningConfig,
        scores: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Score, choose, hide and make up for it, in as many steps as are asked.

        Returns:
            By name of a group, the kept units, and what all were ranked by in the last step.
        """
        kept: dict[str, Tensor] = {}
        ranking: dict[str, Tensor] = {}
        for step in range(1, config.steps + 1):
            found = scores if step == 1 and scores is not None else self.score(model, scorer, data, config)
            chosen = [pool.choose(found, kept or None, step / config.steps) for pool in self.pools]
            ranking = {name: ranks for pool in self.pools for name, ranks in pool.ranking(found, kept or None).items()}
            kept = {name: units for choice in chosen for name, units in choice.items()}
            self._make_up_(model, kept, data, config)
        return kept, ranking

    @property
    def _changing(self) -> list[Tensor]:
        """What hiding and compensation change: weights and biases of the readers."""
        readers = [linear for group in self.groups for linear in group.readers]
        return [tensor for linear in readers for tensor in (linear.weight, linear.bias) if tensor is not None]

    def _make_up_(
        self,
        model: PreTrainedModel,
        kept: Mapping[str, Tensor],
        data: CalibrationData | None,
        config: PruningConfig,
    ) -> None:
        if self.compensation == "none":
            for group in self.groups:
                hide_(group, kept[group.name])
            return
        assert data is not None, "the pipeline loads calibration data for every compensation"
        batches = list(data.even_batches(config.calibration.batch_size))
        notes = compensate_(model, self.groups, kept, batches, self.compensation)
        self.notes.extend(note for note in notes if note not in self.notes)

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
    groups = select(bind(model), config.units or scorer.units, config.include, config.exclude, config.stacks)
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
            pools.append(
                Pool(path, unit, [entries[i] for i in chosen], [sizes[i] for i in chosen], budget, scorer.combine)
            )
            pools[-1].check()
    if config.gamma != "auto" and not gamma:
        raise InvalidConfig(f"gamma={config.gamma} couples MLP and attention, but only one of them is targeted.")
    compensation = resolve_compensation(config, scorer)
    if compensation != "none":
        check_compensation(groups, compensation)
    return Targets(pools, allocation, gamma, config.fraction, groups, compensation)


def resolve_compensation(config: PruningConfig, scorer: Scorer) -> str:
    """Return how what stays makes up for what goes: never `"auto"`."""
    if config.compensation != "auto":
        return config.compensation
    return "least_squares" if config.kind == "structured" and scorer.needs_data else "none"


def _allocation(config: PruningConfig, scorer: Scorer) -> str:
    """Resolve `"auto"`, and refuse a ranking that means nothing for the scorer."""
    allocation = config.allocation
    if allocation == "auto":
        allocation = "gamma" if config.gamma != "auto" else scorer.allocation
    if allocation != "uniform" and scorer.comparable != "model":
        raise InvalidConfig(
            f"allocation={allocation!r} ranks all layers together, but {scorer.name} scores are only comparable inside "
            "one layer: they grow with its inputs, so whole layers would go. Use allocation='uniform'."
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
