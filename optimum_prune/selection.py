"""The choice of the calibration batch after which a pruned model stays nearest to the dense one.

NIRVANA (Ai et al. 2025, arXiv 2509.14230) draws several batches, prunes with each, and keeps the one with the lowest
`KL(dense || pruned)` on held-out text. Nothing is cut for it: what would go is hidden for a while.
"""

import math
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.calibration.data import CalibrationData
from optimum_prune.config import CalibrationConfig, PruningConfig
from optimum_prune.errors import CalibrationError, UnsupportedModel
from optimum_prune.evaluation import dense_reference, evaluate_model
from optimum_prune.scorers.base import Scorer

HELD_OUT = 128 * 64
"""Tokens that are held out for the KL, where samples are as long as they may be."""


class Triable(Protocol):
    """What can be pruned on trial."""

    def trial(
        self, model: PreTrainedModel, scorer: Scorer, data: CalibrationData | None, config: PruningConfig
    ) -> AbstractContextManager[None]:
        """Let the model compute for a while as if it were pruned."""
        ...


@dataclass(frozen=True)
class Selection:
    """What the choice was made of.

    Attributes:
        kl: in nats per token, of each candidate.
        chosen: index of the lowest.
        tokens: of the samples that were held out for it.
        seconds: that it took.
    """

    kl: list[float]
    chosen: int
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def widened(config: CalibrationConfig, seq_len: int) -> CalibrationConfig:
    """Return the config that asks for all candidates and the held-out samples at once, so that they are disjoint."""
    return replace(config, num_samples=config.num_samples * config.candidates + _held_out(seq_len))


def select(
    model: PreTrainedModel, targets: Triable, scorer: Scorer, config: PruningConfig, drawn: CalibrationData
) -> tuple[CalibrationData, Selection]:
    """Prune on trial with each candidate, and choose.

    Args:
        model: left as it was.
        targets: of the config in the model.
        scorer: of the config.
        config: its `calibration` says how many candidates of how many samples there are.
        drawn: what `widened` asks for.

    Returns:
        The chosen samples, and how they were chosen.

    Raises:
        CalibrationError: the source gave too few samples.
        UnsupportedModel: the KL of this model cannot be measured.
    """
    start = time.perf_counter()
    size, candidates = config.calibration.num_samples, config.calibration.candidates
    needed = size * candidates + _held_out(drawn.seq_len)
    if len(drawn.samples) < needed:
        raise CalibrationError(
            f"selection='kl' needs {needed} samples ({candidates} candidates of {size}, the rest held out); "
            f"{drawn.source} gives only {len(drawn.samples)}. Lower candidates, num_samples or seq_len, or leave "
            "selection out."
        )
    held_out = drawn.part(range(size * candidates, needed))
    batch_size = config.calibration.batch_size
    reference = dense_reference(model, held_out, batch_size=batch_size)
    if reference is None:
        raise UnsupportedModel(
            f"selection='kl' cannot measure the KL of {type(model).__name__}, whose logits are not what its output "
            "embedding returns. Use selection='none'."
        )
    batches = [drawn.part(range(i * size, (i + 1) * size)) for i in range(candidates)]
    found = []
    for batch in tqdm(batches, desc="Selection", unit="candidate"):
        with targets.trial(model, scorer, batch, config):
            measured = evaluate_model(model, held_out, batch_size=batch_size, reference=reference)
        assert measured.kl is not None, "there is a reference"
        found.append(measured.kl)
    chosen = min(range(candidates), key=lambda i: (math.isnan(found[i]), found[i]))
    return batches[chosen], Selection(found, chosen, held_out.tokens, time.perf_counter() - start)


def _held_out(seq_len: int) -> int:
    return math.ceil(HELD_OUT / seq_len)
