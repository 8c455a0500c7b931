"""Accounting of a checkpoint's tensors before pruning: which ones a model class reads, and which ones it lacks.

A tensor that the class does not read would be lost by the next save, and one that it lacks would be saved as random
numbers. Transformers only logs both.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from optimum_prune.adapters.base import Adapter
from optimum_prune.binding import adapter_for, stacks
from optimum_prune.errors import CheckpointError
from optimum_prune.layouts.headers import Shapes

DERIVED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|rope_freqs\.weight)$")
"""Buffers that older versions of transformers, or llama.cpp, stored: every class computes them from its config."""
_SHOWN = 5

Info = Mapping[str, Any]
"""What `output_loading_info=True` returns: names by `"unexpected_keys"`, `"missing_keys"` and `"mismatched_keys"`."""


def model_class(config: PreTrainedConfig, adapter: Adapter) -> Any:
    """Return the class that a config's `architectures` names, or the adapter's auto class.

    The auto class is taken where `architectures` names no class of transformers for this kind of config, or where the
    checkpoint brings code of its own for it (`auto_map`).
    """
    if adapter.auto_class not in (getattr(config, "auto_map", None) or {}):
        for name in config.architectures or ():
            named = getattr(transformers, name, None)
            if isinstance(named, type) and issubclass(named, PreTrainedModel) and named.config_class is type(config):
                return named
    return getattr(transformers, adapter.auto_class)


def load_on_meta(
    loader: type[PreTrainedModel], config: PreTrainedConfig, stored: Shapes | None = None, dtype: Any = None
) -> tuple[PreTrainedModel, Info]:
    """Load a model without its weights: names, shapes, dtypes and ties, on the meta device.

    Args:
        loader: no auto class, which loads nothing without a name.
        config: left as it was.
        stored: shapes of the tensors in the checkpoint, by their names there; None where they are not known.
        dtype: as for `from_pretrained`.

    Returns:
        The skeleton, and what loading would report; everything is missing where `stored` is not given.
    """
    state = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in (stored or {}).items()}
    given = {} if dtype is None else {"dtype": dtype}
    with _silence():
        loaded: Any = loader.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict=state,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **given,
        )
    skeleton, info = loaded
    skeleton.tie_weights()  # also weights that are stored twice: on the meta device, transformers cannot compare them
    # Transformers takes tied weights off this list when it ties them, which it does not inside of another loading.
    missing: set[str] = set(info["missing_keys"])
    groups: dict[str, set[str]] = {}
    for target, source in (skeleton.all_tied_weights_keys or {}).items():
        groups.setdefault(source, {source}).add(target)
    for group in groups.values():
        if not group <= missing:
            missing -= group
    return skeleton, {**info, "missing_keys": missing}


def check_loading(source: str | Path, model: PreTrainedModel, info: Info) -> None:
    """Refuse a checkpoint with a tensor that the class does not read, or lacks.

    Args:
        source: name of the checkpoint, for the message.
        model: that was loaded, or is about to be.
        info: what loading reported.

    Raises:
        CheckpointError: naming the tensors.
    """
    kind = type(model).__name__
    if unread := sorted(name for name in info["unexpected_keys"] if not DERIVED.search(name)):
        raise _unread(source, model, unread)
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{source} lacks {_shown(missing)}, which {kind} needs{_named(model)} and would make up at random. "
            "Load the model with a class that needs no others, and pass it: Pruner(model, tokenizer)."
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise CheckpointError(
            f"{source} holds {name} as {list(stored)}, but its config.json says {list(expected)} ({len(mismatched)} "
            "tensors differ). The config and the weights do not belong together."
        )


def check_chosen(source: str | Path, model: PreTrainedModel, info: Info) -> None:
    """Refuse what `check_loading` refuses, where the user chose the class.

    Outside of the blocks, a class without a language-model head may lack and leave tensors: who loads `AutoModel`, or a
    new classifier, from a language model drops its head on purpose. Transformers reports these tensors.

    Raises:
        CheckpointError: naming the tensors.
    """
    if model.get_output_embeddings() is None:
        blocks = tuple(f"{found.path}." for found in stacks(model, adapter_for(model)))
        info = {
            "unexpected_keys": [name for name in info["unexpected_keys"] if name.startswith(blocks)],
            "missing_keys": [name for name in info["missing_keys"] if name.startswith(blocks)],
            "mismatched_keys": info["mismatched_keys"],
        }
    check_loading(source, model, info)


def check_gguf(source: str | Path, model: PreTrainedModel, file: Path) -> None:
    """Refuse a GGUF file with a tensor that the class does not read; transformers skips those without a word.

    Raises:
        CheckpointError: naming the tensors.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture, stored = _gguf_header(file, file.stat().st_mtime_ns)
    arch = next((number for number, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:  # transformers has read the file, by a name that this version of gguf lacks
        return
    layers = model.config.get_text_config().num_hidden_layers
    names = get_tensor_name_map(arch, layers)
    read = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in model.state_dict()}
    if unread := sorted(name for name in stored - read if not DERIVED.search(name)):
        raise _unread(source, model, unread)


@lru_cache(maxsize=1)  # a vocabulary takes seconds to parse, and a command asks for a skeleton, then for the model
def _gguf_header(file: Path, _modified: int) -> tuple[str, frozenset[str]]:
    """Read the architecture and the names of all tensors."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    field = reader.fields["general.architecture"]
    return bytes(field.parts[field.data[0]]).decode(), frozenset(tensor.name for tensor in reader.tensors)


def _unread(source: str | Path, model: PreTrainedModel, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{source} holds {_shown(names)}, which {type(model).__name__} does not read{_named(model)} and a save would "
        "drop. Load the model with a class that reads every tensor, or, if these may be lost, with any class, and pass "
        "it: Pruner(model, tokenizer)."
    )


def _shown(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more tensors" if rest > 0 else "")


def _named(model: PreTrainedModel) -> str:
    """Name the class in the config, where it is another one than the model's."""
    named = [name for name in model.config.architectures or () if name != type(model).__name__]
    return f" (its config.json names {', '.join(named)})" if named else ""


@contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers' progress bar and load report off the screen."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
