"""Compensated weights against stacked least squares in float64, and that nothing near them is better."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optimum_prune.compensation import bias_shift, least_squares, towards

UNTIMED = settings(deadline=None)  # a busy machine is no failure


def tokens(count: int, d: int, seed: int = 0) -> Tensor:
    """Correlated inputs with a mean, some of them much larger than others, `(T, d) float64`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, d, generator=generator, dtype=torch.float64) + 0.5
    mixing = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5 + torch.eye(d)
    return (x @ mixing) * torch.linspace(-1, 1, d, dtype=torch.float64).exp()


def weights(rows: int, d: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


def every(step: int, d: int) -> Tensor:
    return torch.arange(0, d, step)


def stacked(x: Tensor, target: Tensor, own: Tensor, ridge: float) -> Tensor:
    """Minimise `E|t - W' x|^2 + ridge mean(x^2) |W' - own|^2` by one call of `lstsq`: the ridge is more rows."""
    root = (ridge * x.square().mean()).sqrt()
    left = torch.cat([x / len(x) ** 0.5, root * torch.eye(x.shape[1], dtype=x.dtype)])
    right = torch.cat([target / len(x) ** 0.5, root * own.t()])
    return torch.linalg.lstsq(left, right, driver="gelsd").solution.t()


@pytest.mark.parametrize("ridge", [1e-3, 1e-2, 1.0])
@pytest.mark.parametrize(("count", "d", "step"), [(400, 40, 2), (400, 40, 7), (90, 30, 3), (12, 40, 2)])
class TestGolden:
    def test_least_squares(self, count, d, step, ridge):
        x, w, kept = tokens(count, d), weights(9, d), every(step, d)
        expected = stacked(x[:, kept], x @ w.t(), w[:, kept], ridge)
        found, note = least_squares(w.float(), moments(x).float(), kept, ridge)
        assert found.dtype == torch.float32 and note is None
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)

    def test_towards(self, count, d, step, ridge):
        x, own, target = tokens(count, d), weights(9, d), tokens(count, 9, seed=step)
        expected = stacked(x, target, own, ridge)
        found, note = towards(own.float(), moments(x).float(), (target.t() @ x / count).float(), ridge)
        assert found.dtype == torch.float32 and note is None
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_bias_shift():
    w, mean = weights(3, 5), torch.tensor([1.0, -2.0, 3.0, 0.5, 10.0], dtype=torch.float64)
    expected = [row[0] * 1.0 + row[2] * 3.0 + row[3] * 0.5 for row in w.tolist()]
    assert bias_shift(w, mean, torch.tensor([1, 4])).tolist() == pytest.approx(expected)
    assert not bias_shift(w, mean, torch.arange(5)).any()


def test_all_kept_is_unchanged_to_the_bit():
    w = weights(6, 10).float()
    found, note = least_squares(w, moments(tokens(30, 10)).float(), torch.arange(10))
    assert torch.equal(found, w) and note is None


def test_a_copy_of_a_kept_input_is_made_up_for():
    """Each removed input is twice its kept neighbour: the whole output can be had without it."""
    x = tokens(400, 12)
    x[:, 1::2] = 2 * x[:, ::2]
    w, kept = weights(5, 12), every(2, 12)
    found, _ = least_squares(w, moments(x), kept, ridge=1e-9)
    torch.testing.assert_close(found, w[:, ::2] + 2 * w[:, 1::2], rtol=1e-5, atol=1e-5)


def test_inputs_that_have_nothing_in_common_change_nothing():
    w = weights(5, 8).float()
    found, note = least_squares(w, torch.diag(torch.arange(1.0, 9.0)), every(2, 8))
    assert torch.equal(found, w[:, ::2]) and note is None


