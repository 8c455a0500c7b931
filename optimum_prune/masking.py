"""Zeros in weights, unstructured and n:m: how many each linear loses, before a score exists; then which."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.biases import add_, complete_, only_for_now, settle_, without
from optimum_prune.binding import BoundGroup, bind, check_patterns, check_prunable, is_targeted, matches, select
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.devices import moved
from optimum_prune.calibration.moments import second_moment
from optimum_prune.config import PruningConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.induction import Base, Gain, induce_, split
from optimum_prune.layerwise import trace, walk
from optimum_prune.masks import global_masks, matrix_mask, n_of_m_mask, removed_of, row_mask
from optimum_prune.modes import frozen
from optimum_prune.quantiles import kept_and_removed
from optimum_prune.report import GroupReport
from optimum_prune.scaling import Candidate
from optimum_prune.scorers.base import Scorer, Statistics
from optimum_prune.scoring import score_weights
from optimum_prune.sizes import describe_, forget_file_
from optimum_prune.surgery import cutting, kept_aside

UNIT = "weight"
DEAD = 0.01
"""Share of an input's columns that are zero on every calibration token, from which on the report warns."""


@dataclass(frozen=True)
class Target:
    """One linear, and the fraction of its weights that should go."""

    name: str
    stack: str
    layer: int
    linear: nn.Linear
    sparsity: float


