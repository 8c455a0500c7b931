"""Chats -> token ids: through the tokenizer's chat template, or line by line where it has none that fits."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from optimum_prune.calibration.choosing import in_order
from optimum_prune.calibration.columns import Source
from optimum_prune.calibration.pairs import has_words
from optimum_prune.calibration.request import Request
from optimum_prune.calibration.tokens import TOKENISED, bos_token, end_token, needed, words
from optimum_prune.calibration.turns import ASSISTANT, Chat, pair_of, well_formed

logger = logging.getLogger(__name__)

T = TypeVar("T")


def conversations(source: Source, tokenizer: PreTrainedTokenizerBase | None, request: Request) -> list[Tensor]:
    """Choose conversations, and render each as one sample. What is longer than `seq_len` loses its end.

    Args:
        source: "chats" or "text pairs".
        tokenizer: brings the chat template; without one, each turn is a line, and the end token closes an answer.
        request: says how many, and counts the `texts` read, the `blank` ones, and the `long` ones, which are cut.

    Returns:
        `(T_i,) int64`.

    Raises:
        CalibrationError: there is no tokenizer, or it is another model's.
    """
    tokenizer = needed(tokenizer)
    usable = has_words if source.kind == "text pairs" else _has_turns
    chosen = in_order(source.items, request, partial(usable, request.seen))
    chats = chosen if source.kind == "chats" else (pair_of(*pair) for pair in chosen)
    return take((_rendered(tokenizer, request, chat) for chat in chats), request)


def take(samples: Iterable[T], request: Request) -> list[T]:
    """Take `num_samples` samples of chats, with a progress bar; warn of those that the chat template refuses."""
    count = request.config.num_samples
    taken = list(tqdm(islice(samples, count), desc="Tokenizing", total=count, unit="sample", delay=2))
    if lost := request.seen["untemplated"]:
        logger.warning(
            "%d samples were written without the tokenizer's chat template, which refuses them or does not begin "
            "them with their prompts.",
            lost,
        )
    return taken


def labelled(tokenizer: PreTrainedTokenizerBase, request: Request, chat: Chat) -> tuple[Tensor, Tensor]:
    """Return the token ids of a chat, `(T,) int64`, and which are an assistant's answers, `(T,) bool`.

    Where the template does not let a prompt be told from its answer, the chat is written line by line.
    """
    ids, wanted = _encoded(tokenizer, request, chat, _templated)
    return words(ids, request, TOKENISED), torch.tensor(wanted, dtype=torch.bool, device="cpu")


def _rendered(tokenizer: PreTrainedTokenizerBase, request: Request, chat: Chat) -> Tensor:
    def whole(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> tuple[list[int], list[bool]]:
        return _ids_of(tokenizer, chat), []

    ids, _ = _encoded(tokenizer, request, chat, whole)
    tokens = words(ids, request, TOKENISED)
    request.seen["long"] += len(tokens) > request.seq_len
    return tokens[: request.seq_len].clone()


def _has_turns(seen: Counter[str], chat: list[dict[str, Any]] | None) -> bool:
    usable = well_formed(chat) and any(turn["content"].strip() for turn in chat or [])
    seen["texts" if usable else "blank"] += 1
    return usable


def _encoded(
    tokenizer: PreTrainedTokenizerBase,
    request: Request,
    chat: Chat,
    template: Callable[[PreTrainedTokenizerBase, Chat], tuple[list[int], list[bool]] | None],
) -> tuple[list[int], list[bool]]:
    """Apply the chat template, where there is one and it does not refuse the chat; else write it line by line."""
    found = None
    if getattr(tokenizer, "chat_template", None):
        try:
            found = template(tokenizer, chat)
        except Exception as error:  # templates are programs: whatever one raises about turns that it does not know
            logger.debug("The chat template refuses a chat: %s", error)
        request.seen["untemplated"] += found is None
    return _plain(tokenizer, chat) if found is None else found


def _templated(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> tuple[list[int], list[bool]] | None:
    """Return token ids and which are answers; None where a prompt cannot be told from its answer."""
    ids = _ids_of(tokenizer, chat)
    wanted = [False] * len(ids)
    for i, turn in enumerate(chat):
        if i and turn["role"] == ASSISTANT:
            before, until = _ids_of(tokenizer, chat[:i], prompt=True), _ids_of(tokenizer, chat[: i + 1])
            if until[: len(before)] != before or ids[: len(until)] != until:
                return None
            wanted[len(before) : len(until)] = [True] * (len(until) - len(before))
    return ids, wanted


def _ids_of(tokenizer: PreTrainedTokenizerBase, turns: Chat, prompt: bool = False) -> list[int]:
    ids: Any = tokenizer.apply_chat_template(
        turns,
        add_generation_prompt=prompt,
        return_dict=False,
        tokenizer_kwargs={"verbose": False},  # it would warn of texts longer than the context, which are cut here
    )
    return ids


def _plain(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> tuple[list[int], list[bool]]:
    """Return token ids and which are answers: what is said before an answer line by line, and the end behind it."""
    ids: list[int] = []
    wanted: list[bool] = []
    question = ""
    for i, turn in enumerate(chat):
        if turn["role"] != ASSISTANT:
            question += f"{turn['content']}\n"
            continue
        prompt, both = (_tokens(tokenizer, text) for text in (question, question + turn["content"]))
        # A token that holds the end of the question and the start of the answer is part of the answer.
        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, both, strict=False)))
        both += end_token(tokenizer)
        ids += both
        wanted += [False] * known + [i > 0] * (len(both) - known)
        question = ""
    if question:
        rest = _tokens(tokenizer, question)
        ids, wanted = ids + rest, wanted + [False] * len(rest)
    bos = bos_token(tokenizer)
    head = [] if ids[:1] == bos else bos
    return head + ids, [False] * len(head) + wanted


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]
