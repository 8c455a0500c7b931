"""SparseGPT and ADMM against plain loops in float64, and the order in which the methods keep the output."""

import pytest
import torch
from torch import Tensor

from optimum_prune.masks import matrix_mask, n_of_m_mask, removed_of, row_mask
from optimum_prune.solvers import DAMPING, ITERATIONS, admm, damped, inverse_factor, sparsegpt

OUTER = 128


def inputs(d: int, tokens: int | None = None, seed: int = 0) -> Tensor:
    """Correlated inputs, some of them much larger than others, `(T, d) float32`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens or 4 * d, d, generator=generator)
    mixing = torch.randn(d, d, generator=generator) / d**0.5 + torch.eye(d)
    return (x @ mixing) * torch.linspace(-1, 1, d)[torch.randperm(d, generator=generator)].exp()


def moments(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


def matrices(*rows: int, d: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(r, d, generator=generator) * (i + 1) for i, r in enumerate(rows)]


def lowest(scores: list[tuple[float, int, int]], remove: int) -> set[tuple[int, int]]:
    return {(i, j) for _, j, i in sorted((score, j, i) for score, i, j in scores)[:remove]}


def sparsegpt_loops(weight: Tensor, hessian: Tensor, sparsity: float, n_of_m: tuple[int, int] | None) -> Tensor:
    """Frantar & Alistarh 2023, algorithm 1, for one linear: every update at once, no blocks, no shared factor."""
    h = hessian.double()
    dead = [j for j in range(len(h)) if h[j, j] == 0]
    for j in dead:
        h[j, j] = 1.0
    h = h + 0.01 * h.diagonal().mean() * torch.eye(len(h))
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True).tolist()
    w = [[0.0 if j in dead else value for j, value in enumerate(row)] for row in weight.double().tolist()]
    rows, d = len(w), len(w[0])
    gone: set[tuple[int, int]] = set()
    for j in range(d):
        if n_of_m and j % n_of_m[1] == 0:
            for i in range(rows):
                gone |= lowest([(w[i][k] ** 2 / u[k][k] ** 2, i, k) for k in range(j, j + n_of_m[1])], n_of_m[0])
        if not n_of_m and j % OUTER == 0:
            end = min(j + OUTER, d)
            remove = removed_of(rows * end, sparsity) - removed_of(rows * j, sparsity)
            gone |= lowest([(w[i][k] ** 2 / u[k][k] ** 2, i, k) for i in range(rows) for k in range(j, end)], remove)
        for i in range(rows):
            if (i, j) in gone:
                error, w[i][j] = w[i][j] / u[j][j], 0.0
                for k in range(j + 1, d):
                    w[i][k] -= error * u[j][k]
    return torch.tensor(w, dtype=torch.float64)


def admm_plainly(weight: Tensor, hessian: Tensor, sparsity: float, n_of_m: tuple[int, int] | None) -> Tensor:
    """The update as it is written, in float64, with an explicit inverse."""
    h, w = hessian.double(), weight.double()
    size = torch.tensor([h[j, j] ** 0.5 or 1.0 for j in range(len(h))], dtype=torch.float64)
    w = torch.where(h.diagonal() == 0, 0, w) * size
    h = h / torch.outer(size, size) + 0.01 * torch.eye(len(h)) + torch.diag((h.diagonal() == 0).double())
    inverse = torch.linalg.inv(h + torch.eye(len(h)))

    def choose(values: Tensor, share: float) -> Tensor:
        return n_of_m_mask(values.abs(), *n_of_m) if n_of_m else row_mask(values.abs(), removed_of(w.shape[1], share))

    mask = choose(w, sparsity)
    z = w * mask
    u = w - z
    for t in range(1, 11):
        free = (w @ h + (z - u)) @ inverse + u
        if t <= 6:
            mask = choose(free, sparsity * (1 - (1 - t / 6) ** 3))
        z = free * mask
        u = free - z
    return z / size


SHAPES = [
    # d, rows of each linear, sparsity, n:m
    (24, (5, 3), 0.5, None),
    (24, (5,), 0.5, (2, 4)),
    (24, (4, 6), 1 / 3, (1, 3)),
    (1, (6,), 0.5, None),
    (300, (4, 2, 3), 0.6, None),  # three blocks of 128, the last is short; a threshold for each linear
    (129, (3, 2), 2 / 3, (2, 3)),  # inner blocks of 15, outer ones of 120
    (130, (3, 2), 0.4, (2, 5)),
    (136, (3, 2), 0.5, (2, 4)),
    (136, (2,), 0.5, (4, 8)),
    (160, (3,), 0.25, (8, 32)),  # a group that is wider than an inner block
]


@pytest.mark.parametrize(("solve", "loops"), [(sparsegpt, sparsegpt_loops), (admm, admm_plainly)])
@pytest.mark.parametrize(("d", "rows", "sparsity", "n_of_m"), SHAPES, ids=str)
@pytest.mark.parametrize("dead", [(), (0, -1)], ids=["alive", "dead"])
def test_weights_equal_plain_loops(solve, loops, d, rows, sparsity, n_of_m, dead):
    x, weights = inputs(d), matrices(*rows, d=d)
    x[:, list(dead)] = 0
    before, hessian = [weight.clone() for weight in weights], moments(x)
    solved, note = solve(weights, hessian, sparsity, n_of_m)
    assert note is None
    assert all(torch.equal(weight, same) for weight, same in zip(weights, before, strict=True))
    assert torch.equal(hessian, moments(x))
    for weight, pruned in zip(weights, solved, strict=True):
        expected = loops(weight, moments(x), sparsity, n_of_m)
        assert (pruned.shape, pruned.dtype) == (weight.shape, torch.float32)
        assert torch.equal(pruned != 0, expected != 0)
        torch.testing.assert_close(pruned.double(), expected, rtol=2e-3, atol=2e-4)
        assert not pruned[:, list(dead)].any()


@pytest.mark.parametrize("n_of_m", [None, (2, 4)])
@pytest.mark.parametrize("solve", [sparsegpt, admm])
def test_what_is_removed_is_plus_zero_in_every_dtype(solve, n_of_m):
    weights = matrices(16, 8, d=160)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for pruned in solve(weights, moments(inputs(160)), 0.5, n_of_m)[0]:
            cast = pruned.to(dtype)
            assert (cast == 0).sum() == cast.numel() // 2
            assert not torch.signbit(cast[cast == 0]).any()


@pytest.mark.parametrize("sparsity", [0.1, 0.29, 0.5, 0.77])
def test_counts_are_exact(sparsity):
    """SparseGPT per linear, though blocks do not divide it; ADMM per row."""
    weights = matrices(7, 3, d=300)
    for pruned in sparsegpt(weights, moments(inputs(300)), sparsity)[0]:
        assert (pruned == 0).sum() == removed_of(pruned.numel(), sparsity)
    for pruned in admm(weights, moments(inputs(300)), sparsity)[0]:
        assert ((pruned == 0).sum(dim=1) == removed_of(300, sparsity)).all()


@pytest.mark.parametrize("n_of_m", [(1, 2), (2, 4), (1, 3), (4, 5), (4, 8)])
@pytest.mark.parametrize("solve", [sparsegpt, admm])
def test_groups_are_exact(solve, n_of_m):
    n, m = n_of_m
    for pruned in solve(matrices(7, 3, d=240), moments(inputs(240)), n / m, n_of_m)[0]:
        assert ((pruned.unflatten(1, (-1, m)) == 0).sum(dim=2) == n).all()


def test_nothing_removed_changes_nothing():
    weights = matrices(5, 3, d=150)
    solved, _ = sparsegpt(weights, moments(inputs(150)), 0.0)
    assert all(torch.equal(weight, same) for weight, same in zip(weights, solved, strict=True))


@pytest.mark.parametrize("n_of_m", [None, (2, 4)])
def test_inputs_without_correlation_leave_magnitude(n_of_m):
    """H = I: no weight can make up for another."""
    weights = matrices(6, 4, d=256)
    solved, _ = sparsegpt(weights, torch.eye(256), 0.5, n_of_m)
    for weight, pruned in zip(weights, solved, strict=True):
        if n_of_m:
            mask = n_of_m_mask(weight.abs(), *n_of_m)
        else:
            mask = torch.cat([matrix_mask(block.abs(), block.numel() // 2) for block in weight.split(128, dim=1)], 1)
        assert torch.equal(pruned, torch.where(mask, weight, 0))


class TestInverseFactor:
    def test_its_identities(self):
        h = moments(inputs(20))
        u, note = inverse_factor(h)
        u, h = u.double(), h.double() + DAMPING * h.diagonal().double().mean() * torch.eye(20)
        assert note is None and torch.equal(u, u.triu())
        torch.testing.assert_close(u.t() @ u, torch.linalg.inv(h), rtol=1e-3, atol=1e-4)
        for j in range(20):
            torch.testing.assert_close(u[j, j] ** 2, torch.linalg.inv(h[j:, j:])[0, 0], rtol=1e-4, atol=0)

    @pytest.mark.parametrize(("off", "damping"), [(1.005, 0.01), (1.05, 0.1), (1.5, 1.0)])
    def test_more_damping_where_it_takes_more(self, off, damping):
        """Eigenvalues 1 + off and 1 - off: rounding can leave a Hessian a little below zero."""
        h = torch.tensor([[1.0, off], [off, 1.0]])
        u, note = inverse_factor(h)
        torch.testing.assert_close(u.t() @ u, torch.linalg.inv(h + damping * torch.eye(2)), rtol=1e-3, atol=1e-3)
        assert note == (None if damping == 0.01 else f"the Hessian took a damping of {damping:g} of its mean diagonal.")

    def test_the_diagonal_where_nothing_helps(self):
        u, note = inverse_factor(torch.tensor([[4.0, 30.0], [30.0, 16.0]]))
        assert u.tolist() == [[0.5, 0.0], [0.0, 0.25]]
        assert note == "the Hessian is not positive definite; its diagonal alone was used."

    def test_fewer_tokens_than_columns(self):
        """CASES.md 9: damping makes a rank of 8 of 64 enough."""
        h = moments(inputs(64, tokens=8))
        for solve in (sparsegpt, admm):
            (pruned,), note = solve(matrices(16, d=64), h, 0.5, None)
            assert note is None and torch.isfinite(pruned).all() and (pruned == 0).sum() == 512

    def test_no_input_at_all(self):
        hessian, dead = damped(torch.zeros(3, 3))
        assert torch.equal(hessian, torch.eye(3)) and dead.all()
        for solve in (sparsegpt, admm):
            (pruned,), _ = solve(matrices(4, d=3), torch.zeros(3, 3), 0.5, None)
            assert not pruned.any()


# The claims of the methods: on the same inputs, each keeps the output better than the one before

PATTERNS = [(0.5, None), (0.5, (4, 8)), (0.5, (2, 4))]


def magnitude(weights, h, sparsity, n_of_m):
    return [prune(weight, weight.abs(), sparsity, n_of_m, matrix_mask) for weight in weights], None


def wanda(weights, h, sparsity, n_of_m):
    norm = h.diagonal().sqrt()
    return [prune(weight, weight.abs() * norm, sparsity, n_of_m, row_mask) for weight in weights], None


def prune(weight, scores, sparsity, n_of_m, choose):
    mask = n_of_m_mask(scores, *n_of_m) if n_of_m else None
    if mask is None:
        mask = choose(scores, removed_of(weight.numel() if choose is matrix_mask else weight.shape[1], sparsity))
    return torch.where(mask, weight, 0)


def lost(solve, sparsity, n_of_m, d=96) -> float:
    """Share of the output's energy that is lost, mean over 6 random problems."""
    total = 0.0
    for seed in range(6):
        x, (weight,) = inputs(d, seed=seed), matrices(48, d=d, seed=seed + 100)
        (pruned,), _ = solve([weight], moments(x), sparsity, n_of_m)
        total += float((x @ (weight - pruned).t()).square().sum() / (x @ weight.t()).square().sum())
    return total / 6


