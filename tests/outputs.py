"""What a language model computes, for comparison to the bit. Imports nothing of the package."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from tests.models import inputs

STEPS = 10
torch.set_num_threads(1)  # other numbers round differently, and small models lose time on them


def load(folder: Any, auto: Any = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a checkpoint; return the model, and what transformers has to complain of."""
    if auto is None:
        config = AutoConfig.from_pretrained(folder)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else auto
    model, info = auto.from_pretrained(folder, output_loading_info=True, **options)
    return model, {kind: found for kind, found in info.items() if found}


def outputs(model: Any) -> dict[str, Tensor]:
    """Return logits, and greedy generations with every cache, of a left-padded batch and its rows alone."""
    given, mask = left_padded(model)
    prompt = {name: tensor for name, tensor in given.items() if not name.startswith("decoder")}
    caches = {"uncached": {"use_cache": False}, "dynamic": {}, "static": {"cache_implementation": "static"}}
    if not model.config.is_encoder_decoder and "pixel_values" not in prompt:  # transformers chunks text alone
        caches["chunked"] = {"cache_implementation": "static", "prefill_chunk_size": 4}
    options = {"do_sample": False, "max_new_tokens": STEPS, "min_new_tokens": STEPS, "pad_token_id": 0}
    with torch.no_grad():
        padded = model(**given, attention_mask=mask).logits
        result = {
            "logits": model(**inputs(model)).logits,
            "padded": padded if model.config.is_encoder_decoder else padded[mask.bool()],
        }
        for name, cache in caches.items():
            result[name] = model.generate(**prompt, attention_mask=mask, **options, **cache)[:, -STEPS:]
        alone = [model.generate(**_row(prompt, mask, i), **options)[:, -STEPS:] for i in range(len(mask))]
    return {name: tensor.contiguous() for name, tensor in result.items()} | {"alone": torch.cat(alone)}


def left_padded(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and mask of 2 samples: a full row, and one with 5 tokens of padding on the left."""
    given = inputs(model)
    mask = torch.ones_like(given["input_ids"])
    mask[1, :5] = 0
    return given | {"input_ids": given["input_ids"].masked_fill(mask == 0, 0)}, mask


def _row(prompt: dict[str, Tensor], mask: Tensor, i: int) -> dict[str, Tensor]:
    row = {name: tensor[i][None] for name, tensor in prompt.items()}
    return row | {"input_ids": prompt["input_ids"][i][mask[i].bool()][None]}
