"""Qwen2 and Qwen2.5: Llama's blocks, with biases on the queries, keys and values."""

from dataclasses import replace

from optimum_prune.adapters import llama

ADAPTER = replace(llama.ADAPTER, model_type="qwen2")
