"""Write a pruned model so that it loads again: `stock` where plain transformers can say the result, else `compact`."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from optimum_prune.configs import METHOD, block, block_method
from optimum_prune.errors import CheckpointError, InvalidConfig, PruningError, unknown
from optimum_prune.integrations.directories import replacing
from optimum_prune.integrations.headers import check_all
from optimum_prune.integrations.packing import STORAGE, STORAGES, save_packed
from optimum_prune.sizes import build_skeleton, describe_, resize_, why_not_stock

logger = logging.getLogger(__name__)

LAYOUTS = ("auto", "stock", "compact")
CARD_MARK = "pruned with `optimum_prune`"
"""Words of the card's first sentence; a README without them is somebody's own."""
_SHARD = r"(\.\w+)?(-\d{5}-of-\d{5})?"
_STALE = re.compile(
    rf"(model{_SHARD}\.safetensors|pytorch_model{_SHARD}\.bin)(\.index(\.\w+)?\.json)?|pruning_report\.json"
)


@dataclass(frozen=True)
class Written:
    """How weights were written: `layout` is `"stock"` or `"compact"`, `storage` is `"dense"` or `"packed"`."""

    layout: str
    storage: str
    weight_bytes: int


def save_checkpoint(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    layout: str = "auto",
    storage: str = "dense",
    verify: bool = True,
    companions: Callable[[Path, Written], None] = lambda folder, written: None,
    **kwargs: Any,
) -> str:
    """Write a checkpoint, whole or not at all.

    Args:
        model: its config is made truthful first.
        directory: an old checkpoint there is replaced in one step; other files there stay.
        layout: `"auto"`, `"stock"` or `"compact"`. A result that the plain config can say is written as `stock` in any
            case but an explicit refusal: there is nothing that compact would add.
        storage: `"dense"`, or `"packed"`: zeros take one bit each, and only this package reads it. Where nothing gets
            smaller by that, it is dense all the same, with a warning.
        verify: compare what was written with the skeleton that its own config builds; a mismatch leaves nothing behind.
        companions: writes what goes along (tokenizer, report, card) into the folder.
        kwargs: for transformers' `save_pretrained`, e.g. `max_shard_size`.

    Returns:
        The layout written.

    Raises:
        InvalidConfig: an unknown layout or storage, or `stock` for what no plain config can say.
        CheckpointError: it cannot be written there, or would not load again.
    """
    if layout not in LAYOUTS:
        raise InvalidConfig(unknown("layout", layout, LAYOUTS))
    if storage not in STORAGES:
        raise InvalidConfig(unknown("storage", storage, STORAGES))
    written = describe_(model)
    if record := getattr(model.config, "pruning_config", None):
        record["layout"] = written
    if layout == "stock" and written != "stock":
        raise InvalidConfig(
            f"layout='stock' is not possible: {why_not_stock(model)}. Use layout='compact', or prune to what the "
            "class can say; Pruner.plan() tells (equal sizes in every layer, and a number of heads that it takes)."
        )
    with replacing(Path(directory), stale=_is_stale) as folder:
        try:
            if storage == "packed" and not save_packed(model, folder, written, **kwargs):
                logger.warning("No linear has enough zeros to get smaller by packing, so the weights are saved dense.")
                storage = "dense"
            if storage == "dense":
                model.save_pretrained(folder, **kwargs)
            if verify:
                verify_checkpoint(type(model), folder)
            weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            companions(folder, Written(written, storage, weight_bytes))
        except PruningError:
            raise
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"Saving to {directory} failed, and nothing was changed there: {error}") from error
    return written


def _is_stale(path: Path) -> bool:
    """Tell what of an old checkpoint would speak of other weights; files that transformers never reads stay."""
    if path.name == "README.md":
        return path.is_file() and CARD_MARK in path.read_text(encoding="utf-8", errors="replace")
    return bool(_STALE.fullmatch(path.name))


def verify_checkpoint(model_class: type[PreTrainedModel], folder: Path) -> None:
    """Build the skeleton that the written config describes, and compare it with the headers of the written weights.

    Raises:
        CheckpointError: names the tensor that would not load.
    """
    config = AutoConfig.from_pretrained(folder)
    ours = block_method(config) == METHOD
    try:
        skeleton = build_skeleton(model_class, config)
    except Exception as error:  # whatever the class says, it is what a user would meet when loading
        raise CheckpointError(f"The config as written builds no {model_class.__name__}: {error}") from error
    if ours:
        resize_(skeleton)
    check_all(skeleton, sorted(folder.glob("*.safetensors")), packed=ours and block(config).get(STORAGE) == "packed")
