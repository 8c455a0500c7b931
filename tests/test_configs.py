"""Configs of models: no number is left that speaks of blocks that went, and no other model shares them."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false
# pyright: reportOptionalMemberAccess=false

import pytest
import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from optimum_prune import CalibrationConfig, Pruner, PruningConfig, prune
from optimum_prune.binding import adapter_for, stacks
from optimum_prune.configs import FIRST_LAYERS, LISTS, PERIODS, kinds_follow_rule, stack_config
from optimum_prune.surgery import drop_
from tests.models import VARIANTS, gemma2, gemma3, inputs, llama, qwen2, qwen3, source
from tests.outputs import load
from tests.pruned import unevenly

DEPTH = 7
"""Layers of a stack: no other number of the small configs."""
COUNTING = ("layer", "window", "pattern", "depth")
"""Parts of the names of attributes that may go by layers."""
UNRELATED = {
    "layer_norm_epsilon",
    "layer_norm_eps",
    "layer_norm_elementwise_affine",
    "_remove_final_layer_norm",
    "do_layer_norm_before",
    "layerdrop",
    "sliding_window",
    "use_sliding_window",
    "vision_feature_layer",  # counts the blocks of the tower, none of which can go
}
"""Those that do not, in the configs of all supported classes."""
KEPT = [[0, 1, 2, 3, 4, 6], [0, 2, 4, 6], [1, 3, 5], [0, 1, 5, 6], [6], [3, 5, 6]]


def deep(name: str):
    """Return a variant whose stacks have `DEPTH` layers."""
    if name.startswith("t5"):
        return VARIANTS[name](num_layers=DEPTH, num_decoder_layers=DEPTH)
    return VARIANTS[name](num_hidden_layers=DEPTH)


def droppable(model):
    return [found for found in stacks(model, adapter_for(model)) if found.stack.depth is not None]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_attribute_that_goes_by_layers_is_known(name):
    """A class that counts its layers in a new way shows up here."""
    model = VARIANTS[name]()
    for found in droppable(model):
        config = stack_config(model.config, found.stack)
        known = {found.stack.depth, "num_layers", "num_decoder_layers", *LISTS, *FIRST_LAYERS, *PERIODS, *UNRELATED}
        written = {*config.to_dict(), *vars(config)} - {"per_layer_config"}
        assert {key for key in written if any(part in key for part in COUNTING)} <= known


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("llava")])
def test_no_attribute_keeps_the_old_depth(name):
    model = deep(name)
    for found in droppable(model):
        drop_(model, found, [0, 2, 3, 5])
    values = model.config.to_dict().items()
    assert [key for key, value in values if value == DEPTH and not isinstance(value, bool)] == []
    assert [key for key, value in values if isinstance(value, list) and len(value) == DEPTH] == []


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("window", [0, 1, 4, 7, 28])
@pytest.mark.parametrize("build", [qwen2, qwen3])
def test_layers_without_a_window(build, window, kept, tmp_path):
    """By the new number, a reader that knows no `layer_types` derives the same kinds."""
    model = build(num_hidden_layers=DEPTH, use_sliding_window=True, sliding_window=8, max_window_layers=window)
    kinds = [model.config.layer_types[layer] for layer in kept]
    drop_(model, *droppable(model), kept)
    assert model.config.layer_types == kinds and kinds_follow_rule(model.config)
    assert model.config.max_window_layers == kinds.count("full_attention")
    model.config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.layer_types, again.max_window_layers) == (kinds, kinds.count("full_attention"))


@pytest.mark.parametrize(
    ("kept", "period"),
    [
        ([0, 1, 2, 3, 4, 5], 3),
        ([0, 1, 3, 4], 5),  # no full attention left: any period beyond the last layer
        ([2, 5], 1),
        ([0, 2, 3, 5], 2),
        ([0, 1, 2, 3, 5, 6], None),
        ([2, 3], None),
    ],
    ids=str,
)
def test_period_of_full_attention(kept, period, tmp_path):
    model = gemma3(num_hidden_layers=DEPTH, sliding_window_pattern=3)
    kinds = [model.config.layer_types[layer] for layer in kept]
    drop_(model, *droppable(model), kept)
    model.config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    for config in (model.config, again):
        assert config.layer_types == kinds and kinds_follow_rule(config) == (period is not None)
        found = {getattr(config, name) for name in PERIODS if hasattr(config, name)}
        assert found == {period}


def test_a_config_that_never_followed_the_rule():
    model = qwen2(layer_types=["sliding_attention", "full_attention", "full_attention"], use_sliding_window=True)
    assert not kinds_follow_rule(model.config)
    assert all(kinds_follow_rule(build().config) for build in (qwen2, qwen3, gemma2, gemma3))


@pytest.mark.parametrize(("sparsity", "warned"), [(0.25, True), (0.5, False)])
def test_the_report_warns_where_kinds_no_longer_repeat(sparsity, warned):
    """Of sliding, full, sliding, full, one of the first two goes, or both."""
    model = gemma2(num_hidden_layers=4)
    config = PruningConfig(
        "layers",
        scorer="random",
        sparsity=sparsity,
        keep_first=0,
        keep_last=2,
        calibration=CalibrationConfig(source(model)),
    )
    report = prune(model, config)
    assert any("no longer follow the rule" in warning for warning in report.warnings) == warned
    assert kinds_follow_rule(model.config) == (not warned)


# Configs that two live models share


def held(model):
    """Return all config objects that any module of a model holds, by id."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return {id(value): value for value in values if isinstance(value, PreTrainedConfig | GenerationConfig)}


