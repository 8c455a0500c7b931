"""What calibration is asked for, with what the model says about it."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedModel

from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError

DEFAULT_SEQ_LEN = 2048  # a context of 131,072 must not be taken literally
ENCODER_DECODER_SEQ_LEN = 512  # what T5, which has no longest context, was trained with

ModelKind = Literal["decoder", "encoder-decoder", "image-text"]
Order = Literal["random", "first"]


@dataclass(frozen=True)
class Request:
    """A config, resolved against a model.

    Attributes:
        config: what to read, and how much of it.
        order: "random", or "first".
        model: what kind of model it is for.
        seq_len: tokens per sample.
        longest: the model's longest context; inf where it has none.
        vocab_size: token ids of the model.
        image_token: the model's placeholder for patches of an image; None where it sees none.
        seen: counts what was read, left out and cut.
    """

    config: CalibrationConfig
    order: Order
    model: ModelKind
    seq_len: int
    longest: float
    vocab_size: int
    image_token: int | None
    seen: Counter[str] = field(default_factory=Counter)


def resolve(config: CalibrationConfig, model: PreTrainedModel, default_seq_len: int | None, order: Order) -> Request:
    """Resolve a config against the model that it is for.

    Raises:
        CalibrationError: the config asks for what this model cannot use.
    """
    kind = model_kind(model)
    _check_columns(config, kind, type(model).__name__)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    seq_len = config.seq_len
    if seq_len is None:
        if kind == "encoder-decoder":
            default_seq_len = min(default_seq_len or ENCODER_DECODER_SEQ_LEN, DEFAULT_SEQ_LEN)
        seq_len = int(min(default_seq_len or DEFAULT_SEQ_LEN, longest))
    elif seq_len > longest:
        raise CalibrationError(f"seq_len must be at most the model's max_position_embeddings {longest}, got {seq_len}.")
    return Request(config, order, kind, seq_len, longest, vocabulary_size(model), image_token(model))


def model_kind(model: PreTrainedModel) -> ModelKind:
    """Say what a model reads: tokens, tokens and targets, or tokens and images."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder"
    return "decoder" if image_token(model) is None else "image-text"


def image_token(model: PreTrainedModel) -> int | None:
    """Return the id that stands for a patch of an image, or None for a model that sees none."""
    if getattr(model.config, "vision_config", None) is None:
        return None
    names = ("image_token_id", "image_token_index")
    return next((token for name in names if (token := getattr(model.config, name, None)) is not None), None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of token ids the live model has embeddings for; its config may say less or more."""
    return len(model.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]


def _check_columns(config: CalibrationConfig, kind: ModelKind, name: str) -> None:
    for option, wanted in (("target_column", "encoder-decoder"), ("image_column", "image-text")):
        column = getattr(config, option)
        if column is not None and kind != wanted:
            raise CalibrationError(
                f"{option}={column!r} is for {wanted} models, and {name} is none: it cannot use it. Leave {option} out."
            )
