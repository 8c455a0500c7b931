"""Gemma 3, the language model alone: Llama's blocks; its norms of queries and keys work inside a head."""

from dataclasses import replace

from optimum_prune.adapters import llama

ADAPTER = replace(llama.ADAPTER, model_type="gemma3_text")
