"""What can be refused of calibration before a sample is read: the same for a run, and for those who plan one."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from optimum_prune.calibration.columns import Source
from optimum_prune.calibration.images import check_processor
from optimum_prune.calibration.pairs import start_token
from optimum_prune.calibration.request import Request, resolve
from optimum_prune.calibration.samples import no_second_token
from optimum_prune.calibration.self_sampling import check_generates
from optimum_prune.calibration.sources import check_options, open_source
from optimum_prune.calibration.spans import special_tokens
from optimum_prune.calibration.tokens import needed
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError


def check_calibration(
    config: CalibrationConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    processor: Any = None,
    default_seq_len: int | None = None,
    image_stack: str | None = None,
    predicts: bool = False,
    skeleton: bool = False,
) -> None:
    """Refuse what `load_samples` would refuse before it reads a sample; a source is opened, no more.

    Args:
        config: as for `load_samples`.
        model: only its configs and shapes are looked at.
        tokenizer: as for `load_samples`.
        processor: as for `load_samples`.
        default_seq_len: as for `load_samples`.
        image_stack: as for `load_samples`.
        predicts: next tokens are predicted, so samples of one token will not do.
        skeleton: the model was built from its config alone: tokenizer, processor and generation config are not known
            yet.

    Raises:
        CalibrationError: the source does not exist, has no usable column, or does not fit the model.
    """
    tokenizer = tokenizer or getattr(processor, "tokenizer", None)
    request = resolve(config, model, default_seq_len, "first")
    if predicts and request.model == "decoder" and request.seq_len == 1:
        raise no_second_token("seq_len=1", 1)
    source = open_fitting(request, model, image_stack)
    if source is not None and not skeleton:
        check_companions(source, request, model, tokenizer, processor)


def open_fitting(request: Request, model: PreTrainedModel, image_stack: str | None) -> Source | None:
    """Open the source if the model, and the stack that reads nothing but images, can use it; None is the model itself.

    Raises:
        CalibrationError: it does not exist, has no usable column, or does not fit the model.
    """
    source = None
    if request.config.source == "self":
        check_options(request.config)
        check_generates(model)
    else:
        source = open_source(request.config, request.model)
    if image_stack is not None and (source is None or source.kind != "images"):
        what = "source='self'" if source is None else "this source"
        advice = "Give a dataset with a column of images (image_column)."
        raise CalibrationError(
            f"Stack {image_stack!r} of {type(model).__name__} reads nothing but images, and calibration on {what} "
            f"sees none. {(source and source.advice) or advice}"
        )
    return source


def check_companions(
    source: Source,
    request: Request,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: Any,
) -> None:
    """Refuse to go on without the tokenizer, the processor or the start token that samples of this source need.

    Raises:
        CalibrationError: it is missing, or is no such thing.
    """
    if source.kind == "images":
        check_processor(processor)
    elif request.model == "encoder-decoder":
        start_token(model)
        if source.kind in ("texts", "token ids"):
            special_tokens(tokenizer, request.vocab_size)
    if source.kind in ("texts", "text pairs", "chats"):
        needed(tokenizer)
