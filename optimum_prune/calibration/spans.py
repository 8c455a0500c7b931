"""Span corruption: the task that T5 was trained on, made of plain text."""

import random
from collections.abc import Sequence
from itertools import count, takewhile

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from optimum_prune.calibration.tokens import checked, end_token
from optimum_prune.errors import CalibrationError

NOISE = 0.15  # fraction of the tokens that are dropped
MEAN_SPAN = 3  # tokens


def special_tokens(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return the ids of `<extra_id_0>`, `<extra_id_1>`, ... that exist in order, and of the end token, if there is one.

    Raises:
        CalibrationError: there are fewer than two sentinels, or they are not the model's.
    """
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    names = takewhile(vocabulary.__contains__, map("<extra_id_{}>".format, count()))
    sentinels = [vocabulary[name] for name in names]
    if tokenizer is None or len(sentinels) < 2:
        given = "no tokenizer was passed" if tokenizer is None else f"this {type(tokenizer).__name__} lacks them"
        raise CalibrationError(
            "Calibrating an encoder-decoder on text alone needs a tokenizer with the tokens <extra_id_0>, <extra_id_1> "
            f"and so on, for span corruption, and {given}. Pass the model's, or give pairs: a dataset with a column of "
            "answers, named by target_column."
        )
    end = end_token(tokenizer)
    checked([*sentinels, *end], vocab_size, "The list of the tokenizer's sentinels (is it this model's tokenizer?)")
    return sentinels, end


def corruptible(window: Tensor, sentinels: Sequence[int]) -> bool:
    """Say whether `window (T,) int64` has a token to drop and one to keep, and spares two sentinels."""
    return len(window) >= 2 and len(_unused(window, sentinels)) >= 2


def corrupt(window: Tensor, sentinels: Sequence[int], end: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Drop spans of a window, and make a question and an answer of what is kept and what is dropped.

    Raffel et al. 2020, arXiv 1910.10683, section 3.1.4: 15 % of the tokens are dropped, in spans of 3 on average. In
    the input a sentinel stands for each span; the target lists the sentinels, each followed by what was dropped, and
    one more sentinel. The paper does not say how it draws: here every placement in which no two spans touch, and every
    way to divide the dropped tokens among the spans, is equally likely. Where there are too few sentinels for the
    spans, the spans are fewer and longer.

    Args:
        window: `(T,) int64`, `corruptible`.
        sentinels: in the order in which they are used; those that the window itself holds are passed over.
        end: the end-of-sequence token, if there is one: behind both.
        seed: the same window and seed give the same spans.

    Returns:
        Input and target, `(T_i,) int64` and `(U_i,) int64`.
    """
    sentinels = _unused(window, sentinels)
    dropped = max(1, round(NOISE * len(window)))
    spans = min(max(1, round(dropped / MEAN_SPAN)), len(sentinels) - 1)
    draw = random.Random(seed.to_bytes(8, "little") + window.numpy().astype("<i8").tobytes())
    kept = len(window) - dropped
    # A span goes in front of the i-th kept token, or behind the last one; no place takes two.
    places = sorted(draw.sample(range(kept + 1), spans))
    borders = [0, *sorted(draw.sample(range(1, dropped), spans - 1)), dropped]

    source: list[int] = []
    target: list[int] = []
    ids, position = window.tolist(), 0
    for i, sentinel in enumerate(sentinels[:spans]):
        start, end_of_span = places[i] + borders[i], places[i] + borders[i + 1]
        source += [*ids[position:start], sentinel]
        target += [sentinel, *ids[start:end_of_span]]
        position = end_of_span
    source += [*ids[position:], *end]
    target += [sentinels[spans], *end]
    return torch.tensor(source, device="cpu"), torch.tensor(target, device="cpu")


def _unused(window: Tensor, sentinels: Sequence[int]) -> list[int]:
    held = set(window.tolist())
    return [sentinel for sentinel in sentinels if sentinel not in held]
