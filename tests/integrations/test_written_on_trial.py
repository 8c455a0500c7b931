"""What a save would refuse is refused before the first weight changes: configs are written on trial."""

import copy

import pytest
from transformers import AutoModelForCausalLM

from optimum_prune import CheckpointError, Pruner, PruningConfig
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.layouts.forms import check_writable_
from optimum_prune.pipeline import prune
from optimum_prune.planning.layout import skeleton_of
from optimum_prune.planning.planner import make_plan
from optimum_prune.recovery.recover import check_recovery
from tests.models import VARIANTS, llama
from tests.pruned import unevenly
from tests.recovery.runs import config as recovery
from tests.recovery.runs import everything
from tests.refused import REFUSED, on_disk

HALF = PruningConfig(scorer="magnitude", sparsity=0.5, round_to=4)
PATTERNS = {
    "structured": {"units": ["mlp_channel"], "round_to": 1},
    "layers": {"keep_first": 0, "keep_last": 0, "scorer": "random"},
    "unstructured": {},
}


@pytest.mark.parametrize("name", REFUSED)
def test_found_before_anything_changes(name, tmp_path):
    build, said = REFUSED[name]
    model = build(tmp_path)
    before = everything(model)
    pruner = Pruner(model)
    for refused in (
        lambda: prune(model, HALF),
        lambda: make_plan(model, HALF),
        lambda: pruner.plan(HALF),
        lambda: pruner.prune(HALF),
    ):
        with pytest.raises(CheckpointError, match=said):
            refused()
    assert everything(model) == before


@pytest.mark.parametrize("pattern", PATTERNS)
def test_for_every_pattern(pattern, tmp_path):
    model = REFUSED["generation"][0](tmp_path)
    config = PruningConfig(**{"pattern": pattern, "scorer": "magnitude", "sparsity": 0.5} | PATTERNS[pattern])
    with pytest.raises(CheckpointError, match="generation_config"):
        prune(model, config)


def test_before_a_recovery(tmp_path):
    model = unevenly(llama())
    model.generation_config.temperature = 0.5  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(CheckpointError, match="generation_config"):
        check_recovery(model, recovery())


def test_while_loading(tmp_path):
    with pytest.raises(CheckpointError, match="output_attentions"):
        AutoModelForCausalLM.from_pretrained(on_disk(tmp_path), quantization_config=HALF)


@pytest.mark.parametrize("layout", ["compact", "padded"])
def test_in_the_layout_that_will_be_written(layout):
    model = unevenly(REFUSED["own code"][0](None))  # pyright: ignore[reportArgumentType] - it needs no folder
    with pytest.raises(CheckpointError, match="no fewer than 48 channels"):
        check_writable_(skeleton_of(model), layout)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_can_be_written_is_left_as_it_was(name):
    model = VARIANTS[name]()
    before, config = everything(model), copy.deepcopy(model.config)
    for layout in ("auto", "padded"):
        check_writable_(skeleton_of(unevenly(VARIANTS[name]())), layout)
        make_plan(model, PruningConfig(scorer="magnitude", sparsity=0.4), layout=layout)
    assert everything(model) == before and model.config == config


def test_whatever_a_class_raises_when_it_is_saved_is_ours(tmp_path):
    model = unevenly(REFUSED["own code"][0](tmp_path))
    with pytest.raises(CheckpointError, match="no fewer than 48 channels"):
        save_checkpoint(model, tmp_path / "it")
    assert not (tmp_path / "it").exists()