def test_every_method_keeps_more_than_the_one_before():
    table = {
        solve.__name__: [lost(solve, *pattern) for pattern in PATTERNS] for solve in (magnitude, wanda, sparsegpt, admm)
    }
    for worse, better in zip(["magnitude", "wanda", "sparsegpt"], ["wanda", "sparsegpt", "admm"], strict=True):
        assert all(b < 0.97 * w for w, b in zip(table[worse], table[better], strict=True)), table
    for free, wide, narrow in table.values():
        assert free < wide < narrow, table


def test_admm_gains_by_its_iterations(monkeypatch):
    full = lost(admm, 0.5, (2, 4))
    monkeypatch.setattr("optimum_prune.solvers.ITERATIONS", 1)
    assert ITERATIONS == 10 and full < 0.9 * lost(admm, 0.5, (2, 4))


def test_one_threshold_for_each_linear():
    """Stacked, the large linear would take all that is kept from the small one."""
    small, large = matrices(8, 8, d=64)
    for pruned in sparsegpt([small * 1e-3, large], moments(inputs(64)), 0.5)[0]:
        assert (pruned == 0).sum() == pruned.numel() // 2


def test_stacked_linears_are_pruned_as_if_alone():
    weights, h = matrices(5, 9, 2, d=150), moments(inputs(150))
    for n_of_m in (None, (2, 5)):
        for solve in (sparsegpt, admm):
            together, _ = solve(weights, h, 0.4, n_of_m)
            for weight, pruned in zip(weights, together, strict=True):
                (alone,), _ = solve([weight], h, 0.4, n_of_m)
                torch.testing.assert_close(alone, pruned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_scale_of_the_moments_changes_nothing(factor):
    weights, h = matrices(5, d=60), moments(inputs(60))
    for solve in (sparsegpt, admm):
        torch.testing.assert_close(
            solve(weights, h * factor, 0.5, None)[0][0], solve(weights, h, 0.5, None)[0][0], rtol=1e-3, atol=1e-4
        )
