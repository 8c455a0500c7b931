"""The whole way from a config to a cut model, of every scorer of units on every variant."""
# pyright: reportArgumentType=false, reportCallIssue=false

import pytest
import torch
from datasets import Dataset

from optimum_prune import CalibrationConfig, CalibrationError, PruningConfig, registry
from optimum_prune.binding import bind
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.pipeline import prune
from optimum_prune.planning.planner import make_plan
from tests.models import VARIANTS, inputs, llama, source, t5
from tests.outputs import load

SCORERS = [name for name in registry.available("scorers") if "structured" in registry.load("scorers", name).patterns]


def config_for(model, scorer, **options) -> PruningConfig:
    calibration = CalibrationConfig(source(model), num_samples=4, seq_len=12)
    return PruningConfig(scorer=scorer, calibration=calibration, **{"sparsity": 0.45, "round_to": 4} | options)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_report_says_what_is_there(name, scorer):
    model = VARIANTS[name]()
    dense = model.num_parameters()
    units = ["mlp_channel"] if name == "llama-mqa" else None  # its only KV group has to stay
    report = prune(model, config_for(model, scorer, units=units))
    live = {group.name: group for group in bind(model)}
    assert report.units == (units or (["mlp_channel"] if scorer == "afr" else ["kv_group", "mlp_channel"]))
    assert report.compensation == ("least_squares" if registry.load("scorers", scorer).needs_data else "none")
    assert (report.calibration is not None) == (report.compensation == "least_squares")
    for group in report.groups:
        assert (group.after, group.weights_after) == (live[group.name].num_units, live[group.name].weights)
        assert len(group.kept) == group.after and group.kept == sorted({*group.kept}) and group.kept[-1] < group.before
    assert (report.parameters_before, report.parameters_after) == (dense, model.num_parameters())
    assert 0.2 < report.achieved < 0.55 and report.parameters_after < dense
    assert model.config.pruning_config == report.record()
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    with torch.no_grad():
        assert torch.isfinite(model(**inputs(model)).logits).all()


@pytest.mark.parametrize(("build", "scorer"), [(llama, "taylor"), (t5, "obs"), (llama, "fluctuation")])
def test_it_loads_again(build, scorer, tmp_path):
    model = build()
    prune(model, config_for(model, scorer))
    save_checkpoint(model, tmp_path / "it")
    again, complaints = load(tmp_path / "it")
    assert complaints == {}
    with torch.no_grad():
        assert torch.equal(again(**inputs(model)).logits, model(**inputs(model)).logits)


ONE_TOKEN = {"source": [[5], [6], [7], [8]], "num_samples": 4}
PREDICTING = [("taylor", {}), ("ntk", {"objective": "loss"}), ("afr", {}), ("afr", {"refer": "feature"})]
OTHERS = [*sorted({*registry.available("scorers")} - {scorer for scorer, _ in PREDICTING}), "ntk"]


@pytest.mark.parametrize("calibration", [{"seq_len": 1}, {}, {"seq_len": 1, "source": "self"}], ids=str)
@pytest.mark.parametrize(("scorer", "options"), PREDICTING, ids=str)
@pytest.mark.parametrize("pattern", ["structured", "unstructured"])
def test_samples_of_one_token_are_refused_where_the_next_one_is_predicted(scorer, options, pattern, calibration):
    if pattern not in registry.load("scorers", scorer).patterns:
        return
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = PruningConfig(
        pattern,
        scorer=scorer,
        sparsity=0.4,
        scorer_options=options or None,
        calibration=CalibrationConfig(**ONE_TOKEN | calibration),
    )
    with pytest.raises(CalibrationError, match="no sample has a second token"):
        prune(model, config)
    if "seq_len" in calibration:
        with pytest.raises(CalibrationError, match=r"no sample has a second token.* Raise seq_len"):
            make_plan(model, config)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("scorer", OTHERS)
def test_scorers_of_activations_work_with_one_token_a_sample(scorer):
    for pattern in registry.load("scorers", scorer).patterns:
        model, sparsity = llama(), None if pattern == "n:m" else 0.4
        pattern = "2:4" if pattern == "n:m" else pattern
        config = PruningConfig(
            pattern, scorer=scorer, sparsity=sparsity, calibration=CalibrationConfig(**ONE_TOKEN, seq_len=1)
        )
        make_plan(model, config)
        assert prune(model, config).achieved > 0
        assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_one_answer_token_is_predicted():
    pairs = Dataset.from_dict({"input_ids": [[5], [6]], "labels": [[7], [8]]})
    for source_ in (pairs, Dataset.from_dict({"input_ids": [[5, 6, 7]] * 2, "labels": [[8, 9]] * 2})):
        config = PruningConfig(scorer="taylor", sparsity=0.4, calibration=CalibrationConfig(source_, seq_len=1))
        make_plan(t5(), config)
        assert prune(t5(), config).achieved > 0
