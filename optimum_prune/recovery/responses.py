"""Questions with answers, for decoders: token ids, and labels that ask for the answers alone."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from optimum_prune.calibration.chats import labelled, take
from optimum_prune.calibration.choosing import in_order
from optimum_prune.calibration.columns import Source
from optimum_prune.calibration.pairs import has_tokens, has_words
from optimum_prune.calibration.request import Request
from optimum_prune.calibration.tokens import needed, words
from optimum_prune.calibration.turns import ASSISTANT, Chat, pair_of, well_formed
from optimum_prune.errors import CalibrationError
from optimum_prune.objectives import IGNORED

KINDS = ("text pairs", "token pairs", "chats")
"""Kinds of source that hold answers."""
Labelled = tuple[Tensor, Tensor]
"""Token ids, and what each position should be predicted to hold or `IGNORED`: both `(T,) int64`."""


def responses(source: Source, tokenizer: PreTrainedTokenizerBase | None, request: Request) -> list[Labelled]:
    """Choose questions with their answers. What is longer than `seq_len` loses its end.

    Texts go through the tokenizer's chat template; where it has none, or one that does not let a prompt be told from
    its answer, a question is a line, and an answer follows it, closed by the end token. What an assistant says first,
    to nobody's question, is read and not asked for.

    Args:
        source: one of `KINDS`.
        tokenizer: needed for texts.
        request: says how many, and counts the `texts` read, the `blank` and the `empty` ones, the `long` ones, which
            are cut, and the `unanswered` ones, of whose answers the cut left nothing.

    Raises:
        CalibrationError: there is no tokenizer for texts, or something else than the model's token ids.
    """
    if source.kind == "token pairs":
        usable, encode = has_tokens, partial(_checked, request)
    elif source.kind == "text pairs":
        usable, encode = has_words, lambda pair: _encoded(needed(tokenizer), request, pair_of(*pair))
    else:
        usable, encode = _has_answer, lambda chat: _encoded(needed(tokenizer), request, _until_answer(chat))
    chosen = in_order(source.items, request, partial(usable, request.seen))
    cut = filter(None, (_cut(labelled, request) for labelled in map(encode, chosen)))
    return take(cut, request)


def ask(ids: Tensor, wanted: Tensor) -> Tensor:
    """Return labels: `ids (T,) int64` where `wanted (T,) bool`, but for the first, which nothing comes before."""
    labels = ids.masked_fill(~wanted, IGNORED)
    labels[:1] = IGNORED
    return labels


def _has_answer(seen: Counter[str], chat: list[dict[str, Any]] | None) -> bool:
    turns = chat or []
    usable = well_formed(turns) and any(turn["role"] == ASSISTANT and turn["content"].strip() for turn in turns)
    seen["texts" if usable else "blank"] += 1
    return usable


def _until_answer(chat: list[dict[str, Any]]) -> Chat:
    """Leave out what follows the last answer, and what a turn holds besides words."""
    last = max(i for i, turn in enumerate(chat) if turn["role"] == ASSISTANT)
    return [{"role": turn["role"], "content": turn["content"]} for turn in chat[: last + 1]]


def _checked(request: Request, pair: tuple[Any, Any]) -> Labelled:
    ids, labels = words(pair[0], request, "A row of input_ids"), list(pair[1])
    for token, label in zip(ids.tolist(), labels, strict=True):
        if label not in (token, IGNORED):
            raise CalibrationError(
                f"A row of labels has {label!r} beside token {token}. Labels of a decoder repeat the token, or are "
                f"{IGNORED} where nothing is asked; transformers moves them itself. Leave out labels of another kind."
            )
    wanted = torch.tensor([label != IGNORED for label in labels], device="cpu")
    return ids, ask(ids, wanted)


def _encoded(tokenizer: PreTrainedTokenizerBase, request: Request, chat: Chat) -> Labelled:
    tokens, wanted = labelled(tokenizer, request, chat)
    return tokens, ask(tokens, wanted)


def _cut(labelled: Labelled, request: Request) -> Labelled | None:
    ids, labels = (tensor[: request.seq_len].clone() for tensor in labelled)
    if (labels == IGNORED).all():
        request.seen["unanswered"] += 1
        return None
    request.seen["long"] += len(labelled[0]) > request.seq_len
    return ids, labels
