"""Samples of image-text models: token ids in which a placeholder stands for each patch, and pixel values."""

import reprlib
from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_vision_available
from transformers.utils.logging import tqdm

from optimum_prune.calibration.choosing import in_order
from optimum_prune.calibration.columns import Source
from optimum_prune.calibration.request import Request
from optimum_prune.calibration.rows import reading, reason_of
from optimum_prune.calibration.tokens import TOKENISED, checked
from optimum_prune.errors import CalibrationError
from optimum_prune.modes import plain_defaults


def image_texts(source: Source, processor: Any, request: Request) -> list[tuple[Tensor, Tensor]]:
    """Choose images with text, and process them one sample at a time.

    `seq_len` limits the tokens of the text, and the placeholders of the images come on top. What is cut is text behind
    the images: a sample whose images would be cut is left out.

    Args:
        source: "images".
        processor: the model's own; see `check_processor`.
        request: says how many, and counts the `texts` read, the `blank` ones, the samples without image as `empty`, the
            `long` ones, which are cut, and the `unfit` ones, whose images would have been.

    Returns:
        Token ids `(T_i,) int64` and pixel values `(n_i, C, H, W) float32` of each sample.

    Raises:
        CalibrationError: the processor is another model's, or the images cannot be read.
    """
    chosen = in_order(source.items, request, partial(_usable, request.seen))
    processed = filter(None, map(partial(_processed, processor, request), chosen))
    count = request.config.num_samples
    samples = list(tqdm(islice(processed, count), desc="Processing images", total=count, unit="sample", delay=2))
    if len(shapes := {tuple(pixels.shape[1:]) for _, pixels in samples}) > 1:
        raise CalibrationError(
            f"The processor gives images of different sizes, {sorted(shapes)}; only one size can be batched."
        )
    return samples


def check_processor(processor: Any) -> None:
    """Refuse what cannot process images with text.

    Raises:
        CalibrationError: there is no processor, or it is something else.
    """
    if not all(hasattr(processor, part) for part in ("image_processor", "image_token", "tokenizer")):
        given = "there is none" if processor is None else f"a {type(processor).__name__} is none"
        pillow = "" if is_vision_available() else " It needs Pillow, which is not installed (pip install pillow)."
        raise CalibrationError(
            f"Images need the model's processor, and {given}: pass one (AutoProcessor.from_pretrained).{pillow}"
        )


def _usable(seen: Counter[str], row: tuple[Any, str | None]) -> bool:
    images, text = _listed(row[0]), row[1]
    if text is None or not text.strip():
        seen["blank"] += 1
        return False
    usable = len(images) > 0 and all(image is not None for image in images)
    seen["texts" if usable else "empty"] += 1
    return usable


def _listed(images: Any) -> list[Any]:
    return images if isinstance(images, list) else [images]


def _processed(processor: Any, request: Request, row: tuple[Any, str]) -> tuple[Tensor, Tensor] | None:
    """Return ids and pixels of a row, or None where `seq_len` leaves no room for its images."""
    text = row[1]
    with reading("an image"):
        images = [_decoded(image) for image in _listed(row[0])]
    text = _with_placeholders(text, len(images), processor.image_token)
    try:
        with plain_defaults():  # the processor makes its tensors by torch's defaults
            # Not verbose: it would warn of texts longer than the context, and these are cut here.
            output = processor(images=images, text=text, return_tensors="pt", text_kwargs={"verbose": False})
    except Exception as error:  # whatever an image processor makes of an image of an unusual kind
        raise CalibrationError(f"The processor cannot use the image of {_short(text)}: {reason_of(error)}.") from error
    pixels = torch.as_tensor(output["pixel_values"], device="cpu").float()
    ids = checked(output["input_ids"][0], request.vocab_size, TOKENISED)
    if pixels.dim() != 4 or (ids == request.image_token).sum() < len(images):
        raise CalibrationError(
            f"Of {len(images)} images the {type(processor).__name__} makes pixel values {tuple(pixels.shape)} and "
            f"{(ids == request.image_token).sum()} tokens {request.image_token}. Is it this model's? The pixel values "
            "must be (images, C, H, W), with a token or more for each image."
        )
    return None if (ids := _cut(ids, request)) is None else (ids, pixels)


def _decoded(image: Any) -> Any:
    """Decode an image that came as it is stored."""
    from datasets import Image

    return Image().decode_example(image) if isinstance(image, dict) else image


def _with_placeholders(text: str, images: int, placeholder: str) -> str:
    """Put a placeholder for each image in front, where the text has none."""
    if (found := text.count(placeholder)) == 0:
        return f"{placeholder}\n" * images + text
    if found != images:
        raise CalibrationError(f"{_short(text)} has {found} times {placeholder!r}, but comes with {images} images.")
    return text


def _short(text: str) -> str:
    return f"the text {reprlib.repr(text)}"


def _cut(ids: Tensor, request: Request) -> Tensor | None:
    """Cut text behind `seq_len` tokens of text, and whatever is behind the model's longest context."""
    is_patch = ids == request.image_token
    fits = ((~is_patch).cumsum(dim=0) <= request.seq_len) & (
        torch.arange(len(ids), device=ids.device) < request.longest
    )
    length = int(fits.sum())
    if is_patch[length:].any():
        request.seen["unfit"] += 1
        return None
    request.seen["long"] += length < len(ids)
    return ids[:length].clone()
