"""What can be refused of calibration before a sample is read, for those who plan a run."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from optimum_prune.calibration.pairs import start_token
from optimum_prune.calibration.request import resolve
from optimum_prune.calibration.self_sampling import check_generates
from optimum_prune.calibration.sources import open_source
from optimum_prune.calibration.spans import special_tokens
from optimum_prune.calibration.tokens import needed
from optimum_prune.config import CalibrationConfig


def check_calibration(
    config: CalibrationConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    default_seq_len: int | None = None,
    skeleton: bool = False,
) -> None:
    """Refuse what `load_samples` would refuse before it reads a sample; a source is opened, no more.

    Args:
        config: as for `load_samples`.
        model: only its configs and shapes are looked at.
        tokenizer: as for `load_samples`.
        default_seq_len: as for `load_samples`.
        skeleton: the model was built from its config alone: tokenizer and generation config are not known yet.

    Raises:
        CalibrationError: the source does not exist, has no usable column, or does not fit the model.
    """
    request = resolve(config, model, default_seq_len, "first")
    if config.source == "self":
        check_generates(model)
        return
    source = open_source(config, request.model)
    if skeleton:
        return
    if request.model == "encoder-decoder":
        start_token(model)
        if source.kind == "texts":
            special_tokens(tokenizer, request.vocab_size)
    if source.kind in ("texts", "text pairs"):
        needed(tokenizer)
