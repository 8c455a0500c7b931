"""Load what is to be pruned, and say in one line why it cannot be."""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from optimum_prune import registry
from optimum_prune.binding import adapter_for
from optimum_prune.configs import METHOD, block, block_method, describe_ties_
from optimum_prune.errors import CheckpointError, InvalidConfig, PruningError, UnsupportedModel
from optimum_prune.fetching import HUB_KWARGS, cached_commit, fetch, hub_shapes, reachable, unreachable, weight_files
from optimum_prune.integrations.accounting import check_gguf, check_loading, load_on_meta, model_class
from optimum_prune.integrations.ties import untie_
from optimum_prune.layouts.headers import stored_shapes
from optimum_prune.layouts.packing import STORAGE
from optimum_prune.measurements import Evaluation
from optimum_prune.report import PruningReport

logger = logging.getLogger(__name__)

REPORT = "pruning_report.json"
SHARED_KWARGS = {*HUB_KWARGS, "gguf_file", "trust_remote_code", "code_revision"}
"""Keywords of `from_pretrained` that config, tokenizer and processor need too: where the files are, whose code runs."""
OWN_CODE = (
    "it brings Python code of its own, which runs only if you ask for that. Read the .py files, then pass "
    "trust_remote_code=True (in a shell: --trust-remote-code)"
)
"""What is said of a model, tokenizer or processor whose code transformers refuses to run."""


