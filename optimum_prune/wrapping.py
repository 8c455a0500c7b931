"""Checks that what a user passes is a transformers model itself, and not something around one."""

import reprlib
from typing import Any

from torch import nn

from optimum_prune.errors import InvalidConfig, UnsupportedArchitecture, UnsupportedModel

_LOAD = "Pass a transformers model, e.g. AutoModelForCausalLM.from_pretrained(...)."


def check_unwrapped(model: Any) -> None:
    """Refuse everything but a transformers model, by what it is.

    Args:
        model: what a user passed.

    Raises:
        UnsupportedModel: the model is wrapped (`DataParallel`, `torch.compile`, PEFT, ...).
        UnsupportedArchitecture: it is no transformers model.
    """
    from transformers import PreTrainedModel  # here, because the import registers the plugin, which imports this file

    if isinstance(model, PreTrainedModel):
        return
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        given = kind if model is None else f"{reprlib.repr(model)}, a {kind}"
        raise UnsupportedArchitecture(f"The model must be a transformers model, got {given}. {_LOAD}")
    path, inner = next(((p, m) for p, m in model.named_modules() if isinstance(m, PreTrainedModel)), (None, None))
    if inner is None:
        raise UnsupportedArchitecture(f"{kind} has no config.model_type, so its architecture is unknown. {_LOAD}")
    if hasattr(model, "merge_and_unload"):  # PEFT, whose adapters are also inside the wrapped model
        how = "Merge or unload its adapters, and pass what `merge_and_unload()` or `unload()` returns."
    else:
        how = f"It is at `.{path}`."
    raise UnsupportedModel(
        f"{kind} is a wrapper around {type(inner).__name__}. Pass the transformers model itself, without wrappers. "
        f"{how}"
    )


def check_language_model(model: Any, what: str) -> None:
    """Refuse a model without a language-model head.

    Args:
        model: a transformers model; a skeleton will do.
        what: what needs the head, e.g. `"evaluated"`.

    Raises:
        InvalidConfig: naming the class.
        PruningError: as `check_unwrapped`.
    """
    check_unwrapped(model)
    if not model.can_generate():
        raise InvalidConfig(f"Only language models can be {what}, and {type(model).__name__} is none.")
