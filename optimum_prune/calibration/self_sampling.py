"""Samples that the model itself generates, for users without data."""

from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from optimum_prune.calibration.devices import input_device
from optimum_prune.calibration.request import image_token, vocabulary_size
from optimum_prune.calibration.tokens import TOKENISED, bos_token, checked
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from optimum_prune.modes import evaluating


def draw_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: CalibrationConfig,
    seq_len: int,
) -> list[Tensor]:
    """Draw sequences from the model's own distribution, at temperature 1.

    `model.generate` would obey the generation config (top-k, forced tokens, stop tokens), which is about good
    answers and not about the distribution. Here an end-of-sequence token ends a text, but not the sample: the
    model goes on behind it, as in packed texts, so every sample has `seq_len` tokens.

    The placeholder of an image is never drawn, since it would want an image.

    The random numbers are drawn beforehand, one per token: the samples do not depend on the batch size (but
    for the rounding of the model's own arithmetic). The global random state is neither read nor changed.

    Args:
        model: a decoder with a language-model head; left as it was.
        tokenizer: asked for the token to begin with: BOS, where it begins texts with it, or where the model's config
            names none.
        config: says `num_samples`, `batch_size` and `seed`.
        seq_len: tokens per sample, the first one included.

    Returns:
        `(seq_len,) int64` each, on the CPU.

    Raises:
        CalibrationError: this model generates no text.
    """
    check_generates(model)
    generator = torch.Generator().manual_seed(config.seed)
    first = _first_tokens(model, tokenizer, config.num_samples, generator)
    uniform = torch.rand(config.num_samples, seq_len - 1, generator=generator, dtype=torch.float64, device="cpu")
    batches = zip(first.split(config.batch_size), uniform.split(config.batch_size), strict=True)
    samples: list[Tensor] = []
    with evaluating(model), tqdm(desc="Sampling", total=uniform.numel(), unit="tok", delay=2) as bar:
        for start, u in batches:
            samples += _continue(model, start, u, bar.update).unbind()
    return samples


def check_generates(model: PreTrainedModel) -> None:
    """Refuse a model that writes no text of its own; a skeleton will do.

    Raises:
        CalibrationError: this model generates no text.
    """
    if model.config.is_encoder_decoder or not model.can_generate():
        pairs = " (with target_column, pairs of inputs and answers)" if model.config.is_encoder_decoder else ""
        raise CalibrationError(
            f"source='self' needs a decoder with a language-model head, got {type(model).__name__}. "
            f"Give texts, a file or a dataset id{pairs} as the source."
        )


@torch.no_grad()
def _continue(model: PreTrainedModel, first: Tensor, uniform: Tensor, progress: Callable[[int], object]) -> Tensor:
    """Go on from `first (B, 1) int64`, by a token per column of `uniform (B, T) float64`: `(B, 1 + T)`."""
    tokens, cache = [first], None
    image, device = image_token(model), input_device(model)
    # transformers 5.24 renamed the argument. A model swallows the wrong name, and then forgets every token.
    name = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    for u in uniform.unbind(dim=1):
        output = model(input_ids=tokens[-1].to(device), use_cache=True, **{name: cache})
        cache = output[name]
        # By inverting the distribution function, on the CPU: the same numbers give the same tokens anywhere.
        logits = output.logits[:, -1].cpu().double()
        if image is not None:
            logits[:, image : image + 1] = -torch.inf
        cdf = logits.softmax(dim=-1).cumsum(dim=-1)  # (B, V)
        if not cdf.isfinite().all():
            raise CalibrationError("The model's logits are not finite: source='self' cannot draw from them.")
        tokens.append(torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True))
        progress(len(u))
    return torch.cat(tokens, dim=1)


def _first_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    num_samples: int,
    generator: torch.Generator,
) -> Tensor:
    """Return `(num_samples, 1) int64`: BOS, else EOS, behind which texts begin too, else tokens at random."""
    vocab_size = vocabulary_size(model)
    if tokenizer is not None and (bos := bos_token(tokenizer)):
        return checked(bos, vocab_size, TOKENISED).repeat(num_samples, 1)
    for name in ("bos_token_id", "eos_token_id"):
        for owner in (model.config.get_text_config(), tokenizer):
            token = getattr(owner, name, None)
            token = token[0] if isinstance(token, list) else token  # a config may name several EOS
            if token is not None and 0 <= token < vocab_size:
                return torch.full((num_samples, 1), token, device="cpu")
    words = torch.tensor([token for token in range(vocab_size) if token != image_token(model)], device="cpu")
    return words[torch.randint(len(words), (num_samples, 1), generator=generator, device="cpu")]
