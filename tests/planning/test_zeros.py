"""Plans of zeros: bounds of one ranking, earlier zeros, and a table that stays short."""
# pyright: reportArgumentType=false

import json

import pytest
import torch

from optimum_prune import PruningConfig, prune
from optimum_prune.bounds import Range
from optimum_prune.integrations.loading import load_skeleton
from optimum_prune.planning.planner import make_plan
from tests.models import VARIANTS, llama, t5
from tests.pruned import unevenly

MLP = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]  # of 32 x 48 weights each


def planned(model, pattern="unstructured", **options):
    return make_plan(model, PruningConfig(pattern, **{"scorer": "magnitude"} | options))


def test_bounds_of_one_ranking_are_reached():
    """0.9 of three equal linears go, so each keeps 0.3 of its weights at the most."""
    config = PruningConfig("unstructured", "magnitude", 0.9, allocation="global", include=["*.0.mlp"])
    model = llama()
    plan = make_plan(model, config)
    assert {group.name: group.kept for group in plan.groups} == dict.fromkeys(MLP, Range(0, 461))
    assert plan.totals[0].removed == Range(4147, 4147) and plan.exact
    model.get_parameter(f"{MLP[0]}.weight").data *= 1e3
    assert [group.after for group in prune(model, config).groups] == [461, 0, 0]


def test_one_ranking_bounds_what_every_stack_loses():
    plan = planned(t5(), sparsity=0.7, allocation="global")
    sizes = [total.now for total in plan.totals]
    remove = int(0.7 * sum(sizes))
    assert [total.removed for total in plan.totals] == [
        Range(remove - sizes[1], sizes[0]),
        Range(remove - sizes[0], sizes[1]),
    ]
    assert "to 100.0%" in str(plan)


def test_sizes_stay():
    for name, build in VARIANTS.items():
        plan = planned(build(), sparsity=0.5)
        assert plan.after == {cost: Range(size, size) for cost, size in plan.before.items()}, name
        assert plan.layout.layout == "stock" and plan.layout.stock_heads == {}
        plan.check_layout("stock")


def test_a_model_of_uneven_layers_stays_compact():
    plan = planned(unevenly(llama()), sparsity=0.5)
    assert plan.layout.layout == "compact" and "layers differ in" in str(plan.layout.reason)


@pytest.mark.parametrize("patterns", [["2:4"], ["unstructured"], ["2:4", "layers"]])
def test_earlier_zeros_are_announced(patterns, tmp_path):
    """A skeleton cannot count them, so the plan says of how many it does not know."""
    model = llama()
    for pattern in patterns:
        prune(model, PruningConfig(pattern, "random", None if ":" in pattern else 0.3))
    announced = "The model has zeros of an earlier run."
    assert planned(model, sparsity=0.3).warnings[0].startswith(announced)
    model.save_pretrained(tmp_path)
    skeleton = load_skeleton(tmp_path)
    others = PruningConfig("unstructured", "random", 0.3, seed=1)
    plan = make_plan(skeleton, others, skeleton=True)
    assert plan.warnings[0].startswith(announced)
    report = prune(model, others)
    assert report.achieved > plan.totals[0].achieved[1]


def test_no_zeros_are_announced_of_a_model_that_lost_units():
    model = llama()
    assert planned(model, sparsity=0.3).warnings == []
    prune(model, PruningConfig("layers", "random", 0.34))
    assert planned(model, sparsity=0.3).warnings == []


@pytest.mark.parametrize("options", [{}, {"pattern": "2:4", "sparsity": None}, {"pattern": "unstructured"}])
def test_generation_is_warned_of_as_in_the_run(options):
    config = PruningConfig(**{"scorer": "magnitude", "sparsity": 0.5} | options)
    model = t5(num_layers=2, num_decoder_layers=3)
    plan = make_plan(model, config)
    assert plan.warnings == prune(model, config).warnings
    assert len(plan.warnings) == 1 and "IndexError" in plan.warnings[0]


def test_devices_divide_what_is_not_cut():
    plan = make_plan(llama(), PruningConfig("2:4", "magnitude"), 3)
    assert "kv_group of model.layers: tensor_parallel=3 does not divide the 4 of a layer that is not cut." in (
        plan.warnings
    )


def test_table():
    """Of 210 linears, a row for all that are alike; and nothing that cannot be known or meant."""
    config = PruningConfig("unstructured", "wanda", {"*.mlp": 0.5, "*.1?.self_attn": 0.25})
    with torch.device("meta"):
        model = llama(num_hidden_layers=30)
    plan = make_plan(model, config, skeleton=True)
    lines = str(plan).splitlines()
    assert lines[0] == "llama, float32: unstructured, wanda, row, asked 45.5% of the targeted weights"
    assert lines[2:5] == [
        "layers  unit                       now    will keep",
        "model.layers",
        "0..29   weight (mlp.gate_proj)     1,536  768",
    ]
    assert "10..19  weight (self_attn.q_proj)  1,024  768" in lines
    assert len(lines) < 25 and max(map(len, lines)) <= 100
    assert "zeros are kept and multiplied like any other weight" in " ".join(map(str.strip, lines))
    assert "zeros" not in str(make_plan(model, PruningConfig(sparsity=0.5), skeleton=True))
    group = json.loads(json.dumps(plan.to_dict()))["groups"][0]
    assert (group["reachable"], group["kept"]) == (None, {"lowest": 768, "highest": 768})
