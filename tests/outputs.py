"""What a causal language model computes, for comparison to the bit. Imports nothing of the package."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import tokens

STEPS = 10


def outputs(model: PreTrainedModel) -> dict[str, Tensor]:
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
            model.generate(row[keep][None], **options)[:, -STEPS:]
            for row, keep in zip(ids, mask.bool(), strict=True)
        ]
    return {name: tensor.contiguous() for name, tensor in result.items()} | {"alone": torch.cat(alone)}


def left_padded() -> tuple[Tensor, Tensor]:
    """Return ids and mask, `(2, 12) int64`: a full row, and one with 5 tokens of padding on the left."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return ids.masked_fill(mask == 0, 0), mask
