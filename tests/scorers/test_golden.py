"""Scores against plain loops in float64, written from METHODS.md; and what every scorer owes."""
# pyright: reportArgumentType=false, reportCallIssue=false

import copy
import math

import pytest
import torch

from optimum_prune import registry
from optimum_prune.binding import bind
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.errors import UnsupportedModel
from optimum_prune.scorers import ntk
from optimum_prune.scorers.base import Scorer, Statistics, unit_scores
from optimum_prune.scoring import score_groups
from tests.models import llama, tokens

HIDDEN, HEADS, GROUPS, HEAD_DIM, CHANNELS, VOCABULARY = 8, 4, 2, 6, 7, 11
SAMPLES = [tokens(1, length, seed=length, vocabulary=VOCABULARY)[0] for length in (6, 2, 5, 6)]
SCORERS = [
    scorer
    for name in registry.available("scorers")
    if "structured" in (scorer := registry.load("scorers", name)).patterns
]


def small_llama():
    return llama(
        num_hidden_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        intermediate_size=CHANNELS,
        vocab_size=VOCABULARY,
    )


def units_of(block):
    """Yield the entries of each unit of a block, `(linear, row, column)`: KV groups, then channels."""
    attention, mlp = block.self_attn, block.mlp
    queries = HEADS // GROUPS
    groups, channels = [], []
    for a in range(GROUPS):
        kv_rows = range(a * HEAD_DIM, (a + 1) * HEAD_DIM)
        q_rows = range(a * queries * HEAD_DIM, (a + 1) * queries * HEAD_DIM)
        groups.append(
            [
                (linear, row, column)
                for linear in (attention.k_proj, attention.v_proj)
                for row in kv_rows
                for column in range(HIDDEN)
            ]
            + [(attention.q_proj, row, column) for row in q_rows for column in range(HIDDEN)]
            + [(attention.o_proj, row, column) for row in range(HIDDEN) for column in q_rows]
        )
    for u in range(CHANNELS):
        channels.append(
            [(linear, u, column) for linear in (mlp.gate_proj, mlp.up_proj) for column in range(HIDDEN)]
            + [(mlp.down_proj, row, u) for row in range(HIDDEN)]
        )
    return groups, channels


def magnitude_loops(model):
    values = {linear: linear.weight.double().tolist() for linear in linears_of(model)}
    return [
        [math.sqrt(sum(values[linear][row][column] ** 2 for linear, row, column in unit)) for unit in units]
        for block in model.model.layers
        for units in units_of(block)
    ]


def ntk_loops(model):
    """S_u = sum |df/dW_ij * W_ij|; f = mean over samples and vocabulary of the maximum over the sequence."""
    model = copy.deepcopy(model).double()
    f = 0.0
    for sample in SAMPLES:  # each alone: no padding anywhere
        logits = model(sample[None]).logits[0]
        for word in range(VOCABULARY):
            best = logits[0, word]
            for position in range(1, len(sample)):
                if logits[position, word].item() > best.item():
                    best = logits[position, word]
            f = f + best / (VOCABULARY * len(SAMPLES))
    linears = linears_of(model)
    gradients = torch.autograd.grad(f, [linear.weight for linear in linears])
    products = {
        linear: (linear.weight * gradient).tolist() for linear, gradient in zip(linears, gradients, strict=True)
    }
    return [
        [sum(abs(products[linear][row][column]) for linear, row, column in unit) for unit in units]
        for block in model.model.layers
        for units in units_of(block)
    ]


def linears_of(model):
    return [linear for group in bind(model) for linear in group.linears]


