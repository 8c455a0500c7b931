"""What patterns share that score whole units or layers: score all, choose by rank, and only then cut."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optimum_prune.calibration.data import CalibrationData
from optimum_prune.config import PruningConfig
from optimum_prune.quantiles import kept_and_removed
from optimum_prune.report import GroupReport
from optimum_prune.scorers.base import Scorer
from optimum_prune.surgery import cutting


class Ranked(Protocol):
    """Units or layers of one kind in one stack, which are ranked together."""

    @property
    def stack(self) -> str:
        """Path of the stack."""
        ...

    @property
    def unit(self) -> str:
        """Kind of unit or layer."""
        ...

    @property
    def sparsity(self) -> float:
        """Fraction that should go."""
        ...

    def choose(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose what is kept, sorted int64, by name."""
        ...

    def ranking(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what all is ranked by, `(num_units,) float32`, by name."""
        ...


@dataclass(frozen=True)
class RankedTargets:
    """What a config targets in a model, and how much of it goes.

    Attributes:
        pools: by stack and kind of unit.
        allocation: the one used; never `"auto"`.
        gamma: path of a stack -> MLP sparsity over attention sparsity, where both are coupled.
        sparsity: fraction asked.
        notes: for the report; one for each kind of unit in a stack of which none goes, and why.
    """

    pools: Sequence[Ranked]
    allocation: str
    gamma: dict[str, float]
    sparsity: float
    notes: list[str] = field(default_factory=list, kw_only=True)

    def note(self, notes: Iterable[str]) -> None:
        """Add to `notes` those that are new."""
        self.notes.extend(note for note in dict.fromkeys(notes) if note not in self.notes)

    def score(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> dict[str, Tensor]:
        """Score whatever may go, by name; larger = keep."""
        raise NotImplementedError

    def cut_(self, model: PreTrainedModel, kept: Mapping[str, Tensor]) -> list[GroupReport]:
        """Cut what is not kept, and make the config truthful."""
        raise NotImplementedError

    def hidden(self, model: PreTrainedModel, kept: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let the model compute for a while as if what is not kept were gone."""
        raise NotImplementedError

    @contextmanager
    def trial(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> Iterator[None]:
        """Score and choose, and let the model compute for a while as if it were pruned."""
        with self.hidden(model, self.choose(self.score(model, scorer, data, config))):
            yield

    def choose(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose what is kept in every pool, sorted int64, by name."""
        return {name: keep for pool in self.pools for name, keep in pool.choose(scores).items()}

    def prune_(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> list[GroupReport]:
        """Score, choose and cut."""
        scores = self.score(model, scorer, data, config)
        kept = self.choose(scores)
        ranking = {name: ranks for pool in self.pools for name, ranks in pool.ranking(scores).items()}
        with cutting():
            return with_scores(self.cut_(model, kept), ranking)

    @property
    def asked(self) -> dict[str, dict[str, float]]:
        """Path of a stack -> kind of unit -> fraction that should go."""
        asked: dict[str, dict[str, float]] = {}
        for pool in self.pools:
            asked.setdefault(pool.stack, {})[pool.unit] = pool.sparsity
        return asked


def difference(unit: str, stack: str, asked: float, achieved: str, reason: str) -> str:
    """Describe that more or less goes than is asked, and why."""
    return f"{unit} of {stack}: asked {asked:.1%}, achieved {achieved}: {reason}."


def with_scores(groups: Sequence[GroupReport], ranking: Mapping[str, Tensor]) -> list[GroupReport]:
    """Add to every group how the scores of what it kept and of what it lost are spread."""
    return [replace(group, scores=_spread(group, ranking[group.name])) for group in groups]


def _spread(group: GroupReport, ranks: Tensor) -> dict[str, list[float]]:
    kept = torch.zeros(len(ranks), dtype=torch.bool, device=ranks.device)
    kept[group.kept] = True
    return kept_and_removed(ranks, kept)
