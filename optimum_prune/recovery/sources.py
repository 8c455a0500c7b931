"""What a model is trained on: which sources, by which shares, and the features of one."""

import logging
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from optimum_prune.calibration.data import CalibrationData, read_samples, reported
from optimum_prune.calibration.files import COLUMNS, options_of
from optimum_prune.calibration.request import model_kind, resolve
from optimum_prune.calibration.sources import open_source
from optimum_prune.config import IN_MEMORY, CalibrationConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.objectives import IGNORED
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.responses import KINDS, ask, responses
from optimum_prune.recovery.samples import Features

logger = logging.getLogger(__name__)

SEQ_LEN = 512
"""Tokens of a sequence where the config says nothing; each takes far more memory in training than in a forward."""
SELF = "self"
SAMPLING = 4
"""Batches of training that are sampled at once: they fit easily without gradients, and it is that much faster."""


def shares(config: RecoveryConfig, model: PreTrainedModel, calibration: str | None) -> list[tuple[Any, float]]:
    """Return sources, each with the fraction of all samples that it gives.

    By default the model's own text and the calibration data have a half each; where there is only one, it is all.

    Raises:
        CalibrationError: the config names no source, and there is neither.
    """
    dataset = config.dataset
    if isinstance(dataset, Mapping) and not hasattr(dataset, "column_names"):
        return [(source, share / sum(dataset.values())) for source, share in dataset.items()]
    if dataset is not None:
        return [(dataset, 1.0)]
    writes = not model.config.is_encoder_decoder and model.can_generate()
    sources: list[Any] = [SELF] * writes
    if calibration is not None and calibration != SELF and not calibration.startswith(IN_MEMORY):
        sources.append(calibration)
    if not sources:
        raise CalibrationError(
            f"{type(model).__name__} writes no text of its own to be trained on, and there is no calibration data that "
            "can be read again. Set dataset to texts, a file or a dataset id."
        )
    return [(source, 1 / len(sources)) for source in sources]


def asked_of(config: RecoveryConfig, source: Any, samples: int) -> CalibrationConfig:
    """Describe what is read of a source as calibration does.

    Of several sources, each gets the options that can have an effect on it; of a single one, `open_source` refuses the
    others.
    """
    alike = ("seq_len", "batch_size", "seed")
    options = ("split", *COLUMNS)
    if isinstance(config.dataset, Mapping) and len(config.dataset) > 1 and not hasattr(config.dataset, "column_names"):
        options = (name for name in options if name in options_of(source))
    return CalibrationConfig(
        source, num_samples=samples, **{name: getattr(config, name) for name in (*alike, *options)}
    )


def features(
    asked: CalibrationConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: Any,
    dense: PreTrainedModel | None,
) -> tuple[dict[str, Any], list[Features]]:
    """Load samples of one source.

    Args:
        asked: the source, and how much of it.
        model: the pruned model.
        tokenizer: needed for texts.
        processor: needed for images.
        dense: writes the text of source "self", where it is given.

    Returns:
        The source in plain JSON types, and samples of which some token is trained on.

    Raises:
        CalibrationError: the source cannot be read, has nothing usable in it, or does not fit the model.
    """
    if asked.source == SELF:
        data, labels = _written(asked, model if dense is None else dense, tokenizer), None
    else:
        data, labels = _read(asked, model, tokenizer, processor)
    found = _labelled(data, labels)
    usable = [sample for sample in found if (sample["labels"] != IGNORED).any()]
    if lost := len(found) - len(usable):
        logger.warning("%d samples of %s hold nothing to be trained on, and were left out.", lost, data.source)
    return data.origin, usable


def _written(
    asked: CalibrationConfig, writer: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> CalibrationData:
    # Another seed than calibration's, by which the scores have seen what is drawn.
    seed = random.Random(f"recovery {asked.seed}").getrandbits(62)
    asked = replace(asked, seed=seed, batch_size=asked.batch_size * SAMPLING, target_column=None)
    return read_samples(None, resolve(asked, writer, SEQ_LEN, "random"), writer, tokenizer, None)


def _read(
    asked: CalibrationConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, processor: Any
) -> tuple[CalibrationData, list[Tensor] | None]:
    """Return samples, and their labels where only answers are trained on."""
    kind = model_kind(model)
    # Calibration has no use for the answers that a decoder gives, and refuses to be asked for them.
    known = asked if kind == "encoder-decoder" else replace(asked, target_column=None)
    request = replace(resolve(known, model, SEQ_LEN, "random"), config=asked)
    source = open_source(asked, kind, training=True)
    if kind == "encoder-decoder" or source.kind not in KINDS:
        return read_samples(source, request, model, tokenizer, processor), None
    found = responses(source, tokenizer, request)
    data = reported(request, samples=[ids for ids, _ in found], task="answers")
    return data, [labels for _, labels in found]


def _labelled(data: CalibrationData, labels: list[Tensor] | None) -> list[Features]:
    """Put samples beside their labels: those given, else the targets, else the words of the sample itself."""
    labels = labels or data.targets or [ask(ids, _words(ids, data.image_token)) for ids in data.samples]
    found = [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(data.samples, labels, strict=True)]
    for sample, pixels in zip(found, data.images or [], strict=False):
        sample["pixel_values"] = pixels
    return found


def _words(ids: Tensor, image_token: int | None) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if image_token is None else ids != image_token
