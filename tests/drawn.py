"""Calibration data for any of the small models, of samples that differ in length."""

from transformers import PreTrainedModel

from optimum_prune.calibration.data import CalibrationData
from tests.models import IMAGE_TOKEN, inputs


def data_for(model: PreTrainedModel, samples: int = 3, seed: int = 0) -> CalibrationData:
    """Return samples of 11 to 15 tokens: with a picture each for a LLaVA, with targets for an encoder-decoder."""
    rows = [inputs(model, 1, 11 + (2 * i) % 5, seed=seed + i) for i in range(samples)]
    answers, images = "decoder_input_ids" in rows[0], "pixel_values" in rows[0]
    return CalibrationData(
        [row["input_ids"][0] for row in rows],
        16,
        "drawn",
        targets=[row["decoder_input_ids"][0] for row in rows] if answers else None,
        start=0 if answers else None,
        images=[row["pixel_values"] for row in rows] if images else None,
        image_token=IMAGE_TOKEN if images else None,
    )
