"""Text for decoders, which tell each token from those before it."""

from typing import Any

import torch
from torch import Tensor

from tests.lab import text
from tests.lab.measure import mean_loss, unigram_loss

BATCH = 8


class Continuation:
    """Windows of text.

    Attributes:
        processor: the tokenizer.
    """

    calibration = staticmethod(text.training)
    evaluation = staticmethod(text.evaluation)

    def __init__(self):
        self.processor: Any = text.train_tokenizer(text.training())
        self.known = text.stream(text.training(), self.processor)
        self.new = text.windows(text.stream(text.evaluation(), self.processor))

    def batch(self, generator: torch.Generator, done: float) -> dict[str, Tensor]:
        """Draw `input_ids` and `labels`, `(BATCH, WINDOW) int64`.

        One half begins with `BOS`, as what a model generates; the other does not, as windows of longer texts.
        """
        ids = text.random_windows(self.known, BATCH, generator)
        ids[: BATCH // 2, 0] = self.processor.bos_token_id
        return {"input_ids": ids, "labels": ids}

    def measure(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the loss on the other texts, and that of token frequencies."""
        batches = self.new[: len(self.new) // BATCH * BATCH].split(BATCH)
        return {
            "held-out loss": mean_loss(model, ({"input_ids": ids, "labels": ids} for ids in batches)),
            "unigram loss": unigram_loss(self.known, self.new.flatten(), len(self.processor)),
        }
