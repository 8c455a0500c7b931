"""What a model is trained on: features of single samples, and the batches that are made of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from optimum_prune.calibration.passages import passages
from optimum_prune.calibration.samples import padded
from optimum_prune.objectives import IGNORED

Features = dict[str, Tensor]
"""One sample without padding: `input_ids (T,) int64`; `labels`, `(T,) int64` of a decoder, or `(U,) int64` of the
decoder of an encoder-decoder; and `pixel_values (n, C, H, W) float32` where there are images."""


@dataclass(frozen=True)
class TrainingData:
    """Samples to train on, and others to choose the best step by.

    Attributes:
        train: features of single samples. Labels of decoders stand beside the tokens that they repeat, since
            transformers' loss moves them itself; they are `IGNORED` where nothing is asked.
        held_out: the same; no sample of these is in `train`.
        sources: each with its `source`, its `share`, and what of it is trained on, in plain JSON types.
        pad_token_id: fills up `input_ids`, on the right.
        start: the token that an encoder-decoder's decoder begins with; None for decoders.
    """

    train: list[Features]
    held_out: list[Features]
    sources: list[dict[str, Any]]
    pad_token_id: int
    start: int | None = None

    def collate(self, features: Sequence[Features]) -> dict[str, Tensor]:
        """Make a batch of samples.

        Returns:
            `input_ids` and `attention_mask`, `(B, T) int64`, padded on the right, and `labels`, `(B, T) int64`. For an
            encoder-decoder `labels (B, U)` and also `decoder_input_ids (B, U) int64`, the labels moved one to the right
            behind `start`, as the model itself makes them. With images also `pixel_values`, `(sum of n, C, H, W)
            float32`.
        """
        batch = padded([sample["input_ids"] for sample in features], self.pad_token_id)
        labels = [sample["labels"] for sample in features]
        batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        if self.start is not None:
            before = batch["labels"].roll(1, dims=1)
            before[:, 0] = self.start
            batch["decoder_input_ids"] = before.masked_fill(before == IGNORED, self.pad_token_id)
        if images := [sample["pixel_values"] for sample in features if "pixel_values" in sample]:
            batch["pixel_values"] = torch.cat(images)
        return batch

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all samples, in their order, and of which are held out."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(len(part).to_bytes(8, "little"))
            for sample in part:
                digest.update(sample_digest(sample))
        return f"sha256:{digest.hexdigest()}"

    def to_dict(self) -> dict[str, Any]:
        """Describe the data in plain JSON types, without the samples; counts are of those trained on."""
        return {
            "sources": self.sources,
            **counts(self.train),
            "held_out": len(self.held_out),
            "fingerprint": self.fingerprint,
            "passages": passages(map(self._row, [*self.train, *self.held_out])),
        }

    def _row(self, sample: Features) -> tuple[Tensor, ...]:
        """Return what `CalibrationData.rows` has of the same sample."""
        names = ("input_ids", "pixel_values") if self.start is None else ("input_ids", "labels")
        return tuple(sample[name] for name in names if name in sample)


def counts(samples: Sequence[Features]) -> dict[str, int]:
    """Count samples, the tokens that they hold, and those that are trained on."""
    return {
        "samples": len(samples),
        "tokens": sum(len(sample["input_ids"]) for sample in samples),
        "trained_tokens": sum(int((sample["labels"] != IGNORED).sum()) for sample in samples),
    }


def sample_digest(sample: Features) -> bytes:
    """Hash what a sample holds, and where one feature ends and the next begins: the same on every machine."""
    digest = hashlib.sha256()
    for name in sorted(sample):
        tensor = sample[name]
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().astype("<f4" if tensor.is_floating_point() else "<i8").tobytes())
    return digest.digest()
