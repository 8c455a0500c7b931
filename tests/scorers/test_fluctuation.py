"""Fluctuation against plain loops in float64; standardised by layer, so that all layers can be ranked together."""
# pyright: reportArgumentType=false, reportCallIssue=false

import statistics as plain_statistics

import numpy
import pytest
import torch

from optimum_prune import CalibrationConfig, PruningConfig
from optimum_prune.binding import bind
from optimum_prune.calibration.inputs import input_moments
from optimum_prune.pipeline import prune
from optimum_prune.scorers.base import Part, Statistics, Units
from optimum_prune.scorers.fluctuation import SCORER, combine, score_units
from optimum_prune.scoring import score_groups
from tests.drawn import data_for
from tests.models import VARIANTS, llama, source
from tests.scorers.plain import inputs_of


def loops(group, inputs):
    """Sum over a unit's columns of Var(x_j) * sum_i W_ij^2."""
    scores = [0.0] * group.num_units
    for name, linear in list(zip(group.linear_names, group.linears, strict=True))[len(group.writers) :]:
        size, weight, columns = linear.in_features // group.num_units, linear.weight.tolist(), inputs[name].t().tolist()
        for unit in range(group.num_units):
            for j in range(unit * size, (unit + 1) * size):
                mean = sum(columns[j]) / len(columns[j])
                variance = sum((x - mean) ** 2 for x in columns[j]) / len(columns[j])
                scores[unit] += variance * sum(row[j] ** 2 for row in weight)
    return torch.tensor(scores)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied-biased", "opt", "t5", "t5-gated", "llava"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_plain_loops(name, batch_size):
    model = VARIANTS[name]()
    data = data_for(model)
    inputs = inputs_of(model, data)
    (got,) = score_groups(model, bind(model), [SCORER], data=data, batch_size=batch_size)
    for group in bind(model):
        torch.testing.assert_close(got[group.name], loops(group, inputs), rtol=1e-3, atol=0)


@pytest.mark.parametrize("noise", [1.0, 0.01])
def test_a_large_mean_does_not_drown_the_noise(noise):
    """Of squares minus the square of the mean, nothing would be left: 1e8 has a spacing of 8 in float32."""
    x = 1e4 + noise * torch.randn(900, 4, generator=torch.Generator().manual_seed(0))
    found = input_moments("it", x.split([400, 1, 499]), full=False)
    reader = Part(torch.ones(1, 4), Statistics(torch.Generator(), variance=found.variance))
    expected = numpy.var(x.double().numpy(), axis=0)
    assert score_units(Units([], [reader], 4)).tolist() == pytest.approx(expected.tolist(), rel=1e-3)


def test_every_layer_is_standardised_by_itself():
    scores = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1e4, 3e4, 3e4])]
    expected = [
        (x - plain_statistics.fmean(row)) / plain_statistics.pstdev(row)
        for row in (s.tolist() for s in scores)
        for x in row
    ]
    for together in (False, True):
        assert torch.cat(combine(scores, together)).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_layer_of_larger_inputs_does_not_keep_all_its_units():
    """One ranking of all layers, of which one reads inputs and has weights a thousand times as large."""
    model = llama()
    group = bind(model)[3]
    assert group.unit == "mlp_channel"
    with torch.no_grad():
        group.writers[1].weight.mul_(1e3)
    calibration = CalibrationConfig(source(model), num_samples=4)
    config = PruningConfig(
        scorer="fluctuation",
        sparsity=0.3,
        allocation="global",
        units=["mlp_channel"],
        compensation="none",
        round_to=1,
        calibration=calibration,
    )
    report = prune(model, config)
    gone = [group.before - group.after for group in report.groups]
    assert sum(gone) == 43 and min(gone) >= 5  # floor(0.3 * 3 * 48)