def twin_of(model):
    """Return a model of the same config objects, and equal weights."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    twin.generation_config = model.generation_config
    return twin


@pytest.mark.parametrize("name", VARIANTS)
def test_a_twin_keeps_its_config(name, tmp_path):
    model = VARIANTS[name]()
    twin = twin_of(model)
    assert held(model).keys() & held(twin).keys()
    before = {key: config.to_dict() for key, config in held(twin).items()}
    number = len(held(model))

    Pruner(model).prune(PruningConfig(scorer="magnitude", sparsity=0.4, units=["mlp_channel"], round_to=1))
    assert not held(model).keys() & held(twin).keys()
    assert len(held(model)) == number  # what was one object is one object
    assert {key: config.to_dict() for key, config in held(twin).items()} == before
    for which, each in (("model", model), ("twin", twin)):
        Pruner(each).save_pretrained(tmp_path / which)
        again, complaints = load(tmp_path / which)
        assert complaints == {}
        with torch.no_grad():
            assert torch.equal(again(**inputs(each)).logits, each(**inputs(each)).logits)


@pytest.mark.parametrize("build", [qwen2, gemma3], ids=["qwen2", "gemma3"])
def test_a_twin_keeps_its_layers(build, tmp_path):
    model = build(num_hidden_layers=6)
    twin = twin_of(model)
    prune(model, PruningConfig(pattern="layers", scorer="random", sparsity=0.34))
    assert model.config.num_hidden_layers == 4 and twin.config.num_hidden_layers == 6
    twin.save_pretrained(tmp_path)
    again, complaints = load(tmp_path)
    assert complaints == {}
    with torch.no_grad():
        assert torch.equal(again(**inputs(twin)).logits, twin(**inputs(twin)).logits)


def test_a_twin_of_a_padded_model_stays_padded(tmp_path):
    Pruner(unevenly(llama())).save_pretrained(tmp_path / "padded", "padded")
    model = Pruner.from_pretrained(tmp_path / "padded").model
    model.config.pruning_config = {"version": 1, "layout": "padded", "recipe": {}}
    twin = twin_of(model)
    before = twin.config.to_dict()
    Pruner(model).unpad()
    assert model.config.to_dict() != before == twin.config.to_dict()
