"""The dense model as a teacher: it runs along, or its largest logits are kept from one pass before training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.calibration.devices import input_device, is_spread, moved
from optimum_prune.modes import evaluating
from optimum_prune.objectives import IGNORED
from optimum_prune.recovery.losses import Prediction, joined, largest, predicting

SAMPLE = "sample"
"""Key in a batch: which samples of the data its rows are, `(B,) int64`."""
Teacher = Callable[[Mapping[str, Tensor]], Prediction]
"""A batch with `labels` and `SAMPLE` -> what the dense model predicts where the labels ask, on the batch's device."""


def indexed(samples: Sequence[dict[str, Tensor]], first: int = 0) -> list[dict[str, Tensor]]:
    """Number samples, so that a teacher knows them again."""
    return [sample | {SAMPLE: torch.tensor(first + index, device="cpu")} for index, sample in enumerate(samples)]


def collating(collate: Callable[[list[Any]], dict[str, Tensor]], *, shifted: bool) -> Callable[[list[Any]], Any]:
    """Make batches of numbered samples.

    Args:
        collate: makes a batch of features.
        shifted: as of `predicting`: the first label of a row is predicted by nothing then, and is not to be counted.
    """

    def batch(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        numbers = torch.stack([sample[SAMPLE] for sample in samples])
        made = collate([{name: values for name, values in sample.items() if name != SAMPLE} for sample in samples])
        if shifted:
            made["labels"][:, 0] = IGNORED
        return made | {SAMPLE: numbers}

    return batch


def beside(dense: PreTrainedModel, model: PreTrainedModel, device: str | None = None) -> PreTrainedModel:
    """Put a dense model on a device, that of another model by default; one that is spread over several stays."""
    return dense if is_spread(dense) else dense.to(device or input_device(model))  # pyright: ignore[reportArgumentType]


class LiveTeacher:
    """A dense model that reads every batch too; exact, and as much memory again."""

    def __init__(self, dense: PreTrainedModel):
        self.dense = dense

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> Prediction:
        """Predict the labels of a batch."""
        with evaluating(self.dense):
            inputs = {name: values for name, values in batch.items() if name not in (SAMPLE, "labels")}
            logits = self.dense(**moved(inputs, self.dense), use_cache=False).logits
        labels = batch["labels"]
        shifted = not self.dense.config.is_encoder_decoder
        rows, _ = predicting(logits, labels.to(logits.device), shifted=shifted)
        return Prediction(rows.log_softmax(dim=-1).to(labels.device))


class CachedTeacher:
    """The `k` largest log-probabilities of every predicted token; the dense model is not needed any more.

    12 bytes for each of them: 100,000 tokens with k = 64 take 77 MB.
    """

    def __init__(self, predictions: Sequence[Prediction]):
        self._predictions = predictions

    @classmethod
    def ask(cls, teacher: LiveTeacher, samples: Sequence[Any], collate: Callable[..., Any], k: int) -> "CachedTeacher":
        """Let a teacher read all samples once.

        Args:
            teacher: asked.
            samples: features of each, as the training reads them.
            collate: makes a batch of them.
            k: log-probabilities to keep of each token.
        """
        kept = []
        for sample in tqdm(samples, desc="Dense model", unit="sample"):
            batch = moved(collate([sample]), teacher.dense)  # whole vocabularies stay where they are
            kept.append(largest(teacher(batch).log_probs, k).to("cpu"))
        return cls(kept)

    def __call__(self, batch: Mapping[str, Tensor]) -> Prediction:
        """Look up what was predicted for the samples of a batch."""
        return joined([self._predictions[index] for index in batch[SAMPLE].tolist()]).to(batch["labels"].device)
