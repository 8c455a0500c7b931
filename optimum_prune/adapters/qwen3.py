"""Qwen3: Llama's blocks; its norms of queries and keys work inside a head, so they carry no units."""

from optimum_prune.adapters.llama import shaped_like_llama

ADAPTER = shaped_like_llama("qwen3", attention="attention_bias")
