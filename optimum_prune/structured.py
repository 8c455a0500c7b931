"""Structured pruning: which units may go, and how many, before a score exists; then which."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optimum_prune.allocation import FLOOR, Size, budgets, can_go, gamma_auto
from optimum_prune.binding import BoundGroup, bind, check_prunable, select
from optimum_prune.bounds import spared
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.config import PruningConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.pools import Pool, nothing_goes, untouched
from optimum_prune.ranked import RankedTargets, with_scores
from optimum_prune.refit import check_compensation, compensate_
from optimum_prune.report import GroupReport
from optimum_prune.scorers.base import Scorer
from optimum_prune.scoring import score_groups
from optimum_prune.sizes import describe_, measure
from optimum_prune.surgery import cutting, hide_, kept_aside, slice_


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

    def choose(
        self, scores: Mapping[str, Tensor], left: Mapping[str, Tensor] | None = None, share: float = 1.0
    ) -> dict[str, Tensor]:
        """Choose the kept units of every group; see `Pool.choose`.

        Raises:
            InvalidConfig: nothing at all goes, since rounding spares it.
        """
        kept = {name: units for pool in self.pools for name, units in pool.choose(scores, left, share).items()}
        if share == 1 and self.sparsity > 0:
            whole = [pool for pool in self.pools if pool.is_whole(kept)]
            by_rounding = [pool for pool in whole if pool.why_none is None]
            if by_rounding and len(whole) == len(self.pools):
                raise InvalidConfig(
                    f"{by_rounding[0].unit}: {spared(by_rounding[0].budget)}. Lower round_to or raise the sparsity."
                )
            self.note(untouched(pool, spared(pool.budget)) for pool in by_rounding)
        return kept

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
            ranking = {name: ranks for pool in self.pools for name, ranks in pool.ranking(found, kept or None).items()}
            kept = self.choose(found, kept or None, step / config.steps)
            self._make_up_(model, kept, data, config)
        return kept, ranking

    def rehearse_(self, skeleton: PreTrainedModel, config: PruningConfig) -> None:
        """Cut the skeleton that the targets were found in, by scores that mean nothing: about as much goes."""
        kept: dict[str, Tensor] = {}
        for pool in self.pools:
            groups = [group for entry in pool.entries for group in entry]
            scores = {
                group.name: torch.arange(group.num_units, dtype=torch.float32, device="cpu") + group.layer
                for group in groups
            }
            kept |= replace(pool, combine=None).choose(scores)
        self.cut_(skeleton, kept)

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
        self.note(compensate_(model, self.groups, kept, batches, self.compensation))

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
    both_targeted = False
    for path in dict.fromkeys(group.stack for group in groups):
        entries = _entries([group for group in groups if group.stack == path])
        sizes = [_size(entry) for entry in entries]
        both_targeted |= {size.unit for size in sizes} == FLOOR.keys()
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
    if config.gamma != "auto" and not both_targeted:
        raise InvalidConfig(f"gamma={config.gamma} couples MLP and attention, but only one of them is targeted.")
    if config.fraction > 0 and all(pool.why_none for pool in pools):
        raise nothing_goes(pools, ranks_all=scorer.comparable == "model")
    compensation = resolve_compensation(config, scorer)
    if compensation != "none":
        check_compensation(groups, compensation)
    notes = [untouched(pool, reason) for pool in pools if (reason := pool.why_none)]
    return Targets(pools, allocation, gamma, config.fraction, groups, compensation, notes=notes)


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
    """Return gamma of one stack; None where only one kind of unit is targeted there, or can go."""
    kinds = {unit: [size for size in sizes if size.unit == unit] for unit in FLOOR}
    if not all(map(can_go, kinds.values())):
        return None
    weights = {unit: sum(size.weights for size in members) for unit, members in kinds.items()}
    if config.gamma != "auto":
        return float(config.gamma)
    heads = [group.counts().values() for entry in entries for group in entry if group.unit == "kv_group"]
    queries_per_group = max(max(counts) // min(counts) for counts in heads)
    return gamma_auto(weights["kv_group"], weights["mlp_channel"], queries_per_group)
