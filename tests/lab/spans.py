"""Text for encoder-decoders, which fill in spans that were cut out (Raffel et al., 2020, arXiv:1910.10683, 3.1.4)."""

import math
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.lab import text
from tests.lab.measure import unigram_loss

BATCH = 8
SENTINELS = 32


class Noise(NamedTuple):
    """How much is cut out: a fraction of the tokens, in spans of a mean length in tokens."""

    cut: float
    span: float


FINAL = Noise(0.15, 3)
STAGES = {0.4: Noise(0.5, 64), 0.7: Noise(0.5, 6), 1.0: FINAL}
"""Fraction of the training done -> noise until then.

FINAL alone gives a fifth of the targets per step, and on so little training hardly beats token frequencies.
"""


def corrupt(
    ids: Tensor, sentinels: list[int], eos: int, generator: torch.Generator, noise: Noise = FINAL
) -> tuple[Tensor, Tensor]:
    """Cut spans out of a window. All windows of one length give inputs of one length and targets of one length.

    Args:
        ids: `(T,) int64`.
        sentinels: ids of the tokens that stand for the first span, the second, and so on; one more than spans.
        eos: id of the token that ends both sequences.
        generator: draws the spans, of which no two touch.
        noise: how much is cut out.

    Returns:
        The inputs, where a sentinel stands in for each span, and the targets, where each span follows its sentinel
        and one more sentinel follows the last span.
    """
    cut = max(1, round(len(ids) * noise.cut))
    count = max(1, round(cut / noise.span))
    first, *between, last = _parts(len(ids) - cut + 2, count + 1, generator)
    kept = [first - 1, *between, last - 1]  # a span may begin the window, and one may end it
    spans = [*_parts(cut, count, generator), 0]
    pieces = ids.split(list(chain.from_iterable(zip(kept, spans, strict=True))))
    marks, end = torch.tensor(sentinels)[: count + 1].split(1), torch.tensor([eos])
    inputs = chain.from_iterable(zip(pieces[::2], [*marks[:-1], end], strict=True))
    targets = chain.from_iterable(zip(marks, [*pieces[1:-1:2], end], strict=True))
    return torch.cat(list(inputs)), torch.cat(list(targets))


def _parts(total: int, count: int, generator: torch.Generator) -> list[int]:
    """Divide a number at random into `count` positive ones."""
    cuts = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([total])]).diff().tolist()


class Spans:
    """Windows of text with spans cut out.

    Attributes:
        processor: the tokenizer, which has `SENTINELS` sentinels.
    """

    calibration = staticmethod(text.training)
    evaluation = staticmethod(text.evaluation)

    def __init__(self):
        self.processor: Any = text.train_tokenizer(text.training(), SENTINELS)
        self.sentinels = [self.processor.convert_tokens_to_ids(f"<extra_id_{i}>") for i in range(SENTINELS)]
        self.known = text.stream(text.training(), self.processor)
        self.new = text.windows(text.stream(text.evaluation(), self.processor))

    def batch(self, generator: torch.Generator, done: float) -> dict[str, Tensor]:
        """Draw `input_ids (BATCH, T) int64` and `labels (BATCH, T') int64`, none of them padded."""
        noise = next(noise for until, noise in STAGES.items() if done < until)
        return self._corrupted(text.random_windows(self.known, BATCH, generator), generator, noise)

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, float]:
        """Return the loss on the other texts, and that of token frequencies.

        Both are over the tokens that were cut out. Whether a span ends is no question here: the model's probabilities
        are those without sentinels and ends.
        """
        batch = self._corrupted(self.new, torch.Generator().manual_seed(0), FINAL)
        pairs = zip(batch["input_ids"].split(BATCH), batch["labels"].split(BATCH), strict=True)
        logits = torch.cat([model(input_ids=inputs, labels=labels).logits for inputs, labels in pairs])
        marks = torch.tensor([*self.sentinels, self.processor.eos_token_id])
        is_cut = ~torch.isin(batch["labels"], marks)
        targets = batch["labels"][is_cut]
        return {
            "held-out loss": cross_entropy(logits.index_fill(-1, marks, -math.inf)[is_cut], targets).item(),
            "unigram loss": unigram_loss(self.known, targets, len(self.processor)),
        }

    def _corrupted(self, windows: Tensor, generator: torch.Generator, noise: Noise) -> dict[str, Tensor]:
        end = self.processor.eos_token_id
        pairs = [corrupt(ids, self.sentinels, end, generator, noise) for ids in windows]
        inputs, targets = zip(*pairs, strict=True)
        return {"input_ids": torch.stack(inputs), "labels": torch.stack(targets)}
