"""What the training makes small, of a live model and a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optimum_prune.calibration.devices import moved
from optimum_prune.modes import evaluating
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.losses import cross_entropy, divergence, predicting
from optimum_prune.recovery.report import Losses
from optimum_prune.recovery.teacher import SAMPLE, Teacher

Collate = Callable[[list[Any]], dict[str, Tensor]]


@dataclass(frozen=True)
class Sums:
    """Losses of a batch, summed over its predicted tokens; `kl` is None where no teacher is asked."""

    lm: Tensor
    kl: Tensor | None
    tokens: int


@dataclass(frozen=True)
class Objective:
    """A mix of cross-entropy and distance to the teacher.

    Attributes:
        kl_weight: share of the distance.
        teacher: the dense model; None where it has no share.
        shifted: whether a position predicts the label of the next one, as in decoders.
    """

    kl_weight: float
    teacher: Teacher | None
    shifted: bool

    @classmethod
    def of(cls, config: RecoveryConfig, model: PreTrainedModel, teacher: Teacher | None) -> "Objective":
        """Read the objective off a config."""
        weight = {"lm": 0.0, "kl": 1.0, "mix": config.kl_weight}[config.loss]
        return cls(weight, teacher, shifted=not model.config.is_encoder_decoder)

    def sums(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sums:
        """Run a batch through a model."""
        inputs = {name: values for name, values in batch.items() if name not in (SAMPLE, "labels")}
        logits = model(**inputs, use_cache=False).logits
        rows, wanted = predicting(logits, batch["labels"].to(logits.device), shifted=self.shifted)
        log_q = rows.log_softmax(dim=-1)
        kl = None if self.teacher is None else divergence(log_q, self.teacher(batch).to(log_q.device))
        return Sums(cross_entropy(log_q, wanted), kl, len(wanted))

    def mix(self, lm: Any, kl: Any) -> Any:
        """Return the trained loss of its two parts, sums or means."""
        return lm if kl is None else (1 - self.kl_weight) * lm + self.kl_weight * kl

    def of_losses(self, losses: Losses) -> float:
        """Return the trained loss of what was measured."""
        return self.mix(losses.lm, losses.kl)

    @torch.no_grad()
    def measure(self, model: Any, samples: Sequence[Any], collate: Collate, batch_size: int) -> Losses:
        """Return the mean losses of the predicted tokens of some samples; batches change them by rounding alone."""
        lm, kl, tokens = 0.0, None, 0
        with evaluating(model):
            for first in range(0, len(samples), batch_size):
                batch = moved(collate(list(samples[first : first + batch_size])), model)
                sums = self.sums(model, batch)
                lm, tokens = lm + sums.lm.item(), tokens + sums.tokens
                kl = kl if sums.kl is None else (kl or 0.0) + sums.kl.item()
        return Losses(lm / tokens, None if kl is None else max(kl / tokens, 0.0))  # less is rounding
