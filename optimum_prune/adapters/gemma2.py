"""Gemma 2: Llama's blocks; the norms behind its sub-layers carry no units."""

from dataclasses import replace

from optimum_prune.adapters import llama

ADAPTER = replace(llama.ADAPTER, model_type="gemma2")
