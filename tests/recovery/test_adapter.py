"""Adapters beside the weights: one that does not fit is refused, and leaves the model as it was."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimum_prune.errors import CheckpointError
from optimum_prune.recovery.adapter import adapted, merge_adapter_
from optimum_prune.recovery.recover import recover
from tests.models import llama
from tests.recovery.runs import config, everything, pruned

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def truncated(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])


def of_other_shapes(folder):
    save_file(
        {name: torch.zeros(len(w) + 1, w.shape[1] + 1) for name, w in load_file(folder / WEIGHTS).items()},
        folder / WEIGHTS,
    )


def of_other_modules(folder):
    found = json.loads((folder / CONFIG).read_text()) | {"target_modules": ["no_such_module"]}
    (folder / CONFIG).write_text(json.dumps(found))


def no_adapter(folder):
    (folder / CONFIG).write_text('{"peft_type": 5}')


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    assert recover(pruned(), config(merge="none"), adapter=folder).kept
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("damage", [truncated, of_other_shapes, of_other_modules, no_adapter])
@pytest.mark.parametrize("use", ["put on", "merge"])
def test_what_does_not_fit_is_refused(damage, use, adapter, tmp_path):
    for name, content in adapter.items():
        (tmp_path / name).write_bytes(content)
    damage(tmp_path)
    model = pruned()
    model.lm_head.weight.requires_grad_(False)
    before = everything(model)
    with pytest.raises(
        CheckpointError, match=r"^The adapter beside the weights does not go with them, or is damaged \("
    ):
        if use == "merge":
            merge_adapter_(model, tmp_path)
        else:
            with adapted(model, tmp_path):
                pass
    assert everything(model) == before


def test_an_adapter_of_wider_layers(adapter, tmp_path):
    for name, content in adapter.items():
        (tmp_path / name).write_bytes(content)
    model = llama()
    before = everything(model)
    with pytest.raises(CheckpointError, match="size mismatch"):
        merge_adapter_(model, tmp_path)
    assert everything(model) == before
