"""Texts to train on, others to be measured on, and a tokenizer: all from Python's own manual."""

from collections.abc import Iterable
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCABULARY = 1024
WINDOW = 128  # tokens that a model sees at once


def training() -> list[str]:
    """Return every second topic of the manual, for training and for calibration."""
    return _manual()[::2]


def evaluation() -> list[str]:
    """Return the other topics, without the many paragraphs that the manual repeats from the first ones."""
    known = {paragraph for text in training() for paragraph in _paragraphs(text)}
    new = ("\n\n".join(p for p in _paragraphs(text) if p not in known) for text in _manual()[1::2])
    return [text for text in new if text]


def train_tokenizer(texts: Iterable[str], sentinels: int = 0) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `VOCABULARY` tokens.

    Args:
        texts: what it learns its merges from.
        sentinels: as in T5, `<extra_id_0>` gets the last id, `<extra_id_1>` the one before, and texts end with `EOS`.
    """
    extra = [f"<extra_id_{i}>" for i in reversed(range(sentinels))]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - sentinels,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if sentinels:
        end = (EOS, backend.token_to_id(EOS))
        backend.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[end])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=extra,
        padding_side="right" if sentinels else "left",
    )


def stream(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return the token ids of all texts, `(T,) int64`, with `EOS` behind each."""
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, tokenizer.eos_token_id]])


def windows(ids: Tensor) -> Tensor:
    """Cut a stream into windows, `(n, WINDOW) int64`; what is left over is dropped."""
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


def random_windows(ids: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Cut windows from random places of a stream, `(count, WINDOW) int64`."""
    starts = torch.randint(len(ids) - WINDOW + 1, (count, 1), generator=generator)
    return ids[starts + torch.arange(WINDOW)]


def _manual() -> list[str]:
    return [text for _, text in sorted(topics.items())]


def _paragraphs(text: str) -> list[str]:
    return [stripped for paragraph in text.split("\n\n") if (stripped := paragraph.strip("\n"))]
