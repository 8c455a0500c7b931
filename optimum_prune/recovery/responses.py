"""Questions with answers, for decoders: token ids, and labels that ask for the answers alone."""

import logging
from collections import Counter
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from optimum_prune.calibration.choosing import in_order
from optimum_prune.calibration.columns import Source
from optimum_prune.calibration.pairs import has_tokens, has_words
from optimum_prune.calibration.request import Request
from optimum_prune.calibration.tokens import TOKENISED, bos_token, end_token, needed, words
from optimum_prune.errors import CalibrationError
from optimum_prune.objectives import IGNORED

logger = logging.getLogger(__name__)

KINDS = ("text pairs", "token pairs", "chats")
"""Kinds of source that hold answers."""
ASSISTANT = "assistant"

Chat = list[dict[str, str]]
"""Turns with `role` and `content`."""
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
        usable, encode = has_words, lambda pair: _encoded(needed(tokenizer), request, _turns(*pair))
    else:
        usable, encode = _has_answer, lambda chat: _encoded(needed(tokenizer), request, _until_answer(chat))
    chosen = in_order(source.items, request, partial(usable, request.seen))
    cut = filter(None, (_cut(labelled, request) for labelled in map(encode, chosen)))
    count = request.config.num_samples
    samples = list(tqdm(islice(cut, count), desc="Tokenizing", total=count, unit="sample", delay=2))
    if lost := request.seen["untemplated"]:
        logger.warning(
            "%d samples were written without the tokenizer's chat template, which refuses them or does not begin "
            "them with their prompts.",
            lost,
        )
    return samples


def ask(ids: Tensor, wanted: Tensor) -> Tensor:
    """Return labels: `ids (T,) int64` where `wanted (T,) bool`, but for the first, which nothing comes before."""
    labels = ids.masked_fill(~wanted, IGNORED)
    labels[:1] = IGNORED
    return labels


def _turns(prompt: str, response: str) -> Chat:
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": response}]


def _has_answer(seen: Counter[str], chat: list[dict[str, Any]] | None) -> bool:
    turns = chat or []
    usable = all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    ) and any(turn["role"] == ASSISTANT and turn["content"].strip() for turn in turns)
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
    found = None
    if getattr(tokenizer, "chat_template", None):
        found = _templated(tokenizer, chat)
        request.seen["untemplated"] += found is None
    ids, wanted = _plain(tokenizer, chat) if found is None else found
    tokens = words(ids, request, TOKENISED)
    return tokens, ask(tokens, torch.tensor(wanted, dtype=torch.bool, device="cpu"))


def _templated(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> tuple[list[int], list[bool]] | None:
    """Return token ids and which are asked for; None where a prompt cannot be told from its answer."""

    def ids_of(turns: Chat, prompt: bool = False) -> list[int]:
        ids: Any = tokenizer.apply_chat_template(
            turns,
            add_generation_prompt=prompt,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # it would warn of texts longer than the context, which are cut here
        )
        return ids

    try:
        ids = ids_of(chat)
        wanted = [False] * len(ids)
        for i, turn in enumerate(chat):
            if i and turn["role"] == ASSISTANT:
                before, until = ids_of(chat[:i], prompt=True), ids_of(chat[: i + 1])
                if until[: len(before)] != before or ids[: len(until)] != until:
                    return None
                wanted[len(before) : len(until)] = [True] * (len(until) - len(before))
    except Exception as error:  # templates are programs: whatever one raises about turns that it does not know
        logger.debug("The chat template refuses a chat: %s", error)
        return None
    return ids, wanted


def _plain(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> tuple[list[int], list[bool]]:
    """Return token ids and which are asked for: what is said before an answer line by line, and the end behind it."""
    bos, question = bos_token(tokenizer), ""
    ids: list[int] = []
    wanted: list[bool] = []
    for i, turn in enumerate(chat):
        if turn["role"] != ASSISTANT:
            question += f"{turn['content']}\n"
            continue
        prompt, both = (_ids(tokenizer, text) for text in (question, question + turn["content"]))
        # A token that holds the end of the question and the start of the answer is part of the answer.
        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, both, strict=False)))
        if not ids and both[:1] != bos:
            ids, wanted = bos, [False] * len(bos)
        both += end_token(tokenizer)
        ids += both
        wanted += [False] * known + [i > 0] * (len(both) - known)
        question = ""
    return ids, wanted


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]


def _cut(labelled: Labelled, request: Request) -> Labelled | None:
    ids, labels = (tensor[: request.seq_len].clone() for tensor in labelled)
    if (labels == IGNORED).all():
        request.seen["unanswered"] += 1
        return None
    request.seen["long"] += len(labelled[0]) > request.seq_len
    return ids, labels
