"""Texts and token lists -> samples of checked token ids, one after the other."""

import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from optimum_prune.calibration.request import Request
from optimum_prune.errors import CalibrationError

PIECE = 1 << 15  # characters of a text that are tokenised as one string
CHUNK = 1 << 18  # characters that are tokenised in one call
TOKENISED = "The text, tokenised (by this model's tokenizer?),"


def windows(
    texts: Iterable[str | None],
    tokenizer: PreTrainedTokenizerBase | None,
    request: Request,
) -> Iterator[Tensor]:
    """Tokenise texts, join them by the end-of-sequence token, and cut the line of tokens into windows.

    Works through the texts as windows are asked for. Empty and blank texts are left out. Where the tokenizer begins
    texts with BOS, every window begins with it, as in the model's training: Gemma 3 predicts far worse without.

    Args:
        texts: of any length; None counts as empty.
        tokenizer: gives the tokens of the texts, and its BOS and EOS.
        request: says the length, and counts the `texts` that were read and the `blank` ones.

    Yields:
        `(seq_len,) int64`, BOS included; the last one may be shorter.

    Raises:
        CalibrationError: there is no tokenizer, it is another model's, or BOS leaves no room for text.
    """
    tokenizer = needed(tokenizer)
    separator = end_token(tokenizer)
    bos = checked(bos_token(tokenizer), request.vocab_size, TOKENISED)
    if len(bos) == request.seq_len:
        raise CalibrationError(
            f"seq_len=1 leaves no room for text: each window begins with {tokenizer.bos_token!r}. Raise seq_len."
        )
    rest = torch.empty(0, dtype=torch.int64, device="cpu")
    with tqdm(desc="Tokenizing", unit="tok", unit_scale=True, delay=2) as bar:
        for chunk in _chunks(texts, request.seen):
            pieces = [piece for _, piece in chunk]
            # Not verbose: it would warn of texts longer than the context, and these are cut here.
            encoded = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
            ids: list[int] = []
            for (follows_text, _), piece in zip(chunk, encoded, strict=True):
                ids += separator + piece if follows_text else piece
            bar.update(len(ids))
            line = torch.cat([rest, words(ids, request, TOKENISED)])
            *full, rest = list(_cut(line, bos, request.seq_len)) or [line]
            yield from full
    if len(rest):
        yield rest


def token_lists(lists: Iterable[Any], request: Request, what: str | None = None) -> Iterator[Tensor]:
    """Take lists of token ids as samples, as they are.

    Args:
        lists: lists or tensors of integers; empty ones are left out.
        request: says the length, beyond which lists are cut, and counts the `empty` and the `long` ones.
        what: a list in the words of an error message; by default "Sample" with its number.

    Yields:
        `(T,) int64`, `1 <= T <= seq_len`.

    Raises:
        CalibrationError: something else than lists of the model's token ids.
    """
    for i, ids in enumerate(lists):
        sample = words(ids, request, what or f"Sample {i}")
        request.seen["empty"] += len(sample) == 0
        request.seen["long"] += len(sample) > request.seq_len
        if len(sample):
            yield sample[: request.seq_len]


def needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer.

    Raises:
        CalibrationError: there is none.
    """
    if tokenizer is None:
        raise CalibrationError(
            "Texts need a tokenizer: pass one (AutoTokenizer.from_pretrained), or give lists of token ids."
        )
    return tokenizer


def end_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the end-of-sequence token, or nothing where there is none."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]  # pyright: ignore[reportArgumentType]


def bos_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the beginning-of-sequence token, or nothing where the tokenizer does not begin texts with it."""
    if tokenizer.bos_token_id is None:
        return []
    # The ids of "" would not tell BOS in front of a text from an EOS of the same id behind it.
    ids: Any = tokenizer("a", verbose=False)["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []


def words(ids: Any, request: Request, what: str) -> Tensor:
    """Return `ids` as `(T,) int64`, checked to be the model's and to stand for no image.

    Raises:
        CalibrationError: something else, `what` in its message.
    """
    tokens = checked(ids, request.vocab_size, what)
    if request.image_token is not None and (tokens == request.image_token).any():
        raise CalibrationError(
            f"{what} holds token id {request.image_token}, which stands for an image, and there is none. Give a "
            "dataset with a column of images (image_column), or leave this token out."
        )
    return tokens


def _cut(line: Tensor, bos: Tensor, seq_len: int) -> Iterator[Tensor]:
    """Cut a line of tokens, `(T,) int64`, into windows; `bos`, `(1,) or (0,) int64`, is put before those without.

    A short last window may be cut again, in front of further tokens.
    """
    start = 0
    while start < len(line):
        head = bos[:0] if torch.equal(line[start : start + 1], bos) else bos
        end = start + seq_len - len(head)
        yield torch.cat([head, line[start:end]])
        start = end


def _chunks(texts: Iterable[str | None], seen: Counter[str]) -> Iterator[list[tuple[bool, str]]]:
    """Yield lists of pieces of text, each with whether a new text begins there behind another one."""
    chunk, size = [], 0
    for text in texts:
        if text is None or not text.strip():
            seen["blank"] += 1
            continue
        begins_behind_another = seen["texts"] > 0
        seen["texts"] += 1
        for piece in _pieces(text):
            chunk.append((begins_behind_another, piece))
            begins_behind_another = False
            size += len(piece)
            if size >= CHUNK:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text before spaces: byte-level tokenizers cut there too, so their tokens stay the same."""
    start = 0
    while len(text) - start > PIECE:
        space = text.rfind(" ", start + 1, start + PIECE)
        end = space if space > 0 else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def checked(ids: Any, vocab_size: int, what: str) -> Tensor:
    """Return `ids` as `(T,) int64`, checked to be the model's.

    Raises:
        CalibrationError: something else, `what` in its message.
    """
    try:
        tensor = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:  # None, strings, ragged lists, more than 64 bits
        raise CalibrationError(f"{what} is no list of token ids: {error}.") from error
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if tensor.dim() != 1 or tensor.is_floating_point():
        raise CalibrationError(f"{what} must be a flat list of integers, got {reprlib.repr(ids)}.")
    outside = tensor[(tensor < 0) | (tensor >= vocab_size)]
    if len(outside):
        raise CalibrationError(f"{what} holds token id {outside[0]}; the model's token ids are 0 to {vocab_size - 1}.")
    return tensor.long()
