"""Qwen2 and Qwen2.5: Llama's blocks, with biases on the queries, keys and values."""

from optimum_prune.adapters.llama import ATTENTION, shaped_like_llama

ADAPTER = shaped_like_llama("qwen2", attention=ATTENTION.writers)
