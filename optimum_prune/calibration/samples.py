"""Calibration samples: what a model reads, and what it should predict."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from optimum_prune.errors import CalibrationError
from optimum_prune.objectives import IGNORED


@dataclass(frozen=True)
class CalibrationData:
    """Samples of token ids, in the order in which they are used.

    Attributes:
        samples: `(T_i,) int64` on the CPU, no padding: what the decoder, or the encoder of an encoder-decoder, reads.
        seq_len: what was asked of a sample's length. It limits texts and token lists; the tokens of images, and the
            sentinels of span corruption, come on top.
        source: where they come from, in words.
        texts: how many texts were read for them; None where the source is not text.
        targets: `(U_i,) int64`, what an encoder-decoder should answer to each sample; None for decoders.
        images: `(n_i, C, H, W) float32`, pixel values of each sample; None where there are none.
        start: the token that an encoder-decoder's decoder begins with.
        image_token: the token that stands for a patch of an image in `samples`.
        task: what is asked of the model where that is more than the next token, in words.
        split: of the source, where it has any.
        first_rows: rows at the start of a stream that the samples were drawn from, where it has more rows.
        begins_with: the BOS token in words, where every sample is a window that begins with it; else None.
    """

    samples: list[Tensor]
    seq_len: int
    source: str
    texts: int | None = None
    targets: list[Tensor] | None = None
    images: list[Tensor] | None = None
    start: int | None = None
    image_token: int | None = None
    task: str | None = None
    split: str | None = None
    first_rows: int | None = None
    begins_with: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all samples and targets together."""
        return sum(map(len, [*self.samples, *(self.targets or [])]))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the token ids, the pixels, and of where one sample ends and the next begins."""
        digest = hashlib.sha256()

        def add(rows: list[Tensor], kind: str) -> None:
            for row in rows:
                for size in row.shape:
                    digest.update(size.to_bytes(8, "little"))
                digest.update(row.numpy().astype(kind).tobytes())

        add(self.samples, "<i8")
        if self.targets is not None:
            digest.update(b"targets")
            add(self.targets, "<i8")
        if self.images is not None:
            digest.update(b"images")
            add(self.images, "<f4")
        return f"sha256:{digest.hexdigest()}"

    def batches(self, batch_size: int, pad_token_id: int) -> Iterator[dict[str, Tensor]]:
        """Yield what the model's forward takes; samples in order, padded on the right.

        Yields:
            `input_ids` and `attention_mask`, `(B, T) int64`. With targets also `decoder_input_ids` and
            `decoder_attention_mask`, `(B, U) int64`: the targets, moved one to the right behind `start`. With images
            also `pixel_values`, `(sum of n_i, C, H, W) float32`.
        """
        for first in range(0, len(self.samples), batch_size):
            rows = slice(first, first + batch_size)
            batch = padded(self.samples[rows], pad_token_id)
            if self.targets is not None:
                begin = torch.tensor([self.start], device="cpu")
                shifted = [torch.cat([begin, target[:-1]]) for target in self.targets[rows]]
                batch |= {f"decoder_{name}": ids for name, ids in padded(shifted, pad_token_id).items()}
            if self.images is not None:
                batch["pixel_values"] = torch.cat(self.images[rows])
            yield batch

    def even_batches(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield batches of samples of equal shape, so that nothing is padded; shapes in order of their first sample."""
        alike: dict[object, list[int]] = {}
        for i in range(len(self.samples)):
            rows = [kind[i] for kind in (self.samples, self.targets, self.images) if kind is not None]
            alike.setdefault(tuple(row.shape for row in rows), []).append(i)
        for indices in alike.values():
            yield from self.part(indices).batches(batch_size, pad_token_id=0)

    def part(self, indices: Iterable[int]) -> "CalibrationData":
        """Return some of the samples, in the order given."""
        chosen = list(indices)
        return replace(
            self,
            samples=[self.samples[i] for i in chosen],
            targets=self.targets and [self.targets[i] for i in chosen],
            images=self.images and [self.images[i] for i in chosen],
        )

    def predicted(self, index: int) -> tuple[Tensor, Tensor]:
        """Say which positions of the model's output predict which tokens.

        Args:
            index: of a sample.

        Returns:
            Positions `(P,) int64` in the output sequence of this sample, and the token `(P,) int64` that each should
            predict. Patches of images are predicted by none.
        """
        if self.targets is not None:
            target = self.targets[index]
            return torch.arange(len(target), device="cpu"), target
        labels = self.samples[index][1:]
        positions = torch.arange(len(labels), device="cpu")
        if self.image_token is None:
            return positions, labels
        words = labels != self.image_token
        return positions[words], labels[words]

    def check_predicts(self) -> None:
        """Refuse samples in which no token is predicted.

        Raises:
            CalibrationError: there is no such token.
        """
        if not any(len(self.predicted(index)[1]) for index in range(len(self.samples))):
            raise no_second_token(self.source, self.seq_len)

    def labels(self, batch_size: int) -> Iterator[Tensor]:
        """Yield what each position of the output should predict, `(B, T) int64` or `IGNORED`; goes with `batches`."""
        lengths = [len(row) for row in (self.samples if self.targets is None else self.targets)]
        for first in range(0, len(lengths), batch_size):
            rows = range(first, min(first + batch_size, len(lengths)))
            labels = torch.full((len(rows), max(lengths[row] for row in rows)), IGNORED, device="cpu")
            for row in rows:
                positions, wanted = self.predicted(row)
                labels[row - first, positions] = wanted
            yield labels

    @property
    def origin(self) -> dict[str, Any]:
        """Where the samples come from, in plain JSON types."""
        found = {name: getattr(self, name) for name in ("source", "split", "first_rows", "begins_with")}
        return {name: value for name, value in found.items() if value is not None}

    def rows(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield all tensors of each sample: token ids, then target and pixel values where there are any."""
        return zip(*(kind for kind in (self.samples, self.targets, self.images) if kind is not None), strict=True)

    def to_dict(self) -> dict[str, Any]:
        """Describe the samples in plain JSON types, without the samples."""
        described: dict[str, Any] = {
            **self.origin,
            "samples": len(self.samples),
            "tokens": self.tokens,
            "seq_len": self.seq_len,
            "fingerprint": self.fingerprint,
        }
        if self.task is not None:
            described["task"] = self.task
        if self.images is not None:
            described["images"] = sum(map(len, self.images))
        return described


def no_second_token(what: str, seq_len: int) -> CalibrationError:
    """Return the error about data of which no next token can be predicted."""
    advice = "Raise seq_len." if seq_len == 1 else "Use longer samples."
    return CalibrationError(f"{what}: no sample has a second token, so no next token can be predicted. {advice}")


def padded(rows: list[Tensor], pad_token_id: int) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, `(B, T) int64`, of rows `(T_i,) int64`, padded on the right."""
    return {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=pad_token_id),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
    }
