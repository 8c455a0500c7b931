"""Calibration samples: what they are, and how a config gets them."""

import hashlib
import heapq
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from optimum_prune.calibration.self_sampling import draw_samples
from optimum_prune.calibration.sources import open_source
from optimum_prune.calibration.tokens import token_lists, vocabulary_size, windows
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError

logger = logging.getLogger(__name__)

DEFAULT_SEQ_LEN = 2048  # a context of 131,072 must not be taken literally


@dataclass(frozen=True)
class CalibrationData:
    """Samples of token ids, in the order in which they are used.

    Attributes:
        samples: `(T_i,) int64` on the CPU, `1 <= T_i <= seq_len`, no padding.
        seq_len: the longest that a sample may be.
        source: where they come from, in words.
        texts: how many texts were read for them; None where the source is not text.
    """

    samples: list[Tensor]
    seq_len: int
    source: str
    texts: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all samples together."""
        return sum(map(len, self.samples))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the token ids and of where one sample ends and the next begins."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(len(sample).to_bytes(8, "little"))
            digest.update(sample.numpy().astype("<i8").tobytes())
        return f"sha256:{digest.hexdigest()}"

    def batches(self, batch_size: int, pad_token_id: int) -> Iterator[dict[str, Tensor]]:
        """Yield `input_ids` and `attention_mask`, `(B, T) int64`, padded on the right; samples in order."""
        for start in range(0, len(self.samples), batch_size):
            batch = self.samples[start : start + batch_size]
            ones = [torch.ones_like(sample) for sample in batch]
            yield {
                "input_ids": pad_sequence(batch, batch_first=True, padding_value=pad_token_id),
                "attention_mask": pad_sequence(ones, batch_first=True),
            }

    def to_dict(self) -> dict[str, Any]:
        """Describe the samples in plain JSON types, without the samples."""
        return {
            "source": self.source,
            "samples": len(self.samples),
            "tokens": self.tokens,
            "seq_len": self.seq_len,
            "fingerprint": self.fingerprint,
        }


def load_samples(
    config: CalibrationConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    default_seq_len: int | None = None,
    order: Literal["random", "first"] = "random",
) -> CalibrationData:
    """Get the samples that a config asks for.

    Texts are joined and cut into windows of `seq_len` tokens; the short window that is left over is used only
    where the full ones are fewer than `num_samples`. Token lists are samples as they are, cut to `seq_len`.

    Args:
        config: what to read, and how much of it.
        model: knows the token ids and the longest context; generates the samples where the source is "self".
        tokenizer: needed for texts.
        default_seq_len: stands in for a `config.seq_len` of None; the model's longest context limits it.
        order: "random" draws without replacement, seeded, and tokenises the whole source for it; "first"
            takes the first ones and reads no further than it must.

    Raises:
        CalibrationError: the source cannot be read, has nothing usable in it, or does not fit the model.
    """
    seq_len = _seq_len(config, model, default_seq_len)
    seen: Counter[str] = Counter()
    if config.source == "self":
        samples = draw_samples(model, tokenizer, config, seq_len)
    else:
        source = open_source(config)
        packed, vocab_size = source.kind == "texts", vocabulary_size(model)
        if packed:
            candidates = windows(source.items, tokenizer, seq_len, vocab_size, seen)
        else:
            candidates = token_lists(source.items, seq_len, vocab_size, seen)
        if order == "first":
            chosen = islice(candidates, config.num_samples)
        else:
            # The head of a random permutation, of which no more than this head is ever held. The short window
            # that is left over from packing sorts behind all others.
            draw = random.Random(config.seed).random
            chosen = heapq.nsmallest(
                config.num_samples, candidates, key=lambda s: (packed and len(s) < seq_len, draw())
            )
        # A view would hold the whole chunk that it was cut from.
        samples = [sample.clone() for sample in chosen]
    source = config.to_dict()["source"]
    if os.path.exists(source):  # absolute: after a change of directory a relative path would look like a Hub id
        source = os.path.abspath(source)
    data = CalibrationData(samples, seq_len, source, seen["texts"] or None)
    _report(data, config.num_samples, seen)
    return data


def _seq_len(config: CalibrationConfig, model: PreTrainedModel, default: int | None) -> int:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if config.seq_len is None:
        return int(min(default or DEFAULT_SEQ_LEN, longest))
    if config.seq_len > longest:
        raise CalibrationError(
            f"seq_len must be at most the model's max_position_embeddings {longest}, got {config.seq_len}."
        )
    return config.seq_len


def _report(data: CalibrationData, num_samples: int, seen: Counter[str]) -> None:
    """Refuse to go on with nothing; say what was used and what was not."""
    if not data.samples:
        left_out = seen["blank"] + seen["empty"]
        raise CalibrationError(f"{data.source} holds no usable tokens ({left_out} empty entries were left out).")
    found = f"{len(data.samples)} samples, {data.tokens} tokens"
    texts = "" if data.texts is None else f" ({data.texts} texts, {seen['blank']} blank ones left out)"
    logger.info("Using %s, from %s%s.", found, data.source, texts)
    if len(data.samples) < num_samples:
        logger.warning("Asked for %d samples; %s gives only %s.", num_samples, data.source, found)
    if seen["long"]:
        logger.warning("%d samples of %s were cut to %d tokens.", seen["long"], data.source, data.seq_len)
    if seen["empty"]:
        logger.warning("%d empty samples of %s were left out.", seen["empty"], data.source)
