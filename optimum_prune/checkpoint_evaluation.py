"""Evaluation of saved checkpoints, dense or pruned, one model in memory at a time."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from optimum_prune.calibration.data import load_samples
from optimum_prune.calibration.refusals import check_calibration
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import InvalidConfig
from optimum_prune.integrations.loading import load_companions, load_model, load_skeleton
from optimum_prune.latency import measure_latency
from optimum_prune.measurements import Evaluation, check_evaluation
from optimum_prune.pruner import Pruner
from optimum_prune.stages import DenseSide
from optimum_prune.wrapping import check_language_model

OWN = ("gguf_file", "revision", "code_revision", "subfolder")
"""Keywords of `from_pretrained` that say where the checkpoint is, and not where the dense model is."""


def evaluate_checkpoint(
    name_or_path: str | Path,
    data: CalibrationConfig,
    *,
    dense: str | Path | None = None,
    latency: bool = True,
    **kwargs: Any,
) -> dict[str, Evaluation]:
    """Measure perplexity, accuracy, size and latency of a checkpoint, and its KL to a dense model.

    The dense model is loaded first, measured and freed. Of it, the inputs of its output embedding are kept
    (`tokens * hidden` numbers in its dtype) and the output embedding itself: the KL is as exact as with both models in
    memory. The two are timed one after the other, and the table says how far apart.

    Args:
        name_or_path: a Hub id or a local folder: a dense model, or a pruned one in any layout, with its adapter.
        data: what to measure on; the first samples are used.
        dense: the dense model, a Hub id or a local folder, for the KL and the ratios.
        latency: whether to time prefill and decoding.
        kwargs: for `from_pretrained` of both models, e.g. `dtype`, `device_map`; `gguf_file`, `revision`,
            `code_revision` and `subfolder` hold for the checkpoint alone.

    Returns:
        Evaluations by name: `"dense"`, `"pruned"`, `"recovered"`. With `dense`, a checkpoint without the record of a
        pruning is called `"pruned"`. What a report beside the checkpoint says is not among them.

    Raises:
        PruningError: one of its kinds, before weights are read where that is possible.
    """
    check_evaluation(data.source, data.selection)
    shared = {key: value for key, value in kwargs.items() if key not in OWN}
    skeleton = load_skeleton(name_or_path, **kwargs)
    check_language_model(skeleton, "evaluated")
    check_calibration(data, skeleton, predicts=True, skeleton=True)
    side = None
    if dense is not None:
        if getattr(load_skeleton(dense, **shared).config, "pruning_config", None) is not None:
            raise InvalidConfig(f"{dense} is pruned itself (its config.json has pruning_config). Name the dense model.")
        side = _measure_dense(dense, data, latency, shared)
    pruner = Pruner.from_pretrained(name_or_path, **kwargs)
    pruner.evaluations = {}
    if side is not None:
        pruner.compare_with(side)
    options = {option.name: getattr(data, option.name) for option in fields(data)}
    pruner.evaluate(options.pop("source"), latency=latency, **options)
    if side is not None and "dense" not in pruner.evaluations:
        raise InvalidConfig(
            f"{dense} and {name_or_path} read other tokens in the same data, so their predictions cannot be compared. "
            "Name the model that was pruned, or leave it out."
        )
    return pruner.evaluations


def _measure_dense(dense: str | Path, data: CalibrationConfig, latency: bool, kwargs: dict[str, Any]) -> DenseSide:
    """Load and measure a dense model, which is freed on return."""
    model = load_model(dense, **kwargs)
    tokenizer, processor = load_companions(model, dense, **kwargs)
    samples = load_samples(data, model, tokenizer, processor=processor, order="first")
    timed = measure_latency({"dense": model})["dense"] if latency else None
    return DenseSide.of(model, samples, batch_size=data.batch_size, timed=timed, keep_head=True)
