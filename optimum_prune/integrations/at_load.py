"""Pruning while loading: `from_pretrained(name, quantization_config=PruningConfig(...))`."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from optimum_prune.binding import adapter_for
from optimum_prune.config import PruningConfig
from optimum_prune.errors import CheckpointError
from optimum_prune.integrations.accounting import check_chosen, load_on_meta
from optimum_prune.integrations.loading import load_companions, same_record
from optimum_prune.layouts.headers import stored_shapes
from optimum_prune.pipeline import load_scorer, needs_data, prune
from optimum_prune.report import PruningReport


def check_before(model: PreTrainedModel, files: Iterable[str | Path]) -> None:
    """Refuse what the skeleton and the files' headers already tell, before gigabytes are read.

    Args:
        model: the skeleton.
        files: safetensors or pickled ones; others are not looked at.

    Raises:
        UnsupportedArchitecture: no adapter knows the model.
        CheckpointError: the files hold tensors that the class does not read, or lack some that it needs.
    """
    adapter_for(model)
    files = [file for file in map(Path, files) if file.suffix in (".safetensors", ".bin")]
    if not files:
        return
    config: Any = copy.deepcopy(model.config)
    del config.quantization_config  # the request to prune
    _, info = load_on_meta(type(model), config, stored_shapes(files))
    check_chosen(str(model.config.name_or_path), model, info)


def prune_loaded_(model: PreTrainedModel, config: PruningConfig) -> None:
    """Prune a model that was loaded just now, in place; its report is left in `model.pruning_report`.

    The tokenizer, or the processor, is loaded from where the model came from: its name and, on the Hub, its commit.
    """
    setattr(model, "pruning_report", prune(model, config, *_companions(model, config)))  # noqa: B010 - declared nowhere


def report_at_load(model: PreTrainedModel) -> PruningReport | None:
    """Return the report of the pruning while loading, unless the model was pruned again since."""
    report = getattr(model, "pruning_report", None)
    record = getattr(model.config, "pruning_config", None)
    return report if report is not None and record is not None and same_record(report, record) else None


def _companions(model: PreTrainedModel, config: PruningConfig) -> tuple[Any, Any]:
    """Load the tokenizer and the processor, if the calibration may have a use for them."""
    if not needs_data(config, load_scorer(config)) or _reads_tokens(model, config.calibration.source):
        return None, None
    revision = getattr(model.config, "_commit_hash", None)
    options = {"revision": revision} if revision else {}
    if _runs_own_code(model):
        options["trust_remote_code"] = True
    try:
        return load_companions(model, str(model.config.name_or_path), **options)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} While a model is loaded, trust_remote_code does not reach its tokenizer: load it by "
            "Pruner.from_pretrained(..., trust_remote_code=True), then prune."
        ) from error


def _runs_own_code(model: PreTrainedModel) -> bool:
    """Tell whether the model was loaded with `trust_remote_code=True`, as far as its classes tell."""
    return any(type(part).__module__.startswith("transformers_modules.") for part in (model, model.config))


def _reads_tokens(model: PreTrainedModel, source: Any) -> bool:
    """Tell whether the source is token ids that are read as they are. Those of an encoder-decoder become questions."""
    return isinstance(source, list) and isinstance(source[0], list) and not model.config.is_encoder_decoder
