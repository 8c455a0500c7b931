"""Load what is to be pruned, and say in one line why it cannot be."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from optimum_prune import registry
from optimum_prune.errors import CheckpointError, InvalidConfig, PruningError
from optimum_prune.measurements import Evaluation
from optimum_prune.report import PruningReport

REPORT = "pruning_report.json"
SHARED_KWARGS = {"revision", "token", "cache_dir", "local_files_only", "gguf_file", "subfolder", "force_download"}
"""Keywords of `from_pretrained` that say where the files are, and so hold for config and tokenizer too."""


def load_model(name_or_path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model, whole.

    Raises:
        UnsupportedArchitecture: no adapter knows the model; found from the config, before weights are loaded.
        CheckpointError: it does not exist, does not load, or lacks weights (e.g. it holds a classifier).
    """
    if "output_loading_info" in kwargs:
        raise InvalidConfig("output_loading_info cannot be passed: weights that are missing are an error anyway.")
    shared = {key: kwargs[key] for key in SHARED_KWARGS & kwargs.keys()}
    with loading(name_or_path):
        registry.load("adapters", AutoConfig.from_pretrained(name_or_path, **shared).model_type)
        loaded: Any = AutoModelForCausalLM.from_pretrained(name_or_path, output_loading_info=True, **kwargs)
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(
                f"{name_or_path} lacks {missing[0]} (and {len(missing) - 1} more weights), which "
                f"{type(model).__name__} needs. Load another kind of model yourself: Pruner(model, tokenizer)."
            )
    return model


@contextmanager
def loading(name_or_path: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a model that is not there, or is damaged, into one clear error."""
    if Path(name_or_path).is_absolute() and not Path(name_or_path).exists():
        # transformers would call it a malformed Hub id
        raise CheckpointError(f"{name_or_path} does not exist.")
    try:
        yield
    except PruningError:
        raise
    except Exception as error:  # a damaged file or a wrong keyword ends in any exception of several libraries
        reason = " ".join(str(error).split())
        if not isinstance(error, OSError | ValueError | RuntimeError):  # the text may be no more than a key
            reason = f"{type(error).__name__}: {reason}"
        where = "" if Path(name_or_path).exists() else " (no folder of that name is here)"
        raise CheckpointError(f"{name_or_path} cannot be loaded{where}: {reason}") from error


def write_report(folder: Path, report: PruningReport, evaluations: dict[str, Evaluation]) -> None:
    """Write the report and what was measured beside the weights."""
    measured = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    report.save(folder / REPORT, evaluations=measured)


def read_report(folder: Path, record: dict[str, Any]) -> tuple[PruningReport | None, dict[str, Evaluation]]:
    """Read the report of a checkpoint, if it is there and speaks of the pruning that `config.json` records."""
    try:
        data = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        report = PruningReport.from_dict(data)
        evaluations = {name: Evaluation.from_dict(values) for name, values in data["evaluations"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None, {}
    return (report, evaluations) if same_record(report, record) else (None, {})


def same_record(report: PruningReport, record: dict[str, Any]) -> bool:
    """Tell whether a report speaks of the pruning that a config records; the layout is added when saving."""
    return json.loads(json.dumps(report.record())) == {k: v for k, v in record.items() if k != "layout"}
