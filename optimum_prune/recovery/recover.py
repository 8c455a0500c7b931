"""The recovery on one screen: data, teacher, adapter, training, merge, measurements before and after."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from optimum_prune import processes
from optimum_prune.calibration.devices import is_spread, machine
from optimum_prune.calibration.request import model_kind
from optimum_prune.calibration.samples import no_second_token
from optimum_prune.calibration.self_sampling import check_generates
from optimum_prune.calibration.sources import check_options, open_source
from optimum_prune.errors import InvalidConfig, PruningError, UnsupportedModel
from optimum_prune.layouts.forms import check_writable_
from optimum_prune.measurements import describe_machine
from optimum_prune.modes import as_it_was, plain_defaults
from optimum_prune.planning.layout import skeleton_of
from optimum_prune.recovery.adapter import is_adapter
from optimum_prune.recovery.arguments import check_trainer_options
from optimum_prune.recovery.checkpoints import checkpoints, digest, writing
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.data import load_training_data
from optimum_prune.recovery.lora import attached, merge_, target_modules
from optimum_prune.recovery.objective import Collate, Objective
from optimum_prune.recovery.report import Losses, RecoveryReport
from optimum_prune.recovery.sources import SELF, asked_of, shares
from optimum_prune.recovery.teacher import CachedTeacher, LiveTeacher, Teacher, beside, collating, indexed
from optimum_prune.recovery.training import train
from optimum_prune.sparsity import pruned_linears
from optimum_prune.wrapping import check_language_model

Dense = Callable[[], PreTrainedModel]
"""Loads the dense model."""


@plain_defaults()  # transformers' Trainer and PEFT follow torch's defaults
def recover(
    model: PreTrainedModel,
    config: RecoveryConfig,
    tokenizer: Any = None,
    processor: Any = None,
    *,
    dense: Dense | None = None,
    calibration: Any = None,
    directory: str | Path | None = None,
    adapter: str | Path | None = None,
) -> RecoveryReport:
    """Train LoRA adapters on a pruned model, and merge them into its weights.

    Where no step is better than none on the held-out samples, the model stays as it was. So it does after an error, up
    to the merge.

    Args:
        model: pruned in any way; merged in place.
        config: what to train on, and how.
        tokenizer: needed where the data is text.
        processor: of a multimodal model; brings the tokenizer along.
        dense: loads the dense model: the teacher of losses "kl" and "mix", and the writer of the default text.
        calibration: source of the data that the model was pruned with; half of the default text.
        directory: where checkpoints of the training go, to resume from after a break; a temporary one by default.
        adapter: where to write the adapter with `merge="none"`, as PEFT does.

    Returns:
        What was trained, and what it gave.

    Raises:
        PruningError: one of its kinds, before anything is trained; says what to do.
    """
    start = time.perf_counter()
    RecoveryConfig.check_type(config)
    processes.join()
    check_recovery(model, config, calibration=calibration)
    if config.uses_teacher and dense is None:
        raise InvalidConfig(
            f"loss={config.loss!r} asks the dense model, and it cannot be loaded again. Name it (dense=), or use "
            "loss='lm'."
        )
    if (config.merge == "none") != (adapter is not None):
        raise InvalidConfig("adapter= names where an adapter is written that is not merged: it goes with merge='none'.")
    if is_spread(model) and processes.count() > 1:
        raise InvalidConfig(
            f"Each of the {processes.count()} processes needs a whole model on its device, and this one is spread over "
            "several. Load it with device_map='cuda', or start one process."
        )
    writes = any(isinstance(source, str) and source == SELF for source, _ in shares(config, model, calibration))
    teacher_model = None
    if dense is not None and (config.uses_teacher or writes):
        teacher_model = beside(dense(), model, config.teacher_device)
        _check_teacher(teacher_model, model)
    data = load_training_data(config, model, tokenizer, processor, calibration=calibration, dense=teacher_model)
    collate = collating(data.collate, shifted=not model.config.is_encoder_decoder)
    samples, held_out = indexed(data.train), indexed(data.held_out, first=len(data.train))

    def identity() -> dict[str, Any]:
        return {"config": config.to_dict(), "data": data.fingerprint, "weights": digest(model)}

    with checkpoints(directory, identity) as folder, as_it_was(model, config.gradient_checkpointing):
        teacher = _teacher(config, teacher_model, [*samples, *held_out], collate)
        del teacher_model  # of the cached teacher nothing more is needed
        objective = Objective.of(config, model, teacher)

        def measure(measured: Any) -> Losses:
            return processes.from_main(objective.measure(measured, held_out, collate, config.batch_size))

        before, pruned = measure(model), pruned_linears(model)
        zeros = _zeros(pruned)
        with attached(model, config) as adapted:
            parameters = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
            with writing(folder):
                trained = train(adapted, config, objective, samples, held_out, collate, folder)
            after = measure(adapted)
            # no comparison with NaN is true
            kept = trained.best_step > 0 and objective.of_losses(after) < objective.of_losses(before)
            if kept and adapter is not None:
                processes.in_main(lambda: _write(adapted, Path(adapter)))
                if not is_adapter(Path(adapter)):  # another process may have a folder of its own
                    _write(adapted, Path(adapter))
            elif kept:
                _merge(adapted, config.merge)
    report = RecoveryReport(
        config=config.to_dict(),
        data=data.to_dict(),
        before=before,
        after=after if kept else before,
        merged=measure(model) if kept and adapter is None else None,
        kept=kept,
        steps=trained.steps,
        best_step=trained.best_step if kept else 0,
        curve=trained.curve,
        trained_parameters=parameters,
        zeros_before=zeros,
        zeros_after=_zeros(pruned),
        seconds=time.perf_counter() - start,
        machine=processes.each(describe_machine(**machine(model))),
    )
    report.warnings = _warnings(report, objective, trained.diverged)
    return report


def check_recovery(model: PreTrainedModel, config: RecoveryConfig, *, calibration: Any = None) -> None:
    """Refuse what can be refused before hours of pruning: options, patterns, sources of data.

    Args:
        model: as for `recover`, or its skeleton.
        config: as for `recover`.
        calibration: as for `recover`.

    Raises:
        PruningError: one of its kinds; says what to do.
    """
    check_language_model(model, "recovered")
    check_trainer_options(config.trainer_options)
    target_modules(model, config)
    if config.seq_len == 1 and model_kind(model) == "decoder":
        raise no_second_token("seq_len=1", 1)
    check_writable_(skeleton_of(model))
    for source, _ in shares(config, model, calibration):
        if source == SELF:
            check_generates(model)
            if config.dataset == SELF:  # with other sources, the options are those of these
                check_options(asked_of(config, source, 1))
        else:
            open_source(asked_of(config, source, 1), model_kind(model), training=True)


def _check_teacher(dense: PreTrainedModel, model: PreTrainedModel) -> None:
    sizes = [found.config.get_text_config().vocab_size for found in (dense, model)]
    kinds = [found.config.is_encoder_decoder for found in (dense, model)]
    if sizes[0] != sizes[1] or kinds[0] != kinds[1]:
        raise InvalidConfig(
            f"The dense model, a {type(dense).__name__} of {sizes[0]:,} tokens, cannot teach a {type(model).__name__} "
            f"of {sizes[1]:,}: they predict different things. Name the model that was pruned."
        )


def _teacher(
    config: RecoveryConfig, dense: PreTrainedModel | None, samples: list[Any], collate: Collate
) -> Teacher | None:
    if not config.uses_teacher or dense is None:
        return None
    teacher = LiveTeacher(dense)
    if config.teacher_top_k is None:
        return teacher
    return CachedTeacher.ask(teacher, samples, collate, config.teacher_top_k)


def _write(adapted: Any, folder: Path) -> None:
    """Write an adapter as PEFT does, but for the base that it names: it takes the dense model for it."""
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    config = adapted.peft_config[adapted.active_adapter]
    config.base_model_name_or_path, config.inference_mode = None, True
    config.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)


def _merge(adapted: Any, how: str) -> None:
    try:
        merge_(adapted, how)
    except UnsupportedModel:  # before the first weight
        raise
    except BaseException as error:
        raise PruningError(
            f"The merge was interrupted ({error!r}): weights are partly merged. Load the model again; with directory= "
            "the training is not lost."
        ) from error


def _warnings(report: RecoveryReport, objective: Objective, diverged: int | None) -> list[str]:
    """Say what went wrong without an error."""
    found, merge = [], report.config["merge"]
    if diverged is not None:
        found.append(
            f"Training diverged: the held-out loss was not finite at step {diverged}, and training ended there. Lower "
            "learning_rate."
        )
    if report.merged is not None:
        before, after, merged = map(objective.of_losses, (report.before, report.after, report.merged))
        if not merged < before:
            found.append(
                f"Merging by {merge!r} took back more than training had gained: the trained loss was {before:.4f} "
                f"before, {after:.4f} with the adapter, and is {merged:.4f}. Load the pruned model again, and use "
                "merge='masked'."
            )
    if (lost := report.zeros_before - report.zeros_after) > 0:
        found.append(f"Merging by {merge!r} lost {lost:,} of {report.zeros_before:,} zeros; merge='masked' keeps them.")
    return found


def _zeros(pruned: Mapping[str, nn.Linear]) -> int:
    return sum(linear.weight.numel() - int(linear.weight.count_nonzero()) for linear in pruned.values())
