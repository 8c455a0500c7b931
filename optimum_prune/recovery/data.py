"""From a config to training data: sources by their shares, and samples that are held out."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from optimum_prune import processes
from optimum_prune.calibration.data import source_name
from optimum_prune.calibration.pairs import start_token
from optimum_prune.calibration.request import image_token
from optimum_prune.calibration.samples import no_second_token
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.samples import Features, TrainingData, counts, sample_digest
from optimum_prune.recovery.sources import SELF, SEQ_LEN, asked_of, features, shares

__all__ = ["TrainingData", "load_training_data"]

logger = logging.getLogger(__name__)

Origin = tuple[int, Features]
"""A sample, and which of the sources it comes from."""


def load_training_data(
    config: RecoveryConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: Any = None,
    *,
    calibration: str | None = None,
    dense: PreTrainedModel | None = None,
) -> TrainingData:
    """Get the samples that a config asks for, and hold some out.

    Plain text is cut into windows, as for calibration. Of questions with answers, and of chats, decoders are trained on
    the answers alone; encoder-decoders read the question and give the answer, or restore spans of plain text.

    Args:
        config: what to read, and how much of it.
        model: the pruned model.
        tokenizer: needed for texts.
        processor: needed for images; brings the tokenizer along.
        calibration: the source of the data that the model was pruned with, as its report names it.
        dense: writes the text of source "self", where it is given; else the pruned model does.

    Raises:
        CalibrationError: a source cannot be read, has nothing usable in it, or does not fit the model; or there are too
            few samples to hold any out.
    """
    tokenizer = tokenizer or getattr(processor, "tokenizer", None)
    start = start_token(model) if model.config.is_encoder_decoder else None
    seen = config.max_steps * config.batch_size * config.gradient_accumulation * processes.count()
    wanted = config.num_samples or seen
    total = math.ceil(wanted / (1 - config.held_out))
    found: list[Origin] = []
    sources: list[dict[str, Any]] = []
    for source, share in shares(config, model, calibration):
        asked = asked_of(config, source, math.ceil(total * share))
        described, samples = features(asked, model, tokenizer, processor, dense)
        found += [(len(sources), sample) for sample in samples]
        sources.append(described | {"share": share})
    if not found:
        raise no_second_token("Training", config.seq_len or SEQ_LEN)
    _warn_of_style([source["source"] for source in sources], calibration)

    train, held_out = _split(found, config, wanted)
    for i, source in enumerate(sources):
        source |= counts([sample for origin, sample in train if origin == i])
    data = TrainingData([sample for _, sample in train], held_out, sources, _padding(model), start)
    if image_token(model) is not None and not any("pixel_values" in sample for sample in data.train):
        logger.warning("Training shows no images, which this model reads too: give a dataset with a column of images.")
    _report(data, seen)
    return data


def _split(found: Sequence[Origin], config: RecoveryConfig, wanted: int) -> tuple[list[Origin], list[Features]]:
    """Hold out a seeded draw of samples; of the others, train on `wanted` that equal none of these."""
    generator = torch.Generator().manual_seed(config.seed)
    shuffled = [found[i] for i in torch.randperm(len(found), generator=generator, device="cpu").tolist()]
    first = max(1, math.floor(config.held_out * len(found)))
    held_out = [sample for _, sample in shuffled[:first]]
    known = set(map(sample_digest, held_out))
    train = [(origin, sample) for origin, sample in shuffled[first:] if sample_digest(sample) not in known]
    if not train:
        raise CalibrationError(
            f"Training needs at least two different samples, one of them held out; {len(found)} were found, and none "
            "is left beside those held out and their copies. Give more data, or set a lower seq_len or held_out."
        )
    if copies := len(found) - first - len(train):
        logger.warning("%d samples equal one that is held out, and were left out.", copies)
    return train[:wanted], held_out


def _padding(model: PreTrainedModel) -> int:
    """Return the model's own padding; where it names none, any id will do: it is masked."""
    token = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if token is not None and token >= 0 else 0


def _warn_of_style(sources: list[str], calibration: str | None) -> None:
    if calibration is None or calibration == SELF:
        return
    if sources == [source_name(CalibrationConfig(calibration))]:
        logger.warning(
            "Training on nothing but %s, the data of the calibration: whatever is measured on such text gets better by "
            "learning its style alone. Compare with the dense model trained alike, or measure on other text.",
            calibration,
        )


def _report(data: TrainingData, seen: int) -> None:
    found = counts(data.train)
    logger.info(
        "Training on %d samples: %d of their %d tokens. %d more are held out.",
        found["samples"],
        found["trained_tokens"],
        found["tokens"],
        len(data.held_out),
    )
    if len(data.train) < seen:
        logger.info("The steps take %d samples: each is seen %.1f times.", seen, seen / len(data.train))
