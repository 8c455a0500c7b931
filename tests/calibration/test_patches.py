"""A processor that does not fit the model is refused by its settings, before the first forward of all samples."""
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
from datasets import Dataset

from optimum_prune import CalibrationConfig, Pruner, PruningConfig
from optimum_prune.calibration.data import load_samples
from optimum_prune.errors import CalibrationError
from tests.calibration.conftest import build_processor, picture
from tests.models import llava

ROWS = Dataset.from_dict({"image": [picture(0), picture(50)], "text": ["w3 w4", "w5 w6"]})
MISFITS = [
    (
        {"edge": 24},
        r"cannot read the images of 24 x 24 pixels that the LlavaProcessor makes: .* set size and crop_size of its "
        r"image_processor to .*image_size=16",
    ),
    (
        {"additional": 0},
        r"For 1 images the LlavaProcessor writes 3 tokens 95, but LlavaForConditionalGeneration makes 4 features .*"
        r"patch_size=8, vision_feature_select_strategy='default', num_additional_image_tokens=0\.",
    ),
]


@pytest.mark.parametrize(("settings", "message"), MISFITS)
def test_a_misfit_is_refused_before_the_forward(settings, message):
    model = llava().train()
    model.model.language_model.register_forward_pre_hook(lambda *_: pytest.fail("the language model ran"))
    before = [(id(weight), weight._version) for weight in model.parameters()]
    pruner = Pruner(model, processor=build_processor(**settings))
    with pytest.raises(CalibrationError, match=message):
        pruner.prune(PruningConfig(sparsity=0.3, round_to=1, calibration=CalibrationConfig(ROWS)))
    with pytest.raises(CalibrationError, match=message):
        pruner.evaluate(ROWS)
    assert [(id(weight), weight._version) for weight in model.parameters()] == before
    assert all(module.training for module in model.modules())


def test_the_images_of_every_sample_are_counted():
    several = Dataset.from_dict({"image": [[picture(0)] * 2, [picture(1)] * 3], "text": ["w4", "w5 w6"]})
    assert len(load_samples(CalibrationConfig(several), llava(), processor=build_processor()).samples) == 2
    processor = build_processor()
    processor.__class__ = OneMore
    with pytest.raises(CalibrationError, match=r"For 3 images the OneMore writes 13 tokens 95, but .* 12 features"):
        load_samples(CalibrationConfig(several), llava(), processor=processor)


class OneMore(type(build_processor())):
    """Writes a placeholder too many for three images."""

    def __call__(self, images=None, text=None, **options):
        output = super().__call__(images=images, text=text, **options)
        if len(images or ()) == 3:
            ids = output["input_ids"]
            output["input_ids"] = torch.cat([ids[:, :1], ids], dim=1)
        return output


def test_too_little_memory_is_no_misfit(monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("full")

    model = llava()
    monkeypatch.setattr(model, "get_image_features", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_samples(CalibrationConfig(ROWS), model, processor=build_processor())
