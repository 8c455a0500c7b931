"""The metric that scales multiply, and the soft mask that gradients see."""

import math

import pytest
import torch
from torch import Tensor

from optimum_prune.masks import matrix_mask, n_of_m_mask, row_mask
from optimum_prune.scales import metric, penalty, soft_mask
from optimum_prune.scorers.base import Statistics
from optimum_prune.scorers.wanda import score

ROWS, WIDTH = 6, 16
CHOICES = {
    "row": (WIDTH, lambda scores: row_mask(scores, 5)),
    "matrix": (ROWS * WIDTH, lambda scores: matrix_mask(scores, 40)),
    "2:4": (4, lambda scores: n_of_m_mask(scores, 2, 4)),
    "1:8": (8, lambda scores: n_of_m_mask(scores, 1, 8)),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs() -> Tensor:
    return drawn(50, WIDTH, seed=1) * torch.linspace(0.1, 5, WIDTH)


class TestMetric:
    def test_a_refresh_equals_what_is_measured_again(self):
        """`|W| sqrt(diag H) s` from a cached diagonal: Wanda's scores of the tokens themselves, times the scales."""
        weight, x, theta = drawn(ROWS, WIDTH), inputs(), drawn(WIDTH, seed=2)
        root = x.square().mean(dim=0).sqrt()
        for step in range(3):
            scales = (theta * step).exp()
            measured = score(weight, Statistics(torch.Generator(), norm=(x * scales).square().mean(dim=0).sqrt()))
            torch.testing.assert_close(metric(weight, root, theta * step), measured)

    def test_by_loops(self):
        weight, root, theta = drawn(ROWS, WIDTH), inputs().abs().mean(dim=0), drawn(WIDTH, seed=2)
        expected = [[abs(weight[i, j]) * root[j] * math.exp(theta[j]) for j in range(WIDTH)] for i in range(ROWS)]
        torch.testing.assert_close(metric(weight, root, theta), torch.tensor(expected))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_read_as_float32(self, dtype):
        weight = (drawn(ROWS, WIDTH) * 1e-4).to(dtype)
        got = metric(weight, torch.full((WIDTH,), 1e6), torch.zeros(WIDTH))
        assert got.dtype == torch.float32 and torch.isfinite(got).all()


@pytest.mark.parametrize(("pool", "choose"), CHOICES.values(), ids=CHOICES)
class TestSoftMask:
    def soft(self, choose, pool, theta: Tensor, temperature: float = 0.5) -> tuple[Tensor, Tensor]:
        weight, root = drawn(ROWS, WIDTH), inputs().square().mean(dim=0).sqrt()
        mask = choose(metric(weight, root, theta))
        return mask, soft_mask(weight, root, theta, mask, pool, temperature)

    def test_it_agrees_with_the_hard_mask(self, pool, choose):
        mask, soft = self.soft(choose, pool, drawn(WIDTH, seed=3))
        assert torch.equal(soft > 0.5, mask)
        _, sharp = self.soft(choose, pool, drawn(WIDTH, seed=3), temperature=1e-5)
        torch.testing.assert_close(sharp, mask.float(), rtol=0, atol=1e-3)

    def test_gradients_equal_finite_differences(self, pool, choose):
        """Of the surrogate that is meant: a threshold at which as much is kept as before, found by bisection."""
        weight, root = drawn(ROWS, WIDTH), inputs().square().mean(dim=0).sqrt().double()
        theta, temperature = drawn(WIDTH, seed=3).double().requires_grad_(), 0.5
        direction = drawn(ROWS, WIDTH, seed=4).double()
        mask = choose(metric(weight, root, theta))
        soft = soft_mask(weight, root, theta, mask, pool, temperature)
        (gradient,) = torch.autograd.grad((soft * direction).sum(), theta)
        kept = soft.detach().view(-1, pool).sum(dim=1, keepdim=True)

        def surrogate(theta: Tensor) -> Tensor:
            logs = metric(weight, root, theta).log().view(-1, pool)
            low, high = logs.amin(dim=1, keepdim=True) - 20, logs.amax(dim=1, keepdim=True) + 20
            for _ in range(80):
                middle = (low + high) / 2
                above = torch.sigmoid((logs - middle) / temperature).sum(dim=1, keepdim=True) > kept
                low, high = torch.where(above, middle, low), torch.where(above, high, middle)
            return torch.sigmoid((logs - low) / temperature).view(weight.shape)

        torch.testing.assert_close(surrogate(theta.detach()), soft.detach(), rtol=1e-9, atol=1e-9)
        for j in range(WIDTH):
            step = torch.zeros(WIDTH, dtype=torch.float64)
            step[j] = 1e-5
            change = surrogate(theta.detach() + step) - surrogate(theta.detach() - step)
            assert (change * direction).sum().item() / 2e-5 == pytest.approx(gradient[j].item(), rel=1e-5, abs=1e-8)
        assert gradient.sum().item() == pytest.approx(0, abs=1e-10)  # a factor in common changes nothing

    def test_a_factor_that_all_scales_have_in_common_changes_nothing(self, pool, choose):
        theta = drawn(WIDTH, seed=3)
        (mask, soft), (other_mask, other) = (self.soft(choose, pool, theta + shift) for shift in (0.0, math.log(7.3)))
        assert torch.equal(mask, other_mask)
        torch.testing.assert_close(soft, other, rtol=1e-4, atol=1e-5)

    def test_weights_and_inputs_of_zero(self, pool, choose):
        weight, root = drawn(ROWS, WIDTH), torch.ones(WIDTH)
        weight[:, 3:14] = 0
        root[0] = 0
        theta = torch.zeros(WIDTH, requires_grad=True)
        soft = soft_mask(weight, root, theta, choose(metric(weight, root, theta)), pool, 0.1)
        (gradient,) = torch.autograd.grad(soft.sum(), theta)
        assert torch.isfinite(soft).all() and torch.isfinite(gradient).all()


def test_penalty_by_singular_values():
    weights, thetas = [drawn(4, 6), drawn(3, 6, seed=5)], [drawn(6, seed=6), drawn(6, seed=7)]
    for power in (1.0, 2.0, 3.0):
        total = 0.0
        for weight, theta in zip(weights, thetas, strict=True):
            values = torch.linalg.svd(weight.double() @ theta.double().exp().diag())[1].tolist()
            total += sum(value**power for value in values) ** (1 / power)
        got = penalty(list(zip(weights, thetas, strict=True)), 0.05, power)
        assert got.item() == pytest.approx(math.exp(-0.05 * total), rel=1e-4)


def test_a_power_of_two_is_the_frobenius_norm():
    weight = drawn(4, 6)
    assert penalty([(weight, torch.zeros(6))], 0.1, 2.0).item() == pytest.approx(math.exp(-0.1 * weight.norm().item()))
