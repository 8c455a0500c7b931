"""Measured latency of `generate`: prefill, and decoding per token."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from inspect import signature
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from optimum_prune.calibration.devices import input_device
from optimum_prune.errors import InvalidConfig, UnsupportedModel
from optimum_prune.measurements import Latency, Spread
from optimum_prune.modes import evaluating


def measure_latency(
    models: Mapping[str, PreTrainedModel],
    prefill_tokens: int = 128,
    decode_tokens: int = 32,
    repeats: int = 5,
    batch_size: int = 1,
) -> dict[str, Latency]:
    """Measure prefill and decoding of several models, interleaved: A B A B, so that a busy minute hits all.

    The first round is a warm-up. The prompt is random and the same for all; generation is greedy, and
    nothing ends it early: the models' own `generation_config` is set aside.

    Args:
        models: name -> model; left as they were.
        prefill_tokens: length of the prompt; shortened to what the models' context holds, as the result says.
        decode_tokens: new tokens, at least 2; shortened likewise.
        repeats: rounds that count.
        batch_size: sequences at a time.

    Returns:
        Name -> `Latency`.

    Raises:
        InvalidConfig: a number, or the models' context, is too small to measure anything.
        UnsupportedModel: a model's `generate` does not make as many tokens as it is told to.
    """
    asked = {
        "prefill_tokens": prefill_tokens,
        "decode_tokens": decode_tokens,
        "repeats": repeats,
        "batch_size": batch_size,
    }
    for name, value in asked.items():
        least = 2 if name == "decode_tokens" else 1
        if value < least:
            raise InvalidConfig(f"{name} must be >= {least}, got {value}.")
    prefill_tokens, decode_tokens = _fit(models, prefill_tokens, decode_tokens)
    prompt = _prompt(models, batch_size, prefill_tokens)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    with evaluating(*models.values()), torch.no_grad(), _quiet():
        for repeat in logging.tqdm(range(repeats + 1), desc="Latency", unit="round"):
            for name, model in models.items():
                first = _milliseconds(model, prompt, 1)
                whole = _milliseconds(model, prompt, decode_tokens)
                if repeat > 0:
                    prefill[name].append(first)
                    decode[name].append((whole - first) / (decode_tokens - 1))
    settings = prefill_tokens, decode_tokens, batch_size, repeats, started
    return {name: Latency(Spread.of(prefill[name]), Spread.of(decode[name]), *settings) for name in models}


def _fit(models: Mapping[str, PreTrainedModel], prefill_tokens: int, decode_tokens: int) -> tuple[int, int]:
    """Shorten both lengths to the smallest context of the models; T5 has none."""
    contexts = [
        config.max_position_embeddings
        for model in models.values()
        if hasattr(config := model.config.get_text_config(), "max_position_embeddings")
    ]
    context = min(contexts, default=prefill_tokens + decode_tokens)
    if context < 3:
        raise InvalidConfig(
            f"A context of {context} (max_position_embeddings) is too short to time: that takes at least 3 tokens, "
            "1 of the prompt and 2 new ones."
        )
    decode_tokens = min(decode_tokens, max(2, context // 2))
    return min(prefill_tokens, context - decode_tokens), decode_tokens


def _prompt(models: Mapping[str, PreTrainedModel], batch_size: int, length: int) -> Tensor:
    vocabulary = min(model.config.get_text_config().vocab_size for model in models.values())
    generator = torch.Generator().manual_seed(0)  # the global one is the user's
    return torch.randint(vocabulary, (batch_size, length), generator=generator, device="cpu")


def _milliseconds(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> float:
    device = input_device(model)
    prompt = prompt.to(device)
    mask = torch.ones_like(prompt)
    with _greedy(model, new_tokens) as config:
        _synchronize(device)
        start = perf_counter()
        output = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=prompt, attention_mask=mask, generation_config=config, **_cache(model)
        )
        _synchronize(device)
        milliseconds = 1000 * (perf_counter() - start)
    given = 1 if model.config.is_encoder_decoder else prompt.shape[1]  # a decoder of its own begins with one token
    if (shape := tuple(output.shape)) != (expected := (len(prompt), given + new_tokens)):
        # The time of other work would pass for this.
        raise UnsupportedModel(
            f"Latency cannot be measured: generate() of {type(model).__name__} returned tokens of shape {shape} "
            f"where {expected} was asked for."
        )
    return milliseconds


def _cache(model: PreTrainedModel) -> dict[str, Any]:
    """Return the cache of an encoder-decoder: its own is as long as its encoder, and fails where that is shorter."""
    if not model.config.is_encoder_decoder:
        return {}
    # transformers 5.24 renamed the argument
    name = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    return {name: EncoderDecoderCache(DynamicCache(), DynamicCache())}


@contextmanager
def _greedy(model: PreTrainedModel, new_tokens: int) -> Iterator[GenerationConfig]:
    """Set the model's own `generation_config` aside for a plain greedy one that no token or clock ends early."""
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        use_cache=True,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        # Any tokens do: no prompt is padded, and what a decoder begins with costs the same. Without an
        # end-of-sequence token nothing ends.
        pad_token_id=0,
        bos_token_id=0,
        decoder_start_token_id=0,
    )
    own = model.generation_config
    # It is not enough to pass one to `generate`: transformers fills what that leaves unset from the model's own.
    model.generation_config = config
    try:
        yield config
    finally:
        model.generation_config = own


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from commenting on every `generate`, e.g. on sampling settings that are not used."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
