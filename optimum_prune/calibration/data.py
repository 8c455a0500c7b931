"""From a config to calibration samples."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from optimum_prune.calibration.chats import conversations
from optimum_prune.calibration.choosing import choose, in_order, is_table, runs
from optimum_prune.calibration.columns import Source
from optimum_prune.calibration.files import folder_and_name, options_of
from optimum_prune.calibration.images import image_texts
from optimum_prune.calibration.pairs import pairs, start_token
from optimum_prune.calibration.patches import check_patches
from optimum_prune.calibration.refusals import check_companions, open_fitting
from optimum_prune.calibration.request import Order, Request, resolve
from optimum_prune.calibration.samples import CalibrationData
from optimum_prune.calibration.self_sampling import draw_samples
from optimum_prune.calibration.spans import corrupt, corruptible, special_tokens
from optimum_prune.calibration.tokens import bos_token, token_lists, windows
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError

__all__ = ["CalibrationData", "load_samples"]

logger = logging.getLogger(__name__)

LEFT_OUT = {  # what `Request.seen` counts -> what it is
    "short": "samples too short for span corruption",
    "unfit": "samples whose images would have been cut",
    "unanswered": "samples of which no token would be trained on",
}


def load_samples(
    config: CalibrationConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    processor: Any = None,
    default_seq_len: int | None = None,
    image_stack: str | None = None,
    order: Order = "random",
) -> CalibrationData:
    """Get the samples that a config asks for.

    Texts are joined and cut into windows of `seq_len` tokens, each of which begins with BOS where the tokenizer begins
    texts with it; the short window that is left over is used only where the full ones are fewer than `num_samples`.
    Token lists are samples as they are, cut to `seq_len`. A chat, or a question with its answer, is one sample, through
    the tokenizer's chat template.

    An encoder-decoder is calibrated on pairs of an input and a target, where the data has them, and else on windows of
    text by span corruption, the task that T5 was trained on. An image-text model is calibrated on images with text,
    where the data has images.

    Args:
        config: what to read, and how much of it.
        model: knows the token ids and the longest context; generates the samples where the source is "self".
        tokenizer: needed for texts.
        processor: needed for images; brings the tokenizer along.
        default_seq_len: stands in for a `config.seq_len` of None; the model's longest context limits it.
        image_stack: a stack that is to be scored and reads nothing but images, by its name in the config, if any is.
        order: "random" draws without replacement, seeded. Of a dataset or a table it tokenises only the rows that it
            draws; a stream is read no further than a buffer of some 10,000 rows (see `choosing.in_order`). Lists of
            texts and text files are tokenised whole. "first" takes the first ones and reads no further than it must.

    Raises:
        CalibrationError: the source cannot be read, has nothing usable in it, or does not fit the model.
    """
    request = resolve(config, model, default_seq_len, order)
    tokenizer = tokenizer or getattr(processor, "tokenizer", None)
    source = open_fitting(request, model, image_stack)
    data = read_samples(source, request, model, tokenizer, processor)
    if request.model == "image-text" and data.images is None:
        sentence = f"Calibration on {data.source} sees no images, which this model reads too. "
        logger.warning("%s", (sentence + (source.advice if source else "")).rstrip())
    return data


def read_samples(
    source: Source | None,
    request: Request,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: Any,
) -> CalibrationData:
    """Get the samples of a source that is open; of None, text that the model writes itself. See `load_samples`.

    Raises:
        CalibrationError: the source has nothing usable in it, or does not fit the model.
    """
    loaded: dict[str, Any] = {}
    if tokenizer is not None and (source is None or source.kind == "texts") and bos_token(tokenizer):
        loaded["begins_with"] = tokenizer.bos_token
    if source is None:
        loaded["samples"] = draw_samples(model, tokenizer, request.config, request.seq_len)
    else:
        check_companions(source, request, model, tokenizer, processor)
        if request.model == "encoder-decoder":
            loaded["start"] = start_token(model)
            loaded |= _questions_and_answers(source, tokenizer, request)
        elif source.kind == "images":
            loaded |= _images_with_text(source, model, processor, request)
        elif source.kind in ("chats", "text pairs"):
            loaded["samples"] = conversations(source, tokenizer, request)
        else:
            loaded["samples"] = _plain(source, tokenizer, request)
    return reported(request, **loaded)


def _questions_and_answers(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, request: Request
) -> dict[str, Any]:
    if source.kind in ("text pairs", "token pairs"):
        task, found = "pairs", pairs(source, tokenizer, request)
    else:
        task, found = "span corruption", _corrupted(source, tokenizer, request)
    samples, targets = _unzipped(found)
    return {"samples": samples, "targets": targets, "task": task}


def _images_with_text(source: Source, model: PreTrainedModel, processor: Any, request: Request) -> dict[str, Any]:
    assert request.image_token is not None, "only a model with an image token is given images"
    samples, images = _unzipped(image_texts(source, processor, request))
    if samples:
        check_patches(model, processor, samples, images, request.image_token)
    return {"samples": samples, "images": images, "task": "image-text", "image_token": request.image_token}


def _corrupted(
    source: Source, tokenizer: PreTrainedTokenizerBase | None, request: Request
) -> list[tuple[Tensor, Tensor]]:
    sentinels, end = special_tokens(tokenizer, request.vocab_size)

    def usable(window: Tensor) -> bool:
        fit = corruptible(window, sentinels)
        request.seen["short"] += not fit
        return fit

    found = _plain(source, tokenizer, request, usable)
    return [corrupt(window, sentinels, end, request.config.seed) for window in found]


def _plain(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    request: Request,
    usable: Callable[[Tensor], bool] = lambda _: True,
) -> list[Tensor]:
    packed, items, count = source.kind == "texts", source.items, request.config.num_samples
    drawn = request.order == "random" and is_table(items)
    if packed:
        candidates = windows(runs(items, request) if drawn else items, tokenizer, request)
    elif drawn:
        candidates = token_lists(in_order(items, request, lambda _: True), request, "A row of input_ids")
    else:
        candidates = token_lists(items, request)
    candidates = filter(usable, candidates)
    if drawn:
        chosen = list(islice(candidates, count))
    else:
        # The short window that is left over from packing is drawn only where there are not enough others.
        chosen = choose(candidates, request, last=lambda s: packed and len(s) < request.seq_len)
    # A view would hold the whole chunk that it was cut from.
    return [sample.clone() for sample in chosen]


def _unzipped(couples: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in couples], [second for _, second in couples]


def source_name(config: CalibrationConfig) -> str:
    """Name a source the same wherever it is named from."""
    source = config.to_dict()["source"]
    # absolute: after a change of directory a relative path would look like a Hub id
    if (folder := folder_and_name(source)) is not None:
        path, name = folder
        return os.path.abspath(path) + (f":{name}" if name else "")
    path = os.path.expanduser(source)
    return os.path.abspath(path) if os.path.exists(path) else source


def reported(request: Request, **loaded: Any) -> CalibrationData:
    """Put what was loaded together, refuse to go on with nothing, and say what was used and what was not.

    Raises:
        CalibrationError: there are no samples.
    """
    seen, asked = request.seen, request.config.num_samples
    data = CalibrationData(
        seq_len=request.seq_len,
        source=source_name(request.config),
        split=request.config.split if "split" in options_of(request.config.source) else None,
        texts=seen["texts"] or None,
        **loaded,
    )
    if seen["buffered"]:
        data = replace(data, first_rows=seen["buffered"])
        logger.info("Drawn from the first %d rows of %s, which has more.", seen["buffered"], data.source)
    if not data.samples:
        left_out = [f"{seen['blank'] + seen['empty']} empty entries"]
        left_out += [f"{seen[reason]} {words}" for reason, words in LEFT_OUT.items() if seen[reason]]
        raise CalibrationError(f"{data.source} holds no usable tokens ({', '.join(left_out)} were left out).")
    found = f"{len(data.samples)} samples, {data.tokens} tokens"
    texts = "" if data.texts is None else f" ({data.texts} texts, {seen['blank']} blank ones left out)"
    logger.info("Using %s, from %s%s.", found, data.source, texts)
    if len(data.samples) < asked:
        logger.warning("Asked for %d samples; %s gives only %s.", asked, data.source, found)
    if seen["long"]:
        logger.warning("%d samples of %s were cut to %d tokens.", seen["long"], data.source, data.seq_len)
    for reason, words in {"empty": "empty samples", **LEFT_OUT}.items():
        if seen[reason]:
            logger.warning("%d %s of %s were left out.", seen[reason], words, data.source)
    return data
