"""Gemma 3, the language model alone: Llama's blocks; its norms of queries and keys work inside a head."""

from optimum_prune.adapters.llama import shaped_like_llama

ADAPTER = shaped_like_llama("gemma3_text", attention="attention_bias")
