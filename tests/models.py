"""Small random models, chosen to hurt: built in milliseconds, no file and no network."""
# pyright: reportArgumentType=false

from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    T5Config,
    T5ForConditionalGeneration,
)

IMAGE_TOKEN = 95
PATCHES = 4

SHAPES = {
    "llama-gqa": {},
    "llama-mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "llama-mqa": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {
        "head_dim": 10,
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "llama-odd-width": {
        "intermediate_size": 37,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
}


def llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """Return a random Llama of 3 layers: hidden 32, MLP 48, 8 query and 4 KV heads, vocabulary 96."""
    return _build(LlamaForCausalLM, LlamaConfig(**_BASE | changes), seed)


def mistral(seed: int = 0, **changes) -> MistralForCausalLM:
    """Return a random Mistral of the same shape, with a sliding window shorter than the test sequences."""
    return _build(MistralForCausalLM, MistralConfig(**_BASE | {"sliding_window": 8} | changes), seed)


def qwen2(seed: int = 0, **changes) -> Qwen2ForCausalLM:
    """Return a random Qwen2 of the same shape; it has biases on queries, keys and values, and none on the output."""
    return _build(Qwen2ForCausalLM, Qwen2Config(**_BASE | changes), seed)


def qwen3(seed: int = 0, **changes) -> Qwen3ForCausalLM:
    """Return a random Qwen3 of the same shape, with heads that are wider than hidden_size / heads."""
    return _build(Qwen3ForCausalLM, Qwen3Config(**_BASE | {"head_dim": 8} | changes), seed)


def opt(seed: int = 0, **changes) -> OPTForCausalLM:
    """Return a random OPT of 3 layers: hidden 32, MLP 48, 8 heads, vocabulary 96."""
    shape = {
        key: _BASE[key] for key in _BASE.keys() - {"intermediate_size", "num_key_value_heads", "initializer_range"}
    }
    config = OPTConfig(**shape | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3} | changes)
    return _build(OPTForCausalLM, config, seed)


def gemma2(seed: int = 0, **changes) -> Gemma2ForCausalLM:
    """Return a random Gemma 2 of the same shape: norms behind sub-layers, every second window short, capped logits."""
    return _build(Gemma2ForCausalLM, Gemma2Config(**_BASE | {"head_dim": 8, "sliding_window": 8} | changes), seed)


def with_scaled_logits(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model return its logits times 0.5, which is not what its output embedding returns."""

    def scale(module, args, output):
        output.logits = output.logits * 0.5
        return output

    model.register_forward_hook(scale)
    return model


def gemma3(seed: int = 0, **changes) -> Gemma3ForCausalLM:
    """Return a random Gemma 3 of the same shape, without its tower."""
    config = Gemma3TextConfig(**_BASE | {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2} | changes)
    return _build(Gemma3ForCausalLM, config, seed)


def t5(seed: int = 0, **changes) -> T5ForConditionalGeneration:
    """Return a random T5: 3 + 3 layers, hidden 32, MLP 48, 8 heads of 6, vocabulary 96."""
    shape = {
        "vocab_size": 96,
        "d_model": 32,
        "d_kv": 6,
        "d_ff": 48,
        "num_layers": 3,
        "num_heads": 8,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "decoder_start_token_id": 0,
        "eos_token_id": 2,
        "dropout_rate": 0.1,
    }
    return _build(T5ForConditionalGeneration, T5Config(**shape | changes), seed)


def llava(seed: int = 0, text: Any = None, siglip: bool = False, **changes) -> LlavaForConditionalGeneration:
    """Return a random LLaVA: a tower of 3 layers that makes 4 patches of a picture, and the Llama above."""
    shape = {
        "hidden_size": 24,
        "intermediate_size": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    vision = SiglipVisionConfig(**shape) if siglip else CLIPVisionConfig(**shape, initializer_range=0.3)
    if siglip:  # it has no class token to leave out
        changes = {"vision_feature_select_strategy": "full"} | changes
    text = LlamaConfig(**_BASE) if text is None else text
    changes = {"image_token_index": IMAGE_TOKEN, "image_seq_length": PATCHES, "pad_token_id": 0} | changes
    return _build(LlavaForConditionalGeneration, LlavaConfig(vision_config=vision, text_config=text, **changes), seed)


def llava_around_qwen2() -> LlavaForConditionalGeneration:
    """Return a random LLaVA around a Qwen2 with tied embeddings, which never generates the token of an image."""
    model = llava(text=qwen2(tie_word_embeddings=True).config, tie_word_embeddings=True)
    model.lm_head.weight.data[IMAGE_TOKEN] = 0
    return model


VARIANTS = {name: partial(llama, **changes) for name, changes in SHAPES.items()} | {
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen2-mixed-windows": partial(
        qwen2, use_sliding_window=True, sliding_window=8, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": qwen3,
    "opt": opt,
    "opt-350m": partial(opt, word_embed_proj_dim=16, do_layer_norm_before=False),
    "gemma2": gemma2,
    "gemma3": gemma3,
    "t5": t5,
    "t5-gated": partial(
        t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_layers=4, num_decoder_layers=3
    ),
    "llava": llava,
    "llava-qwen2": llava_around_qwen2,
}
"""Name -> what builds it. Every adapter needs a model of its type here: the contract tests run over these."""


def every_model() -> dict[str, PreTrainedModel]:
    """Return all variants by name."""
    return {name: build() for name, build in VARIANTS.items()}


def tokens(batch: int = 2, length: int = 12, seed: int = 0, vocabulary: int = 96) -> torch.Tensor:
    """Return random token ids, `(batch, length) int64`, none of them the padding id 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (batch, length), generator=generator)


def inputs(model: PreTrainedModel, batch: int = 2, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return what a forward of any variant takes; no padding, and an image in every sample of a LLaVA."""
    if model.config.is_encoder_decoder:
        answer = tokens(batch, length - 3, seed + 1)
        return {"input_ids": tokens(batch, length, seed), "decoder_input_ids": answer}
    if not hasattr(model.config, "vision_config"):
        return {"input_ids": tokens(batch, length, seed)}
    ids = tokens(batch, length, seed, vocabulary=IMAGE_TOKEN)
    ids[:, 6 : 6 + PATCHES] = IMAGE_TOKEN
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}


def source(model: PreTrainedModel, samples: int = 4, length: int = 12) -> Any:
    """Return a calibration source for any variant: token ids, or pairs of them for an encoder-decoder."""
    ids = [tokens(1, length, seed=i, vocabulary=90)[0].tolist() for i in range(samples)]
    if not model.config.is_encoder_decoder:
        return ids
    return Dataset.from_dict({"input_ids": ids, "labels": [row[2:] for row in reversed(ids)]})


_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # the default of 0.02 makes a random model almost linear, and its logits almost equal
    "initializer_range": 0.3,
}


def _build(model_class, config, seed):
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers starts biases at zero, where a lost one would not be noticed
            torch.nn.init.normal_(parameter, std=0.3)
    return model
