"""Gemma 2: Llama's blocks; the norms behind its sub-layers carry no units."""

from optimum_prune.adapters.llama import shaped_like_llama

ADAPTER = shaped_like_llama("gemma2", attention="attention_bias")
