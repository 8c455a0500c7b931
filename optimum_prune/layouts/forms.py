"""What is written of a model: itself, or a skeleton that stands for it in another layout; and its configs on trial."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from optimum_prune.class_switch import offer, switched, switched_name
from optimum_prune.configs import METHOD, block_method
from optimum_prune.errors import CheckpointError, InvalidConfig
from optimum_prune.layouts.headers import check_same
from optimum_prune.layouts.padding import pad, wide_skeleton
from optimum_prune.padded import is_padded
from optimum_prune.planning.layout import skeleton_of
from optimum_prune.sizes import build_skeleton, describe_, resize_, why_not_padded, why_not_stock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Form:
    """What is written: a model, or a skeleton that stands for it, with the weights where they are not its own."""

    layout: str
    model: PreTrainedModel
    state: Mapping[str, Tensor] | None = None


def form_of(model: PreTrainedModel, layout: str, class_switch: bool, state: Mapping[str, Tensor] | None) -> Form:
    """Choose what is written.

    Raises:
        InvalidConfig: the layout cannot hold the model.
    """
    if describe_(model) == "stock":
        return Form("padded" if is_padded(model) else "stock", model, state)
    if class_switch and layout in ("auto", "stock"):
        try:
            return _stand_in("stock", model, switched(model), state or model.state_dict())
        except InvalidConfig as error:
            logger.warning("class_switch=True changes nothing: %s.", error)
    if layout == "stock":
        check_stock(model)
    return _stand_in("padded", model, *pad(model, state)) if layout == "padded" else Form("compact", model, state)


def _stand_in(layout: str, model: PreTrainedModel, skeleton: PreTrainedModel, state: Mapping[str, Tensor]) -> Form:
    """Make a skeleton write what `model` would write beside the weights."""
    skeleton.to(dtype=model.dtype)  # pyright: ignore[reportCallIssue]
    if model.can_generate():
        skeleton.generation_config = model.generation_config
    return Form(layout, skeleton, state)


def check_layout(model: PreTrainedModel, layout: str, class_switch: bool = False) -> None:
    """Refuse a layout that cannot hold what has the sizes and biases of a model, before hours of work and not after.

    Args:
        model: a skeleton will do.
        layout: as for `save_checkpoint`.
        class_switch: likewise.

    Raises:
        InvalidConfig: with the reason, and what would do.
        CheckpointError: as `check_writable_`.
    """
    if layout == "stock":
        check_stock(model, class_switch)
    if layout == "padded" and why_not_stock(model) is not None and (reason := why_not_padded(model)) is not None:
        raise InvalidConfig(f"layout='padded' is not possible: {reason}. Use layout='compact'.")
    check_writable_(skeleton_of(model), layout, class_switch)


def check_stock(model: PreTrainedModel, class_switch: bool = False) -> None:
    """Refuse the layout `"stock"` for what no plain config can say.

    Args:
        model: a skeleton will do.
        class_switch: whether the plain config may be that of another class.

    Raises:
        InvalidConfig: with the reason, and what would do.
    """
    reason = why_not_stock(model)
    if reason is None:
        return
    other = switched_name(model)
    if not (class_switch and other):
        padded = "" if why_not_padded(model) else "layout='padded', "
        raise InvalidConfig(
            f"layout='stock' is not possible: {reason}. Use {offer(other)}layout='compact', {padded}or prune "
            "to what the class can say; Pruner.plan() tells (equal sizes in every layer, and a number of heads that "
            "it takes)."
        )


def read_back(model_class: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """Build the skeleton that the config in a folder describes.

    Raises:
        CheckpointError: the class builds none from it.
    """
    # AutoConfig would ask on stdin about a type that is code of its own
    config = (model_class.config_class or AutoConfig).from_pretrained(folder)
    try:
        skeleton = build_skeleton(model_class, config)
    except Exception as error:  # whatever the class says, it is what a user would meet when loading
        raise CheckpointError(f"The config as written builds no {model_class.__name__}: {error}") from error
    if block_method(config) == METHOD:
        resize_(skeleton)
    return skeleton


def check_writable_(skeleton: PreTrainedModel, layout: str = "auto", class_switch: bool = False) -> None:
    """Write configs and own code of a model on trial, and read them back, by the classes that a save and a load use.

    Args:
        skeleton: has the sizes of what will be saved. Its config is made truthful.
        layout: as for `save_checkpoint`.
        class_switch: likewise.

    Raises:
        InvalidConfig: the layout cannot hold the model.
        CheckpointError: a config is refused, or builds another model; with what to change.
    """
    if describe_(skeleton) == "stock":
        model = skeleton
    elif layout == "padded":  # of a skeleton there are no weights to pad
        model = _stand_in("padded", skeleton, wide_skeleton(skeleton), {}).model
    else:
        model = form_of(skeleton, layout, class_switch, None).model
    with TemporaryDirectory(prefix="optimum-prune-") as folder:
        with _on_trial("config", model):
            if model.is_remote_code():
                custom_object_save(model, folder, config=model.config)  # pyright: ignore[reportArgumentType]
            model.config.save_pretrained(folder)
        if model.can_generate():
            with _on_trial("generation_config", model):
                model.generation_config.save_pretrained(folder)  # pyright: ignore[reportOptionalMemberAccess]
        with _on_trial("config", model):
            check_same(read_back(type(model), Path(folder)), model)


@contextmanager
def _on_trial(name: str, model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a class may refuse its config in any way it likes
        reason = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"What is pruned could not be saved, so nothing was changed: {type(model).__name__} does not take its "
            f"{name} ({type(error).__name__}: {reason}). Change {name}.json before loading, or model.{name} after it."
        ) from error
