"""OBS and Wanda of units, against the error of the best correction and against plain loops."""
# pyright: reportArgumentType=false, reportCallIssue=false

import numpy
import pytest
import torch

from optimum_prune import CalibrationConfig, InvalidConfig, PruningConfig
from optimum_prune.binding import bind
from optimum_prune.pipeline import prune
from optimum_prune.scorers import obs, wanda
from optimum_prune.scorers.base import Part, Statistics, Units
from optimum_prune.scoring import score_groups
from tests.drawn import data_for
from tests.models import VARIANTS, llama, source
from tests.scorers.plain import inputs_of


def least_increase(weight, x, unit, size):
    """Return the least `E||W a - W' a||^2 + ridge ||W - W'||^2` of all W' whose columns of the unit are zero.

    By one call of lstsq: the tokens, and a row for each input whose square is the ridge, are what W' has to fit.
    """
    ridge = obs.RIDGE * (x**2).mean()
    rows = numpy.concatenate([x / len(x) ** 0.5, ridge**0.5 * numpy.eye(x.shape[1])])
    columns = [j for j in range(x.shape[1]) if not unit * size <= j < (unit + 1) * size]
    wanted = rows @ weight.T
    found = numpy.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0]
    return ((rows[:, columns] @ found - wanted) ** 2).sum()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("tokens", [200, 7], ids=["many tokens", "fewer than inputs"])
def test_equals_the_error_of_the_best_correction(size, tokens):
    generator = numpy.random.default_rng(0)
    mixing = generator.normal(size=(12, 12)) + 2 * numpy.eye(12)
    x, weight = (generator.normal(size=(tokens, 12)) + 1) @ mixing, generator.normal(size=(5, 12))
    moment = torch.tensor(x.T @ x / tokens).float()
    reader = Part(torch.tensor(weight).float(), Statistics(torch.Generator(), moment=moment))
    got = obs.score_units(Units([], [reader], 12 // size))
    expected = [least_increase(weight, x, unit, size) for unit in range(12 // size)]
    assert got.tolist() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("name", ["llama-gqa", "opt", "t5", "llava"])
def test_of_a_model(name):
    model = VARIANTS[name]()
    data = data_for(model)
    inputs = inputs_of(model, data)
    (got,) = score_groups(model, bind(model), [obs.SCORER], data=data, batch_size=2)
    for group in bind(model):
        (linear,), path = group.readers, group.linear_names[-1]
        weight, x = linear.weight.detach().double().numpy(), inputs[path].numpy()
        size = linear.in_features // group.num_units
        expected = [least_increase(weight, x, unit, size) for unit in range(group.num_units)]
        assert got[group.name].tolist() == pytest.approx(expected, rel=5e-3)


def test_a_copy_of_another_channel_is_worth_little():
    """What others can make up for is not missed, however large it is; Wanda sees the size alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator)
    x[:, 3] = x[:, 2]
    weight = torch.ones(4, 6)
    weight[:, 2:4] = 3.0
    statistics = Statistics(generator, moment=x.t() @ x / 400, norm=x.square().mean(dim=0).sqrt())
    units = Units([], [Part(weight, statistics)], 6)
    assert obs.score_units(units)[2:4].max() < obs.score_units(units)[[0, 1, 4, 5]].min()
    assert wanda.score_units(units)[2:4].min() > wanda.score_units(units)[[0, 1, 4, 5]].max()


def test_an_input_that_is_always_zero():
    statistics = Statistics(torch.Generator(), moment=torch.zeros(4, 4))
    units = Units([], [Part(torch.ones(3, 4), statistics)], 4)
    assert torch.isfinite(obs.score_units(units)).all()


@pytest.mark.parametrize("name", ["llama-gqa", "opt", "t5", "t5-gated", "llava"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_wanda_of_units(name, batch_size):
    """Sum over a unit's columns of |W_ij| times the root of the mean square of x_j."""
    model = VARIANTS[name]()
    data = data_for(model)
    inputs = inputs_of(model, data)
    (got,) = score_groups(model, bind(model), [wanda.SCORER], data=data, batch_size=batch_size)
    for group in bind(model):
        (linear,), columns = group.readers, inputs[group.linear_names[-1]].t().tolist()
        size, weight, scores = linear.in_features // group.num_units, linear.weight.tolist(), []
        for unit in range(group.num_units):
            total = 0.0
            for j in range(unit * size, (unit + 1) * size):
                norm = (sum(x * x for x in columns[j]) / len(columns[j])) ** 0.5
                total += sum(abs(row[j]) * norm for row in weight)
            scores.append(total)
        torch.testing.assert_close(got[group.name], torch.tensor(scores), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scorer", ["wanda", "obs"])
@pytest.mark.parametrize("options", [{"allocation": "global"}, {"allocation": "gamma"}, {"gamma": 2.0}], ids=str)
def test_one_ranking_of_all_layers_is_refused(scorer, options):
    model = llama()
    calibration = CalibrationConfig(source(model), num_samples=4)
    config = PruningConfig(scorer=scorer, sparsity=0.3, calibration=calibration, **options)
    with pytest.raises(
        InvalidConfig,
        match=rf"ranks all layers together, but {scorer} scores are only comparable inside one layer: they grow with "
        r"its inputs, .* Use allocation='uniform'",
    ):
        prune(model, config)
