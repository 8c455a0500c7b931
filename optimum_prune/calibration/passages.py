"""Whether samples hold the same text as earlier ones: hashes of passages, small enough to be kept in a report."""

import hashlib
from collections.abc import Iterable

import numpy
from numpy.typing import NDArray
from torch import Tensor

LENGTH = 16
"""Tokens of a passage: long enough that two texts share one by quotation, hardly by chance."""
KEPT = 1024
"""Passages that are kept of a data set: those with the lowest hashes, so that the same text keeps the same ones."""
DIGITS = 8
"""Hexadecimal digits of a hash."""

Row = tuple[Tensor, ...]
"""A sample: its token ids `(T,) int64`. One with a target or pictures besides is a single passage."""


def passages(rows: Iterable[Row]) -> str:
    """Return the lowest hashes of all passages, ascending, `DIGITS` hexadecimal digits each.

    Passages begin at every token, so windows that are cut elsewhere have the same ones. What is shorter than a passage
    is one as it is.
    """
    return "".join(f"{value:0{DIGITS}x}" for value in _hashes(rows)[:KEPT].tolist())


def share(seen: str, rows: Iterable[Row]) -> float:
    """Return the fraction of the distinct passages of `rows` that earlier samples had.

    Args:
        seen: what `passages` returned of the earlier samples. Where it was cut to `KEPT`, the fraction is that of the
            passages whose hashes are as low: an unbiased estimate.
        rows: later samples, tokenised by the same tokenizer.
    """
    known = numpy.array([int(seen[i : i + DIGITS], 16) for i in range(0, len(seen), DIGITS)], dtype=numpy.uint64)
    found = _hashes(rows)
    if len(known) == KEPT:
        found = found[found <= known[-1]]
    return float(numpy.isin(found, known).mean()) if len(found) else 0.0


def _hashes(rows: Iterable[Row]) -> NDArray[numpy.uint64]:
    """Return the distinct hashes of all passages, ascending, each below 2^32."""
    parts = [_of_tokens(row[0]) if len(row) == 1 else _of_all(row) for row in rows]
    return numpy.unique(numpy.concatenate([numpy.empty(0, numpy.uint64), *parts]))


def _of_tokens(ids: Tensor) -> NDArray[numpy.uint64]:
    """Hash every passage by a polynomial of its tokens modulo 2^64, with its bits mixed by MurmurHash3's finaliser."""
    tokens = ids.numpy().astype(numpy.uint64) + numpy.uint64(1)
    if not (length := min(LENGTH, len(tokens))):
        return tokens
    values = numpy.lib.stride_tricks.sliding_window_view(tokens, length) @ POWERS[:length]
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        values = (values ^ (values >> numpy.uint64(33))) * numpy.uint64(factor)
    return values >> numpy.uint64(32)


def _of_all(row: Row) -> NDArray[numpy.uint64]:
    digest = hashlib.sha256()
    for tensor in row:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.numpy().astype("<f4" if tensor.is_floating_point() else "<i8").tobytes())
    return numpy.array([int.from_bytes(digest.digest()[:4], "big")], dtype=numpy.uint64)


POWERS = numpy.array([pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(LENGTH)], dtype=numpy.uint64)