@dataclass(frozen=True)
class MaskTargets:
    """What a config targets in a model, and how much of it goes.

    Attributes:
        targets: the linears, in the order of the model.
        scope: across which weights the lowest are looked for: `"row"`, `"matrix"` or `"global"`.
        n_of_m: n zeros of every m, where that is the pattern.
        notes: for the report, filled while pruning: fallbacks and doubtful inputs, by module.
        gains: the same, of learned masks.
        scores: the same, of the scores of each linear; see `GroupReport`.
    """

    targets: list[Target]
    scope: str
    n_of_m: tuple[int, int] | None
    notes: list[str] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    scores: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def allocation(self) -> str:
        """The scope, in the words of the report."""
        return "row" if self.n_of_m else self.scope

    @property
    def gamma(self) -> dict[str, float]:
        """Always empty: nothing is coupled."""
        return {}

    @property
    def sparsity(self) -> float:
        """Fraction of all targeted weights that should go."""
        return _fraction(self.targets)

    @property
    def asked(self) -> dict[str, dict[str, float]]:
        """Path of a stack -> `"weight"` -> fraction of its targeted weights that should go."""
        stacks = dict.fromkeys(target.stack for target in self.targets)
        return {stack: {UNIT: _fraction([t for t in self.targets if t.stack == stack])} for stack in stacks}

    def check(self, model: PreTrainedModel) -> None:
        """Refuse weights that cannot be pruned, before anything is touched."""
        names = {target.name for target in self.targets}
        check_prunable(model, [group for group in bind(model) if names & set(group.linear_names)])

    def rehearse_(self, skeleton: PreTrainedModel, config: PruningConfig) -> None:
        """Create all biases that the run may create in the skeleton that the targets were found in."""
        if config.induction is not None and config.induction.allow_bias:
            for target in self.targets:
                add_(target.linear)
            complete_(skeleton)
            describe_(skeleton)

    @torch.no_grad()
    def prune_(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> list[GroupReport]:
        """Zero weights; shapes stay, and the config, unless biases are created."""
        bare = without(model)
        self._prune_weights_(model, scorer, data, config)
        if settle_(model, bare):
            describe_(model)
        forget_file_(model)
        return [_report(target, self.scores.get(target.name)) for target in self.targets]

    @torch.no_grad()
    def _prune_weights_(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> None:
        if scorer.needs_gradients:
            assert data is not None, "the pipeline loads calibration data for every scorer that takes gradients"
            self._by_gradients_(model, scorer, data, config.calibration.batch_size)
        elif scorer.inputs is None and config.induction is None:
            with cutting():
                self._by_weights_(scorer, torch.Generator().manual_seed(config.seed))
        else:
            assert data is not None, "the pipeline loads calibration data for whatever looks at inputs"
            self._by_inputs_(model, scorer, data, config)

    @contextmanager
    def trial(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> Iterator[None]:
        """Prune for a while."""
        linears = [target.linear for target in self.targets]
        # Induction shifts biases too, or creates them.
        parameters = [parameter for linear in linears for parameter in linear.parameters(recurse=False)]
        with kept_aside(parameters), only_for_now(model):
            self._prune_weights_(model, scorer, data, config)
            self.notes.clear()
            self.gains.clear()
            self.scores.clear()
            yield

    def _by_weights_(self, scorer: Scorer, generator: torch.Generator) -> None:
        if self.scope == "global":
            scores = [scorer.score(target.linear.weight, Statistics(generator)) for target in self.targets]
            remove = removed_of(sum(score.numel() for score in scores), self.targets[0].sparsity)
            for target, own, mask in zip(self.targets, scores, global_masks(scores, remove), strict=True):
                self.scores[target.name] = kept_and_removed(own, mask)
                _zero_(target, mask)
            return
        for target in self.targets:
            self._choose_(target, scorer.score(target.linear.weight, Statistics(generator)))

    def _by_gradients_(self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData, batch_size: int) -> None:
        """Choose from gradients of the dense model: nothing is cut before all is chosen."""
        targets = {target.name: target for target in self.targets}
        masks: dict[str, Tensor] = {}

        def choose(name: str, scores: Tensor) -> None:
            if name in targets:
                masks[name] = self._mask(scores, targets[name].sparsity)
                self.scores[name] = kept_and_removed(scores, masks[name])

        groups = [group for group in bind(model) if not targets.keys().isdisjoint(group.linear_names)]
        score_weights(model, groups, scorer, data, batch_size, choose)
        with cutting():
            for name, mask in masks.items():
                _zero_(targets[name], mask)

    def _by_inputs_(self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData, config: PruningConfig) -> None:
        targets = {target.name: target for target in self.targets if target.sparsity > 0}
        linears = {name: target.linear for name, target in targets.items()}
        one = moved(next(data.even_batches(1)), model)
        with frozen(model):
            groups = trace(model, linears, one)
            step = partial(self._step_, targets, scorer)
            if config.induction is not None:
                base = Base(step, partial(self._solve_, targets, scorer) if scorer.solve else None, bool(scorer.inputs))
                candidates = {name: self._candidate(target) for name, target in targets.items()}
                sequences = split(data, config.induction, config.seed)
                with cutting():
                    self.gains[:] = induce_(model, candidates, groups, sequences, base, config.induction, config.seed)
                self.scores.clear()  # what is learned has none
                return
            batches = [moved(batch, model) for batch in data.even_batches(config.calibration.batch_size)]
            with cutting():
                walk(model, linears, batches, groups, step)

    def _step_(
        self, targets: Mapping[str, Target], scorer: Scorer, names: Sequence[str], inputs: Iterator[Tensor]
    ) -> None:
        """Prune the linears that read one input."""
        members = [targets[name] for name in names]
        if scorer.inputs is None:
            for target in members:
                self._choose_(target, scorer.score(target.linear.weight, Statistics(torch.Generator())))
            return
        moment = second_moment(names[0], inputs, full=scorer.inputs == "hessian")
        diagonal = moment.diagonal() if moment.dim() == 2 else moment
        if (dead := (diagonal == 0).float().mean().item()) > DEAD:
            self.notes.append(f"{dead:.1%} of the inputs of {', '.join(names)} are zero on all calibration tokens.")
        if scorer.solve is None:
            statistics = Statistics(torch.Generator(), norm=diagonal.sqrt())
            for target in members:
                self._choose_(target, scorer.score(target.linear.weight, statistics))
            return
        for sparsity in dict.fromkeys(target.sparsity for target in members):
            alike = [target for target in members if target.sparsity == sparsity]
            solved, note = scorer.solve([t.linear.weight for t in alike], moment, sparsity, self.n_of_m)
            for target, weight in zip(alike, solved, strict=True):
                target.linear.weight.copy_(weight)
            if note:
                self.notes.append(f"{', '.join(t.name for t in alike)}: {note}")

    def _solve_(
        self,
        targets: Mapping[str, Target],
        scorer: Scorer,
        names: Sequence[str],
        inputs: Iterator[Tensor],
        masks: Mapping[str, Tensor],
    ) -> None:
        """Prune the linears that read one input, with given masks."""
        assert scorer.solve_masked is not None, "the config refuses other scorers"
        weights = [targets[name].linear.weight for name in names]
        moment = second_moment(names[0], inputs, full=True)
        for weight, solved in zip(
            weights, scorer.solve_masked(weights, moment, [masks[n] for n in names]), strict=True
        ):
            weight.copy_(solved)

    def _choose_(self, target: Target, scores: Tensor) -> None:
        """Zero the lowest."""
        mask = self._mask(scores, target.sparsity)
        self.scores[target.name] = kept_and_removed(scores, mask)
        _zero_(target, mask)

    def _candidate(self, target: Target) -> Candidate:
        weight = target.linear.weight
        pool = self.n_of_m[1] if self.n_of_m else weight.shape[1] if self.scope == "row" else weight.numel()
        return Candidate(
            f"{target.stack}.{target.layer}", target.linear, partial(self._mask, sparsity=target.sparsity), pool
        )

    def _mask(self, scores: Tensor, sparsity: float) -> Tensor:
        if self.n_of_m:
            return n_of_m_mask(scores, *self.n_of_m)
        if self.scope == "row":
            return row_mask(scores, removed_of(scores.shape[1], sparsity))
        return matrix_mask(scores, removed_of(scores.numel(), sparsity))


def find_mask_targets(model: PreTrainedModel, config: PruningConfig, scorer: Scorer) -> MaskTargets:
    """Find what a config targets, and fix how many weights go. Reads shapes alone, so a skeleton will do.

    Raises:
        PruningError: whatever can be refused before weights and data are looked at.
    """
    groups = select(bind(model), names=config.stacks)
    names = [name for group in groups for name in group.linear_names]
    shares = _shares(config)
    check_patterns([*(config.include or ()), *(config.exclude or ()), *shares], names, _example_names(groups))
    n_of_m = config.n_of_m
    targets = [
        Target(name, group.stack, group.layer, linear, found)
        for group in groups
        for name, linear in zip(group.linear_names, group.linears, strict=True)
        if is_targeted([name], config.include, config.exclude) and (found := _share(name, shares)) is not None
    ]
    if not targets:
        raise InvalidConfig(
            f"Nothing is left to prune: stacks={config.stacks}, include={config.include}, exclude={config.exclude} "
            f"leave none of {len(names)} linears."
        )
    scope = _scope(config, scorer)
    if n_of_m:
        _check_groups(targets, n_of_m[1])
    else:
        _check_counts(targets, scope)
    return MaskTargets(targets, scope, n_of_m)


def _shares(config: PruningConfig) -> Mapping[str, float]:
    """Return module pattern -> sparsity."""
    if config.n_of_m:
        n, m = config.n_of_m
        return {"*": n / m}
    return config.sparsity if isinstance(config.sparsity, dict) else {"*": float(config.sparsity or 0.0)}


def _share(name: str, shares: Mapping[str, float]) -> float | None:
    """Return the sparsity of a linear, or None where no pattern matches it; it is then left alone."""
    found = {pattern: share for pattern, share in shares.items() if matches(name, pattern)}
    if len({*found.values()}) > 1:
        # No order decides: transformers sorts the keys of config.json, where the mapping is written too.
        raise InvalidConfig(f"sparsity asks several fractions of {name}: {found}. Let the patterns not overlap.")
    return next(iter(found.values()), None)


def _example_names(groups: Sequence[BoundGroup]) -> list[str]:
    return [name.replace(".0.", ".*.") for group in groups if group.layer == 0 for name in group.linear_names]


def _scope(config: PruningConfig, scorer: Scorer) -> str:
    """Resolve `"auto"`, and refuse a ranking that means nothing for the scorer."""
    if config.allocation == "auto":
        return scorer.scope
    if config.allocation not in (possible := _scopes(scorer)):
        raise InvalidConfig(
            f"allocation={config.allocation!r} is not possible with {scorer.name}, which chooses inside of one "
            f"{' or '.join(possible)}; possible: {', '.join(map(repr, ['auto', *possible]))}."
        )
    if config.allocation == "global" and isinstance(config.sparsity, Mapping):
        raise InvalidConfig("allocation='global' has one sparsity for all; sparsity must be a number, not a mapping.")
    return config.allocation


def _scopes(scorer: Scorer) -> list[str]:
    """Return the allocations that mean something for a scorer."""
    if scorer.solve is not None:
        return [scorer.scope]
    if scorer.comparable == "model" and not scorer.needs_data:  # inputs are known one linear at a time
        return ["row", "matrix", "global"]
    return ["row"] if scorer.comparable == "row" else ["row", "matrix"]


def _check_groups(targets: Sequence[Target], m: int) -> None:
    for target in targets:
        columns = target.linear.weight.shape[1]
        if columns % m:
            raise InvalidConfig(
                f"{target.name} has {columns} inputs, which do not fall into groups of {m}. Leave it out with exclude, "
                "or choose another n:m."
            )


def _check_counts(targets: Sequence[Target], scope: str) -> None:
    """Refuse a sparsity of which rounding leaves nothing."""
    total = sum(target.linear.weight.numel() for target in targets)
    for target in targets:
        rows, columns = target.linear.weight.shape
        ranked = {"row": columns, "matrix": rows * columns, "global": total}[scope]
        if target.sparsity > 0 and removed_of(ranked, target.sparsity) == 0:
            raise InvalidConfig(
                f"{target.name}: a sparsity of {target.sparsity:.4g} removes none of {ranked} weights that are ranked "
                f"together; one is {1 / ranked:.3g}. Raise the sparsity, or exclude it."
            )


def _fraction(targets: Sequence[Target]) -> float:
    if len(shares := {target.sparsity for target in targets}) == 1:
        return shares.pop()  # to the last digit
    total = sum(target.linear.weight.numel() for target in targets)
    return sum(target.sparsity * target.linear.weight.numel() for target in targets) / total


def _zero_(target: Target, mask: Tensor) -> None:
    # A product leaves -0.0, which adding 0 turns into 0. Choosing by `where` takes four times as long on random masks.
    target.linear.weight.mul_(mask).add_(0)


def _report(target: Target, scores: dict[str, list[float]] | None) -> GroupReport:
    total, left = target.linear.weight.numel(), int(target.linear.weight.count_nonzero())
    return GroupReport(target.name, target.stack, target.layer, UNIT, total, left, [], total, left, scores)
