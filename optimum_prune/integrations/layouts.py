"""Write a pruned model so that it loads again.

`stock` where plain transformers can say the result; else `compact`, which needs this package to load, or `padded`,
which is larger.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from optimum_prune.configs import METHOD, block, block_method
from optimum_prune.errors import CheckpointError, InvalidConfig, PruningError, unknown
from optimum_prune.integrations.directories import replacing
from optimum_prune.integrations.signature import is_ours
from optimum_prune.layouts.forms import Form, form_of, read_back
from optimum_prune.layouts.headers import check_all
from optimum_prune.layouts.ordering import in_order
from optimum_prune.layouts.packing import STORAGE, STORAGES, save_packed
from optimum_prune.padded import is_padded
from optimum_prune.processes import is_main
from optimum_prune.recovery.adapter import FOLDER, is_adapter

logger = logging.getLogger(__name__)

LAYOUTS = ("auto", "stock", "compact", "padded")
PICTURES = "pruning_pictures"
"""Folder of the pictures that the card shows."""
_PADDED_AND_PACKED = "packed weights load with this package alone, and padding is for loading without it."
_SHARD = r"(\.\w+)?(-\d{5}-of-\d{5})?"
STALE = re.compile(
    rf"(model{_SHARD}\.safetensors|pytorch_model{_SHARD}\.bin)(\.index(\.\w+)?\.json)?|pruning_report\.json"
)
"""Names of the files that would speak of other weights, were they left of an older checkpoint."""


@dataclass(frozen=True)
class Written:
    """How weights were written.

    Attributes:
        layout: `"stock"`, `"compact"` or `"padded"`.
        storage: `"dense"` or `"packed"`.
        weight_bytes: size of the weight files.
        architecture: class that the config names.
        parameters: of the model that loads, those of its padding too.
    """

    layout: str
    storage: str
    weight_bytes: int
    architecture: str
    parameters: int


def save_checkpoint(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    layout: str = "auto",
    storage: str = "dense",
    class_switch: bool = False,
    verify: bool = True,
    companions: Callable[[Path, Written], None] = lambda folder, written: None,
    **kwargs: Any,
) -> str:
    """Write a checkpoint, whole or not at all.

    Of processes that train together the main one writes, and the others do not wait for it.

    Args:
        model: its config is made truthful first.
        directory: an old checkpoint there is replaced in one step; other files there stay, a card that somebody
            edited among them.
        layout: `"auto"`, `"stock"`, `"compact"` or `"padded"`. A result that the plain config can say is written as
            `stock` in any case: there is nothing that the others would add. What was loaded from a padded checkpoint
            is written as one, see `unpad_`.
        storage: `"dense"`, or `"packed"`: zeros take one bit each, and only this package reads it. Where nothing gets
            smaller by that, it is dense all the same, with a warning.
        class_switch: where Llama's config refuses the number of heads, `"stock"` and `"auto"` may write the Mistral
            that computes the same; `model` stays what it is.
        verify: compare what was written with the skeleton that its own config builds; a mismatch leaves nothing behind.
        companions: writes what goes along (tokenizer, report, card) into the folder.
        kwargs: for transformers' `save_pretrained`, e.g. `max_shard_size`.

    Returns:
        The layout written.

    Raises:
        InvalidConfig: an unknown layout or storage, or one that cannot hold this model.
        CheckpointError: it cannot be written there, or would not load again.
    """
    check_choice(layout, storage)
    form = form_of(model, layout, class_switch, kwargs.pop("state_dict", None))
    if form.layout == "padded":
        check_padding(model, storage)
    if record := getattr(form.model.config, "pruning_config", None):
        record["layout"] = form.layout
    if not is_main():
        logger.info("The main process writes %s.", directory)
        return form.layout
    with replacing(Path(directory), stale=_is_stale) as folder:
        try:
            storage = _write(form, folder, storage, **kwargs)
            if verify:
                verify_checkpoint(type(form.model), folder)
            companions(folder, _written(form, folder, storage))
        except PruningError:
            raise
        except Exception as error:  # of the disk, and of whatever code the model's own class brings
            raise CheckpointError(f"Saving to {directory} failed, and nothing was changed there: {error}") from error
    return form.layout


def check_choice(layout: str, storage: str = "dense") -> None:
    """Refuse what is no layout or no storage, and what is both but not together.

    Raises:
        InvalidConfig: with the choices.
    """
    if layout not in LAYOUTS:
        raise InvalidConfig(unknown("layout", layout, LAYOUTS))
    if storage not in STORAGES:
        raise InvalidConfig(unknown("storage", storage, STORAGES))
    if layout == "padded" and storage == "packed":
        raise InvalidConfig(
            f"layout='padded' does not go with storage='packed': {_PADDED_AND_PACKED} Use layout='compact', or "
            "storage='dense'."
        )


def check_padding(model: PreTrainedModel, storage: str) -> None:
    """Refuse to pack what was loaded from a padded checkpoint.

    Raises:
        InvalidConfig: with what would do.
    """
    if storage == "packed" and is_padded(model):
        raise InvalidConfig(
            f"The weights are padded, and cannot be packed too: {_PADDED_AND_PACKED} Cut the padding first, by "
            "Pruner.unpad() or `optimum-cli prune convert DIR --output OTHER --layout compact`."
        )


def _write(form: Form, folder: Path, storage: str, **kwargs: Any) -> str:
    """Write config and weights; return the storage."""
    kwargs["state_dict"] = in_order(form.model.state_dict() if form.state is None else form.state)
    if storage == "packed" and save_packed(form.model, folder, form.layout, **kwargs):
        return storage
    if storage == "packed":
        logger.warning("No linear has enough zeros to get smaller by packing, so the weights are saved dense.")
    form.model.save_pretrained(folder, **kwargs)
    return "dense"


def _written(form: Form, folder: Path, storage: str) -> Written:
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Written(form.layout, storage, weight_bytes, type(form.model).__name__, form.model.num_parameters())


def _is_stale(path: Path) -> bool:
    """Tell what of an old checkpoint would speak of other weights; files that transformers never reads stay."""
    if path.name == "README.md":
        return path.is_file() and is_ours(path.read_bytes())
    if path.name == FOLDER:
        return is_adapter(path)
    if path.name == PICTURES:
        return path.is_dir()
    return bool(STALE.fullmatch(path.name))


def verify_checkpoint(model_class: type[PreTrainedModel], folder: Path) -> None:
    """Build the skeleton that the written config describes, and compare it with the headers of the written weights.

    Raises:
        CheckpointError: names the tensor that would not load.
    """
    skeleton = read_back(model_class, folder)
    packed = block_method(skeleton.config) == METHOD and block(skeleton.config).get(STORAGE) == "packed"
    check_all(skeleton, sorted(folder.glob("*.safetensors")), packed=packed)
