"""Zeros are kept while a Trainer trains."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from optimum_prune.binding import named_linears
from optimum_prune.callbacks import KeepMasks
from optimum_prune.errors import InvalidConfig, UnsupportedModel
from optimum_prune.sparsity import masks_of
from tests.models import llama, tokens
from tests.pruned import holes

DOWN = "model.layers.1.mlp.down_proj"


def train(model, folder, *callbacks, **options):
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]
    options = {"max_steps": 3, "learning_rate": 0.01, "weight_decay": 0.1, "save_strategy": "no"} | options
    args = TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True, **options)
    trainer = Trainer(model, args, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    return trainer


def changed(model, before):
    """Return by name how many zeros of `before` are zero no more, and how many other weights moved."""
    old = named_linears(before)
    return {
        name: (
            int(linear.weight[old[name].weight == 0].count_nonzero()),
            int((linear.weight != old[name].weight).sum()),
        )
        for name, linear in named_linears(model).items()
    }


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}])
def test_zeros_stay_while_all_others_move(options, tmp_path):
    model, before = holes(llama()), holes(llama())
    train(model, tmp_path, KeepMasks(), **options)
    for name, (filled, moved) in changed(model, before).items():
        assert filled == 0
        assert moved > 0.9 * int(named_linears(before)[name].weight.count_nonzero())


def test_without_it_they_are_lost(tmp_path):
    model, before = holes(llama()), holes(llama())
    train(model, tmp_path)
    assert all(filled > 0 for filled, _ in changed(model, before).values())


def test_every_saved_step_has_them(tmp_path):
    model = holes(llama())
    masks = masks_of(model)
    train(model, tmp_path, KeepMasks(), save_strategy="steps", save_steps=1)
    folders = sorted(tmp_path.glob("checkpoint-*"))
    assert len(folders) == 3
    for folder in folders:
        found = masks_of(AutoModelForCausalLM.from_pretrained(folder))
        assert all(torch.equal(found[name], mask) for name, mask in masks.items())


def test_given_masks_prune_first(tmp_path):
    masks = {DOWN: masks_of(holes(llama()))[DOWN]}
    model = llama(seed=1)
    callback = KeepMasks(masks)
    train(model, tmp_path, callback)
    assert torch.equal(masks_of(model)[DOWN], masks[DOWN])
    assert masks_of(model).keys() == {DOWN}
    again = llama(seed=2)
    train(again, tmp_path, callback)  # it does not hold the first model
    assert torch.equal(masks_of(again)[DOWN], masks[DOWN])


@pytest.mark.parametrize(
    ("build", "masks", "error", "message"),
    [
        (llama, None, InvalidConfig, "KeepMasks has nothing to keep: no linear holds a zero"),
        (llama, {DOWN: torch.ones(2, 2, dtype=torch.bool)}, InvalidConfig, "must be bool of shape"),
        (
            lambda: get_peft_model(holes(llama()), LoraConfig(target_modules=["q_proj"])),
            None,
            UnsupportedModel,
            "without wrappers|not a plain linear",
        ),
    ],
)
def test_nothing_to_keep_is_said_before_training(build, masks, error, message, tmp_path):
    with pytest.raises(error, match=message):
        train(build(), tmp_path, KeepMasks(masks))
