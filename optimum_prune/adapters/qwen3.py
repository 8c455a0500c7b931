"""Qwen3: Llama's blocks; its norms of queries and keys work inside a head, so they carry no units."""

from dataclasses import replace

from optimum_prune.adapters import llama

ADAPTER = replace(llama.ADAPTER, model_type="qwen3")