def test_nothing_is_written_to_what_is_given():
    w, m, kept = weights(5, 8).float(), moments(tokens(90, 8)).float(), every(2, 8)
    before = [tensor.clone() for tensor in (w, m, kept)]
    least_squares(w, m, kept)
    towards(w[:, ::2], m[::2, ::2], torch.ones(5, 4))
    assert all(torch.equal(tensor, old) for tensor, old in zip((w, m, kept), before, strict=True))


@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_the_scale_of_the_inputs_changes_nothing(factor):
    w, m, kept = weights(5, 20).float(), moments(tokens(90, 20)).float(), every(3, 20)
    torch.testing.assert_close(least_squares(w, m * factor, kept)[0], least_squares(w, m, kept)[0])


class TestPoorMoments:
    def test_a_larger_ridge_where_the_moments_are_indefinite(self):
        """Rounding does it: here as much as 5 % of the mean."""
        w, x, kept = weights(5, 8).float(), tokens(3, 8), every(2, 8)
        m = moments(x)
        lowest = torch.linalg.eigvalsh(m[::2, ::2])[0]
        m[kept, kept] -= lowest + 0.05 * m[kept, kept].mean()
        found, note = least_squares(w, m.float(), kept)
        assert note == "its inputs took a ridge of 0.1 instead of 0.01."
        expected, _ = least_squares(w, m.float(), kept, ridge=0.1)
        assert torch.equal(found, expected) and not torch.equal(found, w[:, ::2])

    @pytest.mark.parametrize("poor", [torch.zeros(8, 8), torch.full((8, 8), torch.nan), -torch.eye(8)])
    def test_weights_stay_where_no_ridge_helps(self, poor):
        w, kept = weights(5, 8).float(), every(2, 8)
        found, note = least_squares(w, poor, kept)
        assert torch.equal(found, w[:, ::2])
        assert note == "no ridge up to 1 gives finite weights; it is not compensated."

    def test_weights_stay_where_the_new_ones_overflow(self):
        w, kept = weights(5, 8).float().sign() * 3e38, every(2, 8)
        found, note = least_squares(w, torch.ones(8, 8) + torch.eye(8), kept)
        assert torch.equal(found, w[:, ::2])
        assert note == "no ridge up to 1 gives finite weights; it is not compensated."

    def test_fewer_tokens_than_inputs(self):
        w, x, kept = weights(5, 60).float(), tokens(7, 60).float(), every(2, 60)
        found, note = least_squares(w, moments(x), kept)
        assert found.isfinite().all() and note is None


def objective(new: Tensor, w: Tensor, m: Tensor, kept: Tensor, ridge: float) -> float:
    """`E|W a - W' a_K|^2 + ridge mean(diag M_KK) |W' - W_K|^2`."""
    off = w.clone()
    off[:, kept] -= new
    move = ridge * m.diagonal()[kept].mean() * (new - w[:, kept]).square().sum()
    return float((off @ m * off).sum() + move)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float]:
    d, seed = draw(st.integers(2, 9)), draw(st.integers(0, 999))
    kept = sorted(draw(st.sets(st.integers(0, d - 1), min_size=1, max_size=d)))
    x = tokens(draw(st.integers(1, 30)), d, seed)
    return weights(draw(st.integers(1, 4)), d, seed + 1), moments(x), torch.tensor(kept), draw(st.floats(1e-4, 1.0))


@UNTIMED
@given(problems(), st.integers(0, 999), st.floats(1e-3, 10.0))
def test_no_other_weights_are_better(problem, seed, far):
    w, m, kept, ridge = problem
    found, note = least_squares(w, m, kept, ridge)
    best = objective(found, w, m, kept, ridge)
    direction = weights(*found.shape, seed=seed)
    for other in (found + far * direction, found - far * direction, w[:, kept], torch.zeros_like(found)):
        assert objective(other, w, m, kept, ridge) >= best - 1e-9 * (1 + best)
    # Without the penalty too, it is never worse than what there was.
    assert note is None
    assert objective(found, w, m, kept, 0.0) <= objective(w[:, kept], w, m, kept, 0.0) * (1 + 1e-9)
