"""Moments of what linears read, against numpy in float64 over all tokens."""
# pyright: reportArgumentType=false, reportCallIssue=false

import numpy
import pytest
import torch

from optimum_prune.binding import bind, named_linears
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.inputs import InputMoments, input_moments, measure_inputs
from optimum_prune.errors import CalibrationError, UnsupportedModel
from optimum_prune.scorers.base import Scorer, no_weights
from optimum_prune.scoring import score_groups
from tests.drawn import data_for
from tests.models import VARIANTS, llama, llava, tokens
from tests.scorers.plain import inputs_of


def measured(model, data, batch_size, full=frozenset(), linears=None) -> dict[str, InputMoments]:
    found: dict[str, InputMoments] = {}

    def use(name, moments):
        assert name not in found and not torch.is_grad_enabled()
        found[name] = moments

    measure_inputs(model, linears or named_linears(model), data, batch_size, {*full}, use)
    return found


def assert_are_of(found: InputMoments, x: numpy.ndarray):
    """Compare with all tokens, `(T, d) float64`."""
    mean, square = x.mean(axis=0), (x**2).mean(axis=0)
    small = 1e-5 * numpy.sqrt(square.max())
    numpy.testing.assert_allclose(found.mean, mean, rtol=1e-3, atol=small)
    numpy.testing.assert_allclose(found.variance, x.var(axis=0), rtol=1e-3, atol=small**2)
    numpy.testing.assert_allclose(found.norm, numpy.sqrt(square), rtol=1e-3, atol=small)
    if found.moment is not None:
        numpy.testing.assert_allclose(found.moment, x.T @ x / len(x), rtol=1e-3, atol=1e-4 * square.max())


@pytest.mark.parametrize("name", ["llama-gqa", "opt", "gemma2", "t5", "t5-gated", "llava"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_linear_of_samples_of_different_lengths(name, batch_size):
    """Nothing is padded, and every token counts once, whatever the batch it is in."""
    model = VARIANTS[name]()
    data = data_for(model, samples=7)  # 5 lengths, two of them twice
    assert len({len(sample) for sample in data.samples}) == 5
    expected = inputs_of(model, data)
    found = measured(model, data, batch_size, full=named_linears(model))
    assert found.keys() == expected.keys() == named_linears(model).keys()
    for path, moments in found.items():
        assert moments.moment is not None and moments.norm.dtype == moments.variance.dtype == torch.float32
        assert_are_of(moments, expected[path].numpy())


def test_whole_matrices_only_where_they_are_wanted():
    model = llama()
    found = measured(model, data_for(model), 2, full={"model.layers.1.mlp.down_proj"})
    assert [name for name, moments in found.items() if moments.moment is not None] == ["model.layers.1.mlp.down_proj"]


def test_some_linears_alone():
    model = llama()
    linears = {name: linear for name, linear in named_linears(model).items() if name.endswith("o_proj")}
    data = data_for(model)
    found, expected = measured(model, data, 2, linears=linears), inputs_of(model, data)
    assert list(found) == list(linears)
    for name, moments in found.items():
        assert_are_of(moments, expected[name].numpy())


def test_a_scorer_of_all_linears_sees_a_group_once_all_of_it_is_known():
    """The moments of the readers alone are whole."""
    model, seen = llama(), {}
    data = data_for(model)

    def look(units):
        for part, whole in [*((p, False) for p in units.writers), *((p, True) for p in units.readers)]:
            assert (part.statistics.moment is not None) == whole
            seen[part.weight] = part.statistics.norm
        return torch.zeros(units.number)

    probe = Scorer("probe", no_weights, "", score_units=look, inputs="hessian", reads="all")
    score_groups(model, bind(model), [probe], data=data, batch_size=2)
    for name, x in inputs_of(model, data).items():
        norm = x.square().mean(dim=0).sqrt().float()
        torch.testing.assert_close(seen[named_linears(model)[name].weight], norm, rtol=1e-3, atol=1e-5)


class TestPure:
    @staticmethod
    def drawn(count=50, d=6, seed=0, mean=0.0):
        return torch.randn(count, d, generator=torch.Generator().manual_seed(seed)) + mean

    @pytest.mark.parametrize("sizes", [[50], [1] * 50, [1, 48, 1], [20, 30]], ids=str)
    @pytest.mark.parametrize("mean", [0.0, 3.0, -1e4])
    def test_however_the_tokens_are_divided(self, sizes, mean):
        x = self.drawn(mean=mean)
        assert_are_of(input_moments("it", x.split(sizes), full=True), x.double().numpy())

    def test_any_shape(self):
        x = self.drawn(48)
        shapes = [x[:20].view(2, 10, 6), x[20:40].view(20, 6), x[40:].view(2, 2, 2, 6)]
        assert_are_of(input_moments("it", shapes, full=True), x.double().numpy())

    def test_batches_of_different_means(self):
        """Between two batches there is variance too."""
        x = torch.cat([self.drawn(30, mean=5.0), self.drawn(10, seed=1, mean=-5.0)])
        assert_are_of(input_moments("it", x.split([30, 10]), full=False), x.double().numpy())

    def test_a_constant_has_no_variance(self):
        found = input_moments("it", [torch.full((7, 2), 12345.678)] * 3, full=False)
        assert found.variance.max() < 1e-12  # one unit in the last place of 12345.678 is 1e-3
        assert torch.equal(found.mean, torch.full((2,), 12345.678))  # a mean of float32 is off by one unit

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_squares_of_half_precision_do_not_overflow(self, dtype):
        x = (self.drawn() * 1e4).to(dtype)
        found = input_moments("it", x.split(10), full=True)
        assert found.moment is not None and found.moment.dtype == torch.float32
        assert_are_of(found, x.double().numpy())

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("batch", [0, 1])
    def test_what_is_not_finite_is_refused_by_name(self, batch, value):
        parts = list(self.drawn().split(25))
        parts[batch][3, 2] = value
        with pytest.raises(UnsupportedModel, match=r"The input of a\.b is not finite"):
            input_moments("a.b", parts, full=False)


def test_leaves_the_model_as_it_was():
    model = llama(attention_dropout=0.5).train()
    model.model.layers[0].mlp.requires_grad_(False)
    state = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), [p.requires_grad for p in m.parameters()])
        for m in model.modules()
    ]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measured(model, data_for(model), 2)
    again = measured(model.eval(), data_for(model), 2)
    model.train()
    assert all(torch.equal(found[name].norm, again[name].norm) for name in found)  # dropout was off
    assert state == [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), [p.requires_grad for p in m.parameters()])
        for m in model.modules()
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_tower_that_no_sample_passes_through():
    model = llava()
    data = CalibrationData([tokens(1, 8, vocabulary=90)[0]], 8, "texts alone")
    vision = {name: linear for name, linear in named_linears(model).items() if "vision" in name}
    assert len(vision) == 3 * sum(len(group.linears) for group in bind(model)[:2])
    with pytest.raises(CalibrationError, match=r"passes through model\.vision_tower.* needs samples with images"):
        measured(model, data, 2, linears=vision)
