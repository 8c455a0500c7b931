"""Plans of runs that may create biases: the layouts that may come of it, and what they weigh."""
# pyright: reportArgumentType=false

import pytest

from optimum_prune import InductionConfig, PruningConfig, prune
from optimum_prune.configs import block_method
from optimum_prune.errors import InvalidConfig
from optimum_prune.planning.planner import make_plan
from optimum_prune.scaling import Found, Passes
from tests.biased import biased
from tests.models import VARIANTS, llama, mistral
from tests.pruned import unevenly
from tests.zeroed import excluded, for_model


def config_for(model, **options):
    given = {"induction": InductionConfig(epochs=1, allow_bias=True), "calibration": for_model(model, 4)}
    return PruningConfig("2:4", "wanda", **given | {"exclude": excluded(model, 4)} | options)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-odd-width", "mistral", "qwen2", "qwen3", "opt", "t5", "llava"])
@pytest.mark.parametrize("helps", [True, False])
def test_the_run_is_within_the_plan(name, helps, monkeypatch):
    """Whether all that may be created is created, or nothing."""
    losses = iter(range(10**6, 0, -1))
    monkeypatch.setattr(Passes, "loss", lambda _: float(next(losses)))
    if not helps:
        monkeypatch.setattr("optimum_prune.induction.train_", lambda *_: Found())
    model = VARIANTS[name]()
    plan = make_plan(model, config_for(model))
    prune(model, config_for(model))
    assert model.num_parameters() == getattr(plan.after["parameters"], "highest" if helps else "lowest")
    assert plan.before["parameters"] == plan.after["parameters"].lowest
    layout = "stock" if block_method(model.config) is None else "compact"
    assert plan.layout.layout in (layout, "undecided")


@pytest.mark.parametrize(("build", "layout"), [(llama, "stock"), (mistral, "undecided")])
def test_layout(build, layout):
    model = build()
    plan = make_plan(model, config_for(model))
    assert plan.layout.layout == layout and make_plan(model, config_for(model, induction=None)).exact
    if layout == "undecided":
        assert "biases are created where they help, and then no config gives model.layers.0" in str(plan.layout.reason)
        with pytest.raises(InvalidConfig, match="layout='stock' is not certain: biases are created where they help"):
            plan.check_layout("stock")


@pytest.mark.parametrize("name", ["mistral", "t5"])
def test_padding_that_may_have_no_room_for_biases(name):
    """Found at the last save otherwise, after hours."""
    model = VARIANTS[name]()
    plan = make_plan(model, config_for(model))
    with pytest.raises(InvalidConfig, match="layout='padded' cannot be promised: biases are created where they help"):
        plan.check_layout("padded")
    with pytest.raises(InvalidConfig, match="layout='stock' is not certain") as error:
        plan.check_layout("stock")
    assert "padded" not in str(error.value)
    make_plan(model, config_for(model, induction=None)).check_layout("padded")


def test_padding_that_has_room():
    make_plan(llama(), config_for(llama())).check_layout("padded")  # a switch of the class gives all linears a bias
    make_plan(unevenly(mistral()), PruningConfig("unstructured", "magnitude", 0.5)).check_layout("padded")


def test_biases_of_an_earlier_run_have_no_room_in_padding():
    options = {"scorer": "magnitude", "sparsity": 0.5}
    for more in ({"allocation": "uniform"}, {"allocation": "global"}):
        with pytest.raises(
            InvalidConfig, match=r"layout='padded' cannot be promised: no config gives model\.layers\.0"
        ):
            make_plan(biased(mistral()), PruningConfig(**options, **more)).check_layout("padded")


@pytest.mark.parametrize("prepare", [unevenly, biased])
def test_what_is_compact_stays_so(prepare):
    model = prepare(mistral())
    assert make_plan(model, config_for(model)).layout.layout == "compact"


def test_units_of_a_model_that_has_some_leave_it_compact():
    plan = make_plan(biased(mistral()), PruningConfig(scorer="magnitude", sparsity=0.5, allocation="uniform"))
    assert plan.layout.layout == "compact" and "no config gives" in str(plan.layout.reason)
    assert not any(plan.layout.stock_heads.values())
    assert make_plan(biased(llama()), PruningConfig("layers", "random", 0.34)).layout.layout == "stock"
