"""Structured runs in which a kind of unit cannot go: the others go, and everything that reports says so."""
# pyright: reportArgumentType=false

import pytest
import torch

from optimum_prune import CalibrationConfig, InvalidConfig, Pruner, PruningConfig, prune, registry
from optimum_prune.structured import find_targets
from tests.models import VARIANTS, inputs, llama, llava, qwen2, source, t5

ALL = {name: registry.load("scorers", name) for name in registry.available("scorers")}
SCORERS = [name for name, found in ALL.items() if "structured" in found.patterns and found.units is None]
NONE = "none of 1 can go"
FEW = "a sparsity of 0.2 removes none (reachable in a group of 2: 0.5)"


def config(model, scorer="magnitude", sparsity=0.25, **options) -> PruningConfig:
    calibration = CalibrationConfig(source(model), num_samples=4)
    return PruningConfig(scorer=scorer, sparsity=sparsity, calibration=calibration, **options)


def heads_stay(report, reason: str, asked=0.25) -> None:
    """Check that heads stay, that the MLP loses what is asked of it, and that one sentence says so."""
    (totals,) = report.per_stack.values()
    assert totals["kv_group"]["before"] == totals["kv_group"]["after"]
    assert totals["kv_group"]["asked"] == totals["mlp_channel"]["asked"] == report.asked == asked
    assert totals["mlp_channel"]["achieved"] == pytest.approx(asked)
    said = f"kv_group of model.layers: asked {asked:.1%}, achieved 0.0%: {reason}."
    assert [warning for warning in report.warnings if warning.startswith("kv_group")] == [said]
    assert said in " ".join(str(report).split())


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("allocation", ["auto", "uniform", "global", "gamma"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_the_one_head_stays(scorer, allocation, steps):
    if ALL[scorer].comparable != "model" and allocation in ("global", "gamma"):
        pytest.skip("its scores are ranked inside of a layer")
    model = llama(num_key_value_heads=1, num_hidden_layers=2)
    given = config(model, scorer, allocation=allocation, steps=steps, round_to=1)
    plan = Pruner(model).plan(given)
    report = prune(model, given)
    heads_stay(report, NONE)
    assert all(warning in report.warnings for warning in plan.warnings)
    assert [group.after for group in report.groups if group.unit == "kv_group"] == [1, 1]
    with torch.no_grad():
        assert torch.isfinite(model(**inputs(model)).logits).all()


@pytest.mark.parametrize("scorer", [name for name in SCORERS if ALL[name].allocation == "uniform"])
def test_two_heads_stay_where_each_layer_loses_the_same(scorer):
    model = qwen2(num_key_value_heads=2, num_hidden_layers=2, intermediate_size=40)
    heads_stay(prune(model, config(model, scorer, 0.2)), FEW, asked=0.2)


def test_an_explicit_gamma_couples_only_what_can_go():
    model = llama(num_key_value_heads=1)
    heads_stay(prune(model, config(model, allocation="gamma", gamma=3.0, round_to=1)), NONE)
    with pytest.raises(InvalidConfig, match=r"gamma=3\.0 couples MLP and attention, but only one of them is targeted"):
        prune(llama(), config(model, allocation="gamma", gamma=3.0, units=["mlp_channel"]))


def test_narrow_mlps_stay():
    model = llama(intermediate_size=8)
    report = prune(model, config(model))
    assert report.per_stack["model.layers"]["kv_group"]["achieved"] == 0.25
    assert "mlp_channel of model.layers: asked 25.0%, achieved 0.0%: none of 8 can go." in report.warnings


def test_what_patterns_choose():
    model = llama(num_key_value_heads=1)
    report = prune(model, config(model, include=["*.1", "*.2.self_attn"], exclude=["*.0"], round_to=1))
    assert [(group.name, group.before, group.after) for group in report.groups] == [
        ("model.layers.1.self_attn", 1, 1),
        ("model.layers.1.mlp", 48, 36),
        ("model.layers.2.self_attn", 1, 1),
    ]


def test_one_of_two_stacks():
    """LLaVA's language model keeps its one KV head, the tower loses heads."""
    text = llama(num_key_value_heads=1).config
    stacks = ["language", "vision"]
    report = prune(model := llava(text=text), config(model, stacks=stacks, units=["kv_group"]))
    achieved = {stack: units["kv_group"]["achieved"] for stack, units in report.per_stack.items()}
    assert achieved == {"model.vision_tower.encoder.layers": 0.25, "model.language_model.layers": 0.0}
    assert report.warnings == [f"kv_group of model.language_model.layers: asked 25.0%, achieved 0.0%: {NONE}."]
    model = llava(text=text)
    with pytest.raises(InvalidConfig, match=rf"^kv_group: 3 groups of 1 units.*: {NONE}\. Choose another target"):
        prune(model, config(model, units=["kv_group"]))


def test_tied_heads():
    model = t5(num_heads=1)
    report = prune(model, config(model, round_to=1))
    assert [warning for warning in report.warnings if warning.startswith("kv_group")] == [
        f"kv_group of {stack}: asked 25.0%, achieved 0.0%: {NONE}." for stack in ("encoder.block", "decoder.block")
    ]
    assert all(units["mlp_channel"]["achieved"] == 0.25 for units in report.per_stack.values())


def test_what_only_scores_tell():
    """One ranking condemns channels of every layer, and rounding keeps them all: the heads go all the same."""
    model = llama()
    report = prune(model, config(model, "random", 0.2, allocation="global", round_to=24))
    totals = report.per_stack["model.layers"]
    assert totals["kv_group"]["after"] == 10 and totals["mlp_channel"]["after"] == 144
    (said,) = [warning for warning in report.warnings if warning.startswith("mlp_channel")]
    assert said.startswith("mlp_channel of model.layers: asked 20.0%, achieved 0.0%: rounding every kept count up to")
    with pytest.raises(InvalidConfig, match=r"^mlp_channel: rounding every kept count up to a multiple of 24 spares"):
        prune(model := llama(), config(model, "random", 0.2, allocation="global", round_to=24, units=["mlp_channel"]))


def test_nothing_at_all_can_go():
    model = llama(num_key_value_heads=1, intermediate_size=8)
    message = (
        "kv_group: 3 groups of 1 units, each of which keeps at least 1: none of 1 can go. "
        "mlp_channel: 3 groups of 8 units, each of which keeps at least 8: none of 8 can go. Choose another target."
    )
    with pytest.raises(InvalidConfig) as refusal:
        prune(model, config(model))
    assert str(refusal.value) == message


@pytest.mark.parametrize(("scorer", "possible"), [("magnitude", True), ("wanda", False)])
def test_advice_can_be_followed(scorer, possible):
    """Only scores that compare across layers can be ranked together."""
    model = llama(num_key_value_heads=2)
    with pytest.raises(InvalidConfig, match=r"removes none \(reachable in a group of 2: 0\.5\)\. Raise") as refusal:
        prune(model, config(model, scorer, 0.2, units=["kv_group"], allocation="uniform"))
    assert ("allocation='global'" in str(refusal.value)) == possible


def test_a_comparison_says_so(capsys):
    model = llama(num_key_value_heads=1, num_hidden_layers=2)
    settings = {name: config(model, name, round_to=1) for name in ("magnitude", "wanda")}
    found = Pruner(model).compare(settings, source(model))
    said = f"kv_group of model.layers: asked 25.0%, achieved 0.0%: {NONE}."
    assert all(said in row.notes for row in found.rows)
    assert "note (" in str(found) and said in str(found)


@pytest.mark.parametrize("sparsity", [0.5, 0.7, 0.8, 0.85, 0.9, 0.97])
@pytest.mark.parametrize("name", VARIANTS)
def test_no_more_is_asked_than_there_is(name, sparsity):
    """Of every kind in every stack, and what is asked of all of them together is the sparsity."""
    model = VARIANTS[name]()
    stacks = ["vision", "language"] if "llava" in name else None
    given = config(model, sparsity=sparsity, allocation="gamma", stacks=stacks)
    try:
        targets = find_targets(model, given, registry.load("scorers", "magnitude"))
    except InvalidConfig as refusal:
        assert sparsity > 0.75 and str(refusal).endswith("can. Lower the sparsity.")
        return
    assert all(pool.sparsity <= 1 for pool in targets.pools)
    for stack in targets.asked:
        pools = [
            (pool.sparsity, sum(size.weights for size in pool.sizes)) for pool in targets.pools if pool.stack == stack
        ]
        assert sum(asked * weights for asked, weights in pools) == pytest.approx(
            sparsity * sum(weights for _, weights in pools)
        )
