"""Small random models, chosen to hurt: built in milliseconds, no file and no network."""
# pyright: reportArgumentType=false

from functools import partial
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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


VARIANTS = {name: partial(llama, **changes) for name, changes in SHAPES.items()} | {
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen2-mixed-windows": partial(
        qwen2, use_sliding_window=True, sliding_window=8, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": qwen3,
    "opt": opt,
    "opt-350m": partial(opt, word_embed_proj_dim=16, do_layer_norm_before=False),
}
"""Name -> what builds it. Every adapter needs a model of its type here: the contract tests run over these."""


def every_model() -> dict[str, PreTrainedModel]:
    """Return all variants by name."""
    return {name: build() for name, build in VARIANTS.items()}


def tokens(batch: int = 2, length: int = 12, seed: int = 0, vocabulary: int = 96) -> torch.Tensor:
    """Return random token ids, `(batch, length) int64`, none of them the padding id 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (batch, length), generator=generator)


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
