"""Tokenizers, a processor and models that need no download."""

import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessorPil,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from tests import words
from tests.models import llama, llava, t5

WORDS = "the quick brown fox jumps over the lazy dog, 12 times; the end. "
SENTINELS = 20


@pytest.fixture  # not shared: a tokenizer warns of long texts once in its life
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: "<s>" is 0, "</s>" is 1, 280 tokens in all. It claims a context of 16 tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", model_max_length=16)


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return llama(vocab_size=280)


@pytest.fixture
def t5_tokenizer() -> T5Tokenizer:
    """T5's own class: "<pad>", "</s>" and "<unk>" are 0, 1 and 2; words; 20 sentinels, the first has the last id."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -9.0)]
    vocabulary += [(f"▁{word.strip(',;.')}", -2.0) for word in dict.fromkeys(WORDS.split())]
    vocabulary += [(f"▁w{i}", -2.0) for i in range(40)]
    vocabulary += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(SENTINELS))]
    return T5Tokenizer(vocab=vocabulary, extra_ids=SENTINELS, model_max_length=16)


@pytest.fixture(scope="session")
def t5_model() -> T5ForConditionalGeneration:
    return t5(eos_token_id=1)


@pytest.fixture(scope="session")
def llava_model() -> LlavaForConditionalGeneration:
    """It makes 4 patches of an image; its image token is 95."""
    return llava()


@pytest.fixture
def processor() -> LlavaProcessor:
    """Words `w3` ... `w94` and `<image>`, the token 95; images become 16 x 16."""
    return build_processor()


def build_processor(edge: int = 16, additional: int = 1) -> LlavaProcessor:
    """Return a processor that fits the small LLaVA, or one of other sizes."""
    tokenizer = words.tokenizer(95)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": edge}, crop_size={"height": edge, "width": edge}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=additional,
    )


def picture(shade: int) -> Image.Image:
    return Image.new("RGB", (20, 30), (shade, 255 - shade, 0))
