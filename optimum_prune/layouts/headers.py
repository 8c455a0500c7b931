"""Comparison of what a config promises with what safetensors files hold, from their headers alone."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import load_state_dict

from optimum_prune.binding import adapter_for, stacks
from optimum_prune.errors import CheckpointError
from optimum_prune.layouts.packing import shapes_unpacked

END = "0"
"""Stands for the rest of a tensor's name."""

Shapes = Mapping[str, tuple[int, ...]]


def check_model(model: PreTrainedModel, files: Iterable[str | Path], *, packed: bool = False) -> None:
    """Compare a skeleton, all but its head, with the files it is about to be loaded from.

    A head may be unused (`AutoModel`) or new (sequence classification), and transformers reports that itself. Anything
    else that would be newly initialised, or left in the file, is an error here.

    Args:
        model: the skeleton.
        files: those that are not safetensors are not looked at.
        packed: whether weights may be packed.

    Raises:
        CheckpointError: names the first tensor that differs.
    """
    files = [file for file in map(Path, files) if file.suffix == ".safetensors"]
    if not files:  # an old-style .bin checkpoint has no header to read; a mismatch is then transformers' error
        return
    prefix = model.base_model_prefix + "."
    own = "" if model.base_model is model else prefix
    expected = expected_shapes(model, own)
    blocks = _disk_prefixes(model)

    def rename(name: str) -> str:
        # A model with a head may be loaded from a checkpoint without one, and the other way round.
        return name if name in expected or name.startswith(blocks) else own + name.removeprefix(prefix)

    stored = {rename(name): shape for name, shape in stored_shapes(files).items()}
    if packed:
        stored = shapes_unpacked(stored, expected)
    if own == "" and "For" in type(model).__name__:
        # A new head of a class without a base model (T5ForQuestionAnswering): no tensor of that module is in the file.
        known = {name.partition(".")[0] for name in stored}
        expected = {name: shape for name, shape in expected.items() if name.partition(".")[0] in known}
    _compare(expected, {name: stored[name] for name in stored if name in expected or name.startswith(blocks)})


def check_all(skeleton: PreTrainedModel, files: Iterable[str | Path], *, packed: bool = False) -> None:
    """Compare every tensor of a skeleton with the files just written for it.

    Raises:
        CheckpointError: names the first tensor that differs.
    """
    expected, stored = expected_shapes(skeleton), stored_shapes(files)
    # T5's config cannot say that weights are not tied; transformers compares them when it loads, and keeps both.
    ties = {target: source for target, source in (skeleton.all_tied_weights_keys or {}).items() if target in stored}
    stored = {name: shape for name, shape in stored.items() if shape != stored.get(ties.get(name, ""))}
    _compare(expected, shapes_unpacked(stored, expected) if packed else stored)


def check_same(skeleton: PreTrainedModel, model: PreTrainedModel) -> None:
    """Compare every tensor of a skeleton with the model that it was built for.

    Raises:
        CheckpointError: names the first tensor that differs.
    """
    built, live = (
        {name: tuple(tensor.shape) for name, tensor in found.state_dict().items()} for found in (skeleton, model)
    )
    _compare(built, live)


def expected_shapes(model: PreTrainedModel, prefix: str = "") -> Shapes:
    """Shapes that a checkpoint of `model` holds, under the names on disk; a tied tensor counts once.

    Args:
        model: a skeleton will do.
        prefix: of the modules that count; by default all do.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = {*tied, *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    state = {
        name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix) and name not in left_out
    }
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}


def _disk_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return what the names of the blocks' tensors begin with on disk, where LLaVA's differ from its modules'."""
    found = stacks(model, adapter_for(model))
    names = {f"{stack.path}.{END}": torch.empty(0, dtype=torch.float32, device="meta") for stack in found}
    return tuple(name.removesuffix(END) for name in revert_weight_conversion(model, names))


def stored_shapes(files: Iterable[str | Path]) -> Shapes:
    """Shapes in the headers of safetensors files, or of what is in pickled ones, without reading a weight."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if Path(file).suffix == ".bin":
            shapes |= {name: tuple(weight.shape) for name, weight in load_state_dict(file, map_location="meta").items()}
            continue
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def _compare(expected: Shapes, stored: Shapes) -> None:
    differing = [name for name in sorted(expected.keys() | stored.keys()) if expected.get(name) != stored.get(name)]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"config.json says {name} is {_say(expected.get(name))}, but in the checkpoint it is "
            f"{_say(stored.get(name))} ({len(differing)} of {len(expected)} tensors differ). The config and the "
            "weights do not belong together."
        )


def _say(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