@pytest.mark.parametrize(("name", "loops"), [("magnitude", magnitude_loops), ("ntk", ntk_loops)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_unit_scores_equal_plain_loops(name, loops, batch_size):
    model, scorer = small_llama(), registry.load("scorers", name)
    data = CalibrationData(SAMPLES, 6, "test")
    got = score_groups(model, bind(model), scorer, data=data, batch_size=batch_size)
    for scores, expected in zip(got, loops(model), strict=True):
        assert min(expected) > 0
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=0)


def test_gradients_equal_finite_differences():
    """What autograd says is the gradient of f: central differences, at the largest entry of each matrix."""
    model = small_llama().double()

    def f():
        with torch.no_grad():
            tops = [model(sample[None]).logits[0].max(dim=0).values.mean() for sample in SAMPLES]
        return torch.stack(tops).mean()

    data = CalibrationData(SAMPLES, 6, "test")
    gradients = {}
    scorer = Scorer("probe", lambda w, s: gradients.setdefault(w, s.gradient).abs(), "", objective=ntk.objective)
    score_groups(model, bind(model), scorer, data=data, batch_size=2)
    for linear in linears_of(model):
        gradient, weight = gradients[linear.weight], linear.weight.data
        i, j = divmod(int(gradient.abs().argmax()), gradient.shape[1])
        value, step = weight[i, j].item(), 1e-3  # the norms compute in float32
        weight[i, j] = value + step
        above = f()
        weight[i, j] = value - step
        below = f()
        weight[i, j] = value
        assert (above - below).item() / (2 * step) == pytest.approx(gradient[i, j].item(), rel=2e-2)


class TestNtkObjective:
    def test_by_hand(self):
        logits = torch.tensor([[[1.0, 5.0], [3.0, 2.0]], [[-4.0, 0.0], [9.0, 9.0]]])
        mask = torch.tensor([[True, True], [True, False]])
        assert ntk.objective(logits, mask) == (3 + 5) / 2 + (-4 + 0) / 2
        assert ntk.objective(logits, mask.new_ones(2, 2)) == (3 + 5) / 2 + (9 + 9) / 2

    def test_half_precision_is_summed_in_float32(self):
        logits = torch.full((64, 2, 5000), 300.0, dtype=torch.float16)
        assert ntk.objective(logits, torch.ones(64, 2, dtype=torch.bool)) == 64 * 300.0


def test_the_sign_survives_until_all_samples_are_in():
    """Two samples of opposite gradients cancel: |sum|, not the sum of the absolute values."""
    model = small_llama()

    def objective(logits, mask):
        return sum((-1.0) ** i * sample.sum() for i, sample in enumerate(logits)) + 0 * logits.sum()

    data = CalibrationData([SAMPLES[0]] * 2, 6, "test")
    scorer = Scorer("probe", ntk.score, "", objective=objective)
    for scores in score_groups(model, bind(model), scorer, data=data, batch_size=2):
        assert scores.abs().max() < 1e-4


def test_unit_scores_sums_rows_of_writers_and_columns_of_readers():
    writer, narrow = torch.arange(12.0).view(6, 2), torch.ones(3, 2)
    reader = torch.arange(6.0).view(1, 6)
    got = unit_scores([writer, narrow], [reader], 3)
    assert got.tolist() == [0 + 1 + 2 + 3 + 2 + 0 + 1, 4 + 5 + 6 + 7 + 2 + 2 + 3, 8 + 9 + 10 + 11 + 2 + 4 + 5]


@pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: scorer.name)
class TestContract:
    @staticmethod
    def call(scorer, weight, seed=0):
        gradient = None
        if scorer.objective is not None:
            gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7))
        return scorer.score(weight, Statistics(torch.Generator().manual_seed(seed), gradient))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    @pytest.mark.parametrize("shape", [(5, 8), (1, 1)])
    def test_scores_of_weights(self, scorer, shape, dtype):
        weight = torch.nn.Parameter(torch.randn(shape).to(dtype))
        before = weight.detach().clone()
        with torch.no_grad():
            score = self.call(scorer, weight)
        assert (score.shape, score.dtype) == (weight.shape, torch.float32)
        assert (score >= 0).all() and torch.isfinite(score).all()
        assert torch.equal(weight, before)

    def test_the_same_seed_gives_the_same_bits(self, scorer):
        weight = torch.randn(16, 16)
        state = torch.random.get_rng_state()
        assert torch.equal(self.call(scorer, weight), self.call(scorer, weight.clone()))
        assert torch.equal(torch.random.get_rng_state(), state)  # nothing is drawn from the global generator

    def test_whatever_the_default_device(self, scorer):
        weight = torch.randn(4, 4)
        expected = self.call(scorer, weight)
        with torch.device("meta"):
            gradient = (
                None
                if scorer.objective is None
                else torch.randn((4, 4), generator=torch.Generator().manual_seed(7), device="cpu")
            )
            assert torch.equal(scorer.score(weight, Statistics(torch.Generator().manual_seed(0), gradient)), expected)

    def test_objective_is_a_sum_over_samples_that_does_not_see_padding(self, scorer):
        if scorer.objective is None:
            return
        logits = torch.randn(3, 5, 7, requires_grad=True)
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
        value = scorer.objective(logits, mask)
        assert value.shape == () and value.dtype == torch.float32
        alone = [scorer.objective(x[None, m], m[None, m]) for x, m in zip(logits, mask, strict=True)]
        torch.testing.assert_close(value, torch.stack(alone).sum())
        (gradient,) = torch.autograd.grad(value, logits)
        assert not gradient[~mask].any() and gradient[mask].any()

    def test_facts(self, scorer):
        assert registry.load("scorers", scorer.name) is scorer
        assert scorer.reference
        assert scorer.allocation in ("uniform", "global", "gamma")
        assert scorer.comparable == "model" or scorer.allocation == "uniform"
        assert scorer.seq_len is None or scorer.objective is not None  # without data no length means anything

    def test_scores_of_units(self, scorer):
        model = small_llama()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        data = CalibrationData(SAMPLES, 6, "test") if scorer.objective else None
        first, again = (score_groups(model, bind(model), scorer, data=data, seed=3) for _ in range(2))
        for group, scores, same in zip(bind(model), first, again, strict=True):
            assert (scores.shape, scores.dtype) == ((group.num_units,), torch.float32)
            assert scores.device.type == "cpu" and not scores.requires_grad
            assert (scores >= 0).all() and torch.equal(scores, same)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_units_of_zeros_are_worth_nothing(self, scorer):
        if scorer.name == "random":
            return
        model = small_llama()
        mlp = bind(model)[1]
        for linear in mlp.writers:
            linear.weight.data[3] = 0
        mlp.readers[0].weight.data[:, 3] = 0
        data = CalibrationData(SAMPLES, 6, "test") if scorer.objective else None
        scores = score_groups(model, [mlp], scorer, data=data)[0]
        assert scores[3] == 0 and (scores > 0).sum() == CHANNELS - 1


def test_random_follows_its_seed():
    model, scorer = small_llama(), registry.load("scorers", "random")
    one, other = (score_groups(model, bind(model), scorer, seed=seed) for seed in (0, 1))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_scores_that_are_no_numbers_are_refused_by_name():
    model = small_llama()
    scorer = Scorer("broken", lambda weight, statistics: weight.float() / 0, "")
    with pytest.raises(UnsupportedModel, match=r"broken scores of model\.layers\.0\.self_attn are not finite"):
        score_groups(model, bind(model), scorer)
