"""What a config promises against what files hold, without loading a weight."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification

from optimum_prune.errors import CheckpointError
from optimum_prune.layouts.headers import check_all, check_model, expected_shapes, stored_shapes
from tests.models import every_model, llama
from tests.pruned import unevenly

MODELS = {name: unevenly(model) for name, model in every_model().items()}
UP = "model.layers.1.mlp.up_proj.weight"


def files_of(model, folder, **options):
    model.save_pretrained(folder, **options)
    return sorted(folder.glob("*.safetensors"))


def write(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return [folder / "model.safetensors"]


@pytest.fixture
def model():
    return MODELS["llama-gqa"]


@pytest.fixture
def tensors(model, tmp_path):
    return load_file(files_of(model, tmp_path)[0])


def headless(model):
    """Return the base model with the same tensors; its names lack `model.`."""
    return model.model


# Shapes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "6KB"}])
def test_expected_is_what_save_pretrained_stores(name, shards, tmp_path):
    files = files_of(MODELS[name], tmp_path, **shards)
    assert len(files) > 1 or not shards
    assert expected_shapes(MODELS[name]) == stored_shapes(files)
    check_all(MODELS[name], files)
    check_model(MODELS[name], files)


def test_tied_head_counts_once():
    names = expected_shapes(MODELS["llama-tied-biased"]).keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_shapes_need_no_weights(model):
    with torch.device("meta"):
        skeleton = llama()
    assert expected_shapes(skeleton) == expected_shapes(llama())


def test_scalar_and_empty_tensors(tmp_path):
    files = write(tmp_path, {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3)})
    assert stored_shapes(files) == {"scalar": (), "empty": (0, 3)}


def test_no_files():
    assert stored_shapes([]) == {}


# Everything


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(UP),
            f"{UP} is [39, 32], but in the checkpoint it is absent (1 of 30 tensors differ)",
        ),
        (
            lambda t: t.update({UP: torch.zeros(39, 31)}),
            f"{UP} is [39, 32], but in the checkpoint it is [39, 31] (1 of 30 tensors differ)",
        ),
        (
            lambda t: t.update({UP: torch.zeros(39 * 32)}),
            f"{UP} is [39, 32], but in the checkpoint it is [1248] (1 of 30 tensors differ)",
        ),
        (
            lambda t: t.update(extra=torch.zeros(2)),
            "extra is absent, but in the checkpoint it is [2] (1 of 30",
        ),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is [96, 32], but in the checkpoint it is absent"),
        (
            lambda t: (t.pop("model.norm.weight"), t.pop(UP)),
            f"{UP} is [39, 32], but in the checkpoint it is absent (2",
        ),
        (lambda t: t.clear(), "lm_head.weight is [96, 32], but in the checkpoint it is absent (30 of 30"),
    ],
)
def test_any_difference_is_named(change, message, model, tensors, tmp_path):
    change(tensors)
    with pytest.raises(CheckpointError, match=re.escape(f"config.json says {message}")):
        check_all(model, write(tmp_path, tensors))


def test_other_dtype_is_no_difference(model, tensors, tmp_path):
    check_all(model, write(tmp_path, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}))


# All but the head


@pytest.mark.parametrize("stored", [lambda model: model, headless])
@pytest.mark.parametrize(
    "loaded", [lambda model: model, headless, lambda model: LlamaForSequenceClassification(llama().config)]
)
def test_heads_may_be_missing_or_new(stored, loaded, tmp_path):
    model = llama()
    check_model(loaded(model), files_of(stored(model), tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("lm_head.weight"),
        lambda t: t.update({"score.weight": torch.zeros(2, 32)}),
    ],
)
def test_heads_are_left_to_transformers(change, model, tensors, tmp_path):
    change(tensors)
    check_model(model, write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), f"{UP} is [39, 32], but in the checkpoint it is absent (1 of 29"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is [32], but in the checkpoint it is absent"),
        (
            lambda t: t.update({UP: torch.zeros(38, 32)}),
            f"{UP} is [39, 32], but in the checkpoint it is [38, 32]",
        ),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(2, 2)}),
            "model.layers.3.mlp.up_proj.weight is absent, but in the checkpoint it is [2, 2]",
        ),
    ],
)
def test_differences_are_named_as_the_model_names_them(change, message, model, tensors, tmp_path):
    change(tensors)
    files = write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_model(model, files)
    with pytest.raises(CheckpointError, match=re.escape(message.replace("model.", "", 1))):
        check_model(headless(model), files)
    # The same checkpoint as the base model would have saved it.
    files = write(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_model(model, files)


def test_swapped_shard_is_found(model, tmp_path):
    shards = files_of(model, tmp_path, max_shard_size="6KB")
    (lost,) = stored_shapes([shards[3]])
    shards[3].write_bytes(shards[0].read_bytes())
    assert lost.startswith("model.layers.")
    with pytest.raises(CheckpointError, match=rf"{re.escape(lost)} is .*, but in the checkpoint it is absent"):
        check_model(model, shards)


def test_files_without_headers_are_left_to_transformers(model):
    check_model(model, [Path("pytorch_model.bin")])
