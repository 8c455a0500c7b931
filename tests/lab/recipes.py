"""What is trained, on what, and for how long."""
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.lab.captions import IMAGE, PATCH, Captions
from tests.lab.continuation import Continuation
from tests.lab.pictures import SIZE
from tests.lab.spans import Spans
from tests.lab.text import WINDOW


class Task(Protocol):
    """Data, and the tokenizer or processor that goes with it."""

    processor: Any

    @staticmethod
    def calibration() -> Any:
        """Return a source of calibration data: some of what is trained on."""

    @staticmethod
    def evaluation() -> Any:
        """Return a source of the same kind, with nothing in it that is trained on."""

    def batch(self, generator: torch.Generator, done: float) -> dict[str, Tensor]:
        """Draw the arguments of the model's forward, `labels` among them.

        Args:
            generator: the only source of randomness.
            done: fraction of the training that is over, in [0, 1).
        """
        ...

    def measure(self, model: Any) -> dict[str, float]:
        """Return what the model makes of data that it was not trained on, and a bound to compare that with."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How one model comes about."""

    task: type[Task]
    build: Callable[[PreTrainedTokenizerBase], PreTrainedModel]
    steps: int = 200
    learning_rate: float = 0.03


def llama(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """5 layers, hidden 128, MLP 384, 8 query and 4 KV heads."""
    return LlamaForCausalLM(LlamaConfig(**_decoder(tokenizer) | {"num_hidden_layers": 5}))


def qwen2(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """4 layers, hidden 128, MLP 448, 8 query and 2 KV heads; biases on queries, keys and values."""
    return Qwen2ForCausalLM(Qwen2Config(**_decoder(tokenizer) | {"intermediate_size": 448, "num_key_value_heads": 2}))


def qwen3(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """4 layers, hidden 128, MLP 384, 8 query and 4 KV heads of 24, wider than hidden / heads; query and key norms."""
    return Qwen3ForCausalLM(Qwen3Config(**_decoder(tokenizer), head_dim=24))


def opt(tokenizer: PreTrainedTokenizerBase) -> OPTForCausalLM:
    """4 layers, hidden 128, MLP 512, 8 heads; biases everywhere, learned positions."""
    shape = _decoder(tokenizer)
    for unknown in ("intermediate_size", "num_key_value_heads", "initializer_range"):
        del shape[unknown]
    return OPTForCausalLM(OPTConfig(**shape, ffn_dim=512, word_embed_proj_dim=128, init_std=0.04, **_NO_DROPOUT))


def t5(tokenizer: PreTrainedTokenizerBase) -> T5ForConditionalGeneration:
    """4 encoder and 3 decoder layers, hidden 128, gated MLP 256, 6 heads of 16, together narrower than hidden."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_ff=256,
        d_kv=16,
        num_heads=6,
        num_layers=4,
        num_decoder_layers=3,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=False,  # T5 ties its head anyway; this only leaves outputs unscaled, as in v1.1
        initializer_factor=0.4,
        decoder_start_token_id=tokenizer.pad_token_id,
        **_special(tokenizer),
    )
    model = T5ForConditionalGeneration(config)
    torch.nn.init.normal_(model.shared.weight, std=0.1)  # the factor's 0.4 makes logits that are not scaled too large
    return model


def llava(tokenizer: PreTrainedTokenizerBase) -> LlavaForConditionalGeneration:
    """CLIP of 3 layers, hidden 96, MLP 384, 4 heads; Llama of 3 layers, hidden 128, MLP 384, 8 query and 4 KV heads.

    The last layer of CLIP is never asked, as in all LLaVA models.
    """
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=96,
        image_size=SIZE,
        patch_size=PATCH,
    )
    text = LlamaConfig(**_decoder(tokenizer) | {"num_hidden_layers": 3})
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=(SIZE // PATCH) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)


RECIPES = {
    "llama": Recipe(Continuation, llama),
    "qwen2": Recipe(Continuation, qwen2),
    "qwen3": Recipe(Continuation, qwen3),
    "opt": Recipe(Continuation, opt),
    "t5": Recipe(Spans, t5, learning_rate=0.05),
    "llava": Recipe(Captions, llava),
}


def recipe(name: str) -> Recipe:
    """Return a recipe by name."""
    if name not in RECIPES:
        raise ValueError(f"The lab has no model {name!r}; it has: {', '.join(RECIPES)}.")
    return RECIPES[name]


_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}


def _decoder(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": WINDOW,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,  # the usual 0.02 is for wider models
        "bos_token_id": tokenizer.bos_token_id,
        **_special(tokenizer),
    }


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
