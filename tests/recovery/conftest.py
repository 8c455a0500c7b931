"""The small models and tokenizers that calibration is tested with."""

from tests.calibration.conftest import llava_model, model, processor, t5_model, t5_tokenizer, tokenizer

__all__ = ["llava_model", "model", "processor", "t5_model", "t5_tokenizer", "tokenizer"]
