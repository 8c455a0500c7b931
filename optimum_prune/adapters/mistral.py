"""Mistral: Llama's blocks."""

from optimum_prune.adapters.llama import shaped_like_llama

ADAPTER = shaped_like_llama("mistral")
