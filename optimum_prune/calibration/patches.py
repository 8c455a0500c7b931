"""Whether a processor and a model agree on images: tried on one, before the first forward of all samples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optimum_prune.calibration.devices import input_device
from optimum_prune.calibration.rows import reason_of
from optimum_prune.errors import CalibrationError
from optimum_prune.modes import evaluating

COUNTING = ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")
"""Attributes of a processor that decide how many placeholders it writes for an image."""


def check_patches(
    model: PreTrainedModel, processor: Any, samples: Sequence[Tensor], images: Sequence[Tensor], image_token: int
) -> None:
    """Refuse samples in which placeholders and patches are not the same number.

    Args:
        model: makes the patches of one image; left as it was.
        processor: made the samples.
        samples: token ids `(T_i,) int64`.
        images: pixel values `(n_i, C, H, W) float32` of each sample, all of one size.
        image_token: the placeholder.

    Raises:
        CalibrationError: the images are not of the size that the model reads, or the numbers differ; the settings of
            the processor are named.
    """
    patches = _patches(model, processor, images[0][:1])
    for ids, pixels in zip(samples, images, strict=True):
        written, wanted = int((ids == image_token).sum()), patches * len(pixels)
        if written != wanted:
            settings = [f"{name}={getattr(processor, name)!r}" for name in COUNTING if hasattr(processor, name)]
            raise CalibrationError(
                f"For {len(pixels)} images the {type(processor).__name__} writes {written} tokens {image_token}, but "
                f"{type(model).__name__} makes {wanted} features of them. Load the processor of this checkpoint, or "
                f"correct what it counts by: {', '.join(settings)}."
            )


@torch.no_grad()
def _patches(model: PreTrainedModel, processor: Any, image: Tensor) -> int:
    """Count the features that the model makes of `image (1, C, H, W)`."""
    try:
        with evaluating(model):
            output: Any = model.get_image_features(pixel_values=image.to(input_device(model)))  # pyright: ignore[reportCallIssue]
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError) as error:  # each tower has its own words for a size that it does not read
        height, width = image.shape[2:]
        size = getattr(model.config.vision_config, "image_size", None)
        raise CalibrationError(
            f"{type(model).__name__} cannot read the images of {height} x {width} pixels that the "
            f"{type(processor).__name__} makes: {reason_of(error)}. Load the processor of this checkpoint, or set size "
            f"and crop_size of its image_processor to what the model reads (vision_config.image_size={size})."
        ) from error
    return len(output.pooler_output[0])