def load_model(name_or_path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a model, whole, by the class that its config names (see `model_class`).

    Raises:
        UnsupportedArchitecture: no adapter knows the model; found from the config, before weights are loaded.
        UnsupportedModel: the checkpoint is quantised; likewise.
        CheckpointError: it does not exist, does not load, lacks weights, or holds tensors that the class does not read.
    """
    if "output_loading_info" in kwargs:
        raise InvalidConfig("output_loading_info cannot be passed: weights that are missing are an error anyway.")
    kwargs = reachable(name_or_path, **kwargs)
    if kwargs.get("local_files_only"):  # transformers does not apply it to the search for an adapter
        kwargs["adapter_kwargs"] = {"local_files_only": True} | (kwargs.get("adapter_kwargs") or {})
    shared = _shared(kwargs)
    kwargs["trust_remote_code"] = shared["trust_remote_code"]
    with loading(name_or_path):
        config = AutoConfig.from_pretrained(name_or_path, **shared)
        loader = model_class(config, registry.load("adapters", config.model_type))
        _check_plain(name_or_path, config, kwargs.get("quantization_config"))
        if issubclass(loader, PreTrainedModel):
            kwargs.pop("code_revision", None)  # only auto classes take it, for code beside the config
        loaded: Any = loader.from_pretrained(name_or_path, output_loading_info=True, **kwargs)
        model, info = loaded
        check_loading(name_or_path, model, info)
        if file := _gguf_file(name_or_path, kwargs):
            check_gguf(name_or_path, model, file)
        describe_ties_(model)
        if not os.path.exists(name_or_path) and getattr(model.config, "_commit_hash", None) is None:
            where = {key: kwargs[key] for key in HUB_KWARGS & kwargs.keys()}
            # From 5.24 on transformers does not note it.
            model.config._commit_hash = cached_commit(str(name_or_path), **where)
    return model


def load_skeleton(name_or_path: str | Path, *, dtype: Any = None, **kwargs: Any) -> PreTrainedModel:
    """Build what `load_model` would load, without its weights: names, shapes, dtypes and ties, on the meta device.

    Of files with weights only the headers are read, and of a Hub repository only `config.json` and
    `generation_config.json` are fetched, and the headers where it has safetensors (of a GGUF the file, which is all
    that there is). Only a folder tells whether two weights that the config ties differ: both are read then.

    Args:
        name_or_path: a Hub id or a local directory.
        dtype: as for `from_pretrained`. By default the config's; where that names none, as a GGUF's, float32.
        kwargs: as for `from_pretrained`; those that do not say where the config is change nothing here.

    Raises:
        UnsupportedArchitecture: no adapter knows the model.
        UnsupportedModel: the checkpoint is quantised.
        CheckpointError: it does not exist, its config builds no model, it lacks weights, or holds tensors that the
            class does not read.
    """
    with loading(name_or_path):
        shared = _shared(reachable(name_or_path, **kwargs))
        config = AutoConfig.from_pretrained(name_or_path, **shared)
        loader = model_class(config, registry.load("adapters", config.model_type))
        _check_plain(name_or_path, config)
        files = weight_files(name_or_path, kwargs.get("subfolder"), kwargs.get("variant"))
        stored = None
        if not kwargs.get("gguf_file") and block(config).get(STORAGE) != "packed":
            stored = stored_shapes(files) or hub_shapes(name_or_path, **shared)
        skeleton, info = load_on_meta(_resolved(loader, config, shared), config, stored, dtype)
        _keep_float32_(skeleton)
        if skeleton.can_generate() and "gguf_file" not in shared:
            with suppress(OSError):  # without a file of its own, it is made of the config, as above
                where = {key: value for key, value in shared.items() if key in HUB_KWARGS}
                skeleton.generation_config = GenerationConfig.from_pretrained(name_or_path, **where)
        if stored:
            check_loading(name_or_path, skeleton, info)
            untie_(skeleton, files)
        if file := _gguf_file(name_or_path, kwargs):
            check_gguf(name_or_path, skeleton, file)
    return skeleton


def _resolved(loader: Any, config: Any, shared: dict[str, Any]) -> type[PreTrainedModel]:
    """Return the class that an auto class loads: transformers' own, or that of trusted code beside the config."""
    if issubclass(loader, PreTrainedModel):
        return loader
    trusted = shared["trust_remote_code"]
    reference = (getattr(config, "auto_map", None) or {}).get(loader.__name__)
    if not trusted or reference is None:
        with torch.device("meta"):
            return type(loader.from_config(config, trust_remote_code=trusted))
    # from_config takes no revision of the code: where the config's class is known by now, it goes to the model's class.
    where = {key: value for key, value in shared.items() if key not in ("trust_remote_code", "subfolder", "gguf_file")}
    return get_class_from_dynamic_module(reference, config.name_or_path, **where)


def _keep_float32_(skeleton: PreTrainedModel) -> None:
    """Do what loading does in 16 bits with weights that the class wants in float32, as T5 does."""
    wanted = skeleton._get_dtype_plan(skeleton.dtype)  # no public name tells it
    for name, parameter in skeleton.named_parameters():
        for pattern, dtype in wanted.items():
            if re.search(pattern.replace("*", ".*"), name):
                parameter.data = parameter.data.to(dtype)


def _check_plain(name_or_path: str | Path, config: Any, given: Any = None) -> None:
    """Refuse quantised weights, those on disk and those that a user asks for, before anything is read or imported.

    Args:
        name_or_path: for the message.
        config: of the checkpoint.
        given: `quantization_config=` of the user; one of this package prunes while loading, and weights that are
            dequantised while loading are plain.

    Raises:
        UnsupportedModel: naming the method.
    """
    method = block_method(config) or ("by an unnamed method" if block(config) else None)
    if method not in (None, METHOD) and not getattr(given, "dequantize", False):
        raise UnsupportedModel(
            f"{name_or_path} is quantised ({method}). Prune the plain model that it was made of, then quantise."
        )
    method = given.get("quant_method") if isinstance(given, Mapping) else getattr(given, "quant_method", METHOD)
    if given is not None and method != METHOD and not getattr(given, "dequantize", False):
        raise UnsupportedModel(
            f"quantization_config={type(given).__name__} would quantise {name_or_path} while it is loaded. Prune "
            "the plain model, then quantise. A PruningConfig prunes while loading."
        )


def _gguf_file(name_or_path: str | Path, kwargs: Mapping[str, Any]) -> Path | None:
    """Return the path of the GGUF file that is loaded, if one is."""
    if (name := kwargs.get("gguf_file")) is None:
        return None
    return fetch(name_or_path, name, **{key: kwargs[key] for key in HUB_KWARGS & kwargs.keys()})


def load_companions(model: PreTrainedModel, name_or_path: str | Path, **kwargs: Any) -> tuple[Any, Any]:
    """Load the tokenizer of a model, and the processor of one that reads images; what does not load is None.

    Args:
        model: already loaded.
        name_or_path: where it came from.
        kwargs: those of `load_model`.

    Raises:
        CheckpointError: the tokenizer or the processor is code of its own, and `trust_remote_code` was not given.
    """
    shared = _shared(reachable(name_or_path, **kwargs))
    processor = None
    if adapter_for(model).auto_class == "AutoModelForImageTextToText":
        try:
            processor = AutoProcessor.from_pretrained(name_or_path, **shared)
            return getattr(processor, "tokenizer", None), processor
        except Exception as error:  # as in `loading`
            _refuse_own_code(name_or_path, "processor", error)
            logger.warning("%s has no processor that loads (%s); calibration sees no images.", name_or_path, error)
    try:
        return AutoTokenizer.from_pretrained(name_or_path, **shared), processor
    except Exception as error:
        _refuse_own_code(name_or_path, "tokenizer", error)
        logger.warning("%s has no tokenizer that loads (%s); calibration needs token ids.", name_or_path, error)
        return None, processor


def _shared(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of `SHARED_KWARGS` that were given, and always whether to trust the model's own code."""
    given = {key: kwargs[key] for key in SHARED_KWARGS & kwargs.keys()}
    return given | {"trust_remote_code": bool(given.get("trust_remote_code"))}  # None makes transformers ask on stdin


def _refuse_own_code(name_or_path: str | Path, what: str, error: Exception) -> None:
    if _is_own_code(error):
        raise CheckpointError(f"The {what} of {name_or_path} cannot be loaded: {OWN_CODE}.") from error


def _is_own_code(error: Exception) -> bool:
    """Tell whether transformers refused to run code; its words are all that tells it from other errors."""
    return isinstance(error, ValueError) and "`trust_remote_code=True`" in str(error)


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
        if _is_own_code(error):
            raise CheckpointError(f"{name_or_path} cannot be loaded: {OWN_CODE}.") from error
        where = "" if Path(name_or_path).exists() else " (no folder of that name is here)"
        if where and isinstance(error, OSError) and (silent := unreachable(ask=False)) is not None:
            reason = f"the Hub cannot be reached ({silent}), and the cache does not hold all of it."
        raise CheckpointError(f"{name_or_path} cannot be loaded{where}: {reason}") from error


def write_report(folder: Path, report: PruningReport, evaluations: Mapping[str, Evaluation]) -> None:
    """Write the report and what was measured beside the weights."""
    measured = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    report.save(folder / REPORT, evaluations=measured)


def same_record(report: PruningReport, record: dict[str, Any]) -> bool:
    """Tell whether a report speaks of the pruning that a config records; the layout is added when saving."""
    return json.loads(json.dumps(report.record())) == {k: v for k, v in record.items() if k != "layout"}
