"""Samples of encoder-decoders: what the encoder reads, and what the decoder should answer."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from optimum_prune.calibration.choosing import in_order
from optimum_prune.calibration.columns import Source
from optimum_prune.calibration.request import Request
from optimum_prune.calibration.tokens import TOKENISED, checked, end_token, needed
from optimum_prune.errors import CalibrationError

Pair = tuple[Tensor, Tensor]
"""Input and target, `(T_i,) int64` and `(U_i,) int64`."""


def pairs(source: Source, tokenizer: PreTrainedTokenizerBase | None, request: Request) -> list[Pair]:
    """Choose pairs of texts or of token ids. Each half is cut to `seq_len`; pairs are never packed.

    Args:
        source: "text pairs" or "token pairs".
        tokenizer: needed for texts; adds its own special tokens, and a text that is cut keeps the end token.
        request: says how many, and counts the `texts` read, the `blank` and the `empty` pairs, and the `long` ones.

    Raises:
        CalibrationError: there is no tokenizer for texts, or something else than the model's token ids.
    """
    if source.kind == "text pairs":
        usable, encode = has_words, partial(_tokenised, needed(tokenizer), request)
    else:
        usable, encode = has_tokens, partial(_taken, request)
    chosen = in_order(source.items, request, partial(usable, request.seen))
    encoded = (pair for pair in map(encode, chosen) if has_tokens(request.seen, pair))
    count = request.config.num_samples
    return list(tqdm(islice(encoded, count), desc="Tokenizing", total=count, unit="pair", delay=2))


def start_token(model: PreTrainedModel) -> int:
    """Return the token that the decoder begins with.

    Raises:
        CalibrationError: the model's configs name none.
    """
    # A model without a head has no generation_config.
    for config in (model.config, getattr(model, "generation_config", None)):
        if (token := getattr(config, "decoder_start_token_id", None)) is not None:
            return token
    raise CalibrationError(
        f"The config of {type(model).__name__} names no decoder_start_token_id, so nothing is known to begin an answer "
        "with. Set model.config.decoder_start_token_id (T5's is its pad_token_id)."
    )


def has_words(seen: Counter[str], pair: tuple[str | None, str | None]) -> bool:
    """Say whether both halves have words, and count it."""
    usable = all(text is not None and text.strip() for text in pair)
    seen["texts" if usable else "blank"] += 1
    return usable


def has_tokens(seen: Counter[str], pair: tuple[Any, Any]) -> bool:
    """Say whether both halves have tokens, and count those that have not."""
    usable = all(ids is not None and len(ids) > 0 for ids in pair)
    seen["empty"] += not usable
    return usable


def _tokenised(tokenizer: PreTrainedTokenizerBase, request: Request, pair: tuple[str, str]) -> Pair:
    text, target = pair
    # Not verbose: it would warn of texts longer than the context, and these are cut here.
    encoded = tokenizer(text, text_target=target, verbose=False)
    source, answer = (checked(encoded[name], request.vocab_size, TOKENISED) for name in ("input_ids", "labels"))
    return _cut((source, answer), request, end_token(tokenizer))


def _taken(request: Request, pair: tuple[Any, Any]) -> Pair:
    ids, labels = pair
    source = checked(ids, request.vocab_size, "A row of input_ids")
    return _cut((source, checked(labels, request.vocab_size, "A row of target ids")), request)


def _cut(pair: Pair, request: Request, end: Sequence[int] = ()) -> Pair:
    """Cut both halves to `seq_len`; the one that closes with the end token keeps it."""
    length = request.seq_len
    request.seen["long"] += any(len(ids) > length for ids in pair)
    source, target = (
        torch.cat([ids[: length - 1], ids[-1:]]) if len(ids) > length and ids[-1] in end else ids[:length]
        for ids in pair
    )
    return source, target
