"""A tokenizer and a model that need no download."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.models import llama

WORDS = "the quick brown fox jumps over the lazy dog, 12 times; the end. "


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
