"""Mistral: Llama's blocks."""

from dataclasses import replace

from optimum_prune.adapters import llama

ADAPTER = replace(llama.ADAPTER, model_type="mistral")
