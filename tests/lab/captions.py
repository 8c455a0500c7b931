"""Pictures for vision-language models, which say what is in them."""

from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.lab import pictures
from tests.lab.pictures import Picture
from tests.lab.text import BOS, EOS, PAD

if TYPE_CHECKING:
    from datasets import Dataset

BATCH = 32
PATCH = 8  # pixels on a side
IMAGE, UNKNOWN = "<image>", "<unk>"
TRAINED, MEASURED, SHOWN = 8192, 512, 256  # pictures


def build_processor() -> LlavaProcessor:
    """Return a processor of texts with `IMAGE` in them: a token for each word of a caption, no torchvision."""
    words = [PAD, BOS, EOS, UNKNOWN, IMAGE, *pictures.WORDS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    begin = (BOS, words.index(BOS))
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[begin])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
    )
    side = {"height": pictures.SIZE, "width": pictures.SIZE}
    return LlavaProcessor(
        CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which "default" drops again
    )


class Captions:
    """Pictures with their captions.

    Attributes:
        processor: of the pictures and the texts.
    """

    def __init__(self):
        self.processor = build_processor()
        self.known = self._encode(pictures.for_training(TRAINED))

    @staticmethod
    def calibration() -> "Dataset":
        """Return pictures that were trained on, with the columns `image` and `text`."""
        return _dataset(pictures.for_training(SHOWN))

    @staticmethod
    def evaluation() -> "Dataset":
        """Return other pictures."""
        return _dataset(pictures.for_evaluation(SHOWN))

    def batch(self, generator: torch.Generator, done: float) -> dict[str, Tensor]:
        """Draw what the model's forward takes: `BATCH` pictures and texts, padded on the right."""
        rows = torch.randint(TRAINED, (BATCH,), generator=generator)
        return {name: tensor[rows] for name, tensor in self.known.items()}

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, float]:
        """Return the fraction of captions of which every token comes first, with the right picture and a wrong one."""
        batch = self._encode(pictures.for_evaluation(MEASURED))
        labels = batch.pop("labels")[:, 1:]

        def right(pixels: Tensor) -> float:
            guesses = model(**batch | {"pixel_values": pixels}).logits[:, :-1].argmax(dim=-1)
            return ((guesses == labels) | (labels == -100)).all(dim=-1).float().mean().item()

        pixels = batch["pixel_values"]
        return {"captions right": right(pixels), "with another picture": right(pixels.roll(1, dims=0))}

    def _encode(self, drawn: list[Picture]) -> dict[str, Tensor]:
        batch = self.processor(
            images=[picture.image for picture in drawn],
            text=[f"{_text(picture)} {EOS}" for picture in drawn],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        ids, tokenizer = batch["input_ids"], self.processor.tokenizer
        given = torch.tensor([tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.image_token_id])
        return {**batch, "labels": ids.masked_fill(torch.isin(ids, given), -100)}


def _dataset(drawn: list[Picture]) -> "Dataset":
    from datasets import Dataset, Features, Image, Value

    columns = {"image": [picture.image for picture in drawn], "text": [_text(picture) for picture in drawn]}
    return Dataset.from_dict(columns, features=Features({"image": Image(), "text": Value("string")}))


def _text(picture: Picture) -> str:
    return f"{IMAGE} {picture.caption}"
