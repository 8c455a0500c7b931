"""What a causal language model computes, for comparison to the bit. Imports nothing of the package."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models import tokens

STEPS = 10
torch.set_num_threads(1)  # other numbers round differently, and small models lose time on them


def load(folder: object, auto: Any = AutoModelForCausalLM, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a checkpoint; return the model, and what transformers has to complain of."""
    model, info = auto.from_pretrained(folder, output_loading_info=True, **options)
    return model, {kind: found for kind, found in info.items() if found}


def outputs(model: Any) -> dict[str, Tensor]:
    """Return logits, and greedy generations with every cache, of a left-padded batch and its rows alone."""
    ids, mask = left_padded()
    caches = {
        "uncached": {"use_cache": False},
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "chunked": {"cache_implementation": "static", "prefill_chunk_size": 4},
    }
    options = {"do_sample": False, "max_new_tokens": STEPS, "min_new_tokens": STEPS, "pad_token_id": 0}
    with torch.no_grad():
        result = {
            "logits": model(input_ids=tokens()).logits,
            "padded": model(input_ids=ids, attention_mask=mask).logits[mask.bool()],
        }
        for name, cache in caches.items():
            result[name] = model.generate(ids, attention_mask=mask, **options, **cache)[:, ids.shape[1] :]
        alone = [
            model.generate(row[keep][None], **options)[:, -STEPS:] for row, keep in zip(ids, mask.bool(), strict=True)
        ]
    return {name: tensor.contiguous() for name, tensor in result.items()} | {"alone": torch.cat(alone)}


def left_padded() -> tuple[Tensor, Tensor]:
    """Return ids and mask, `(2, 12) int64`: a full row, and one with 5 tokens of padding on the left."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return ids.masked_fill(mask == 0, 0), mask
