"""Scores against plain loops in float64, written from METHODS.md; and what every scorer owes."""
# pyright: reportArgumentType=false, reportCallIssue=false

import copy
import math

import pytest
import torch

from optimum_prune import objectives, registry
from optimum_prune.binding import bind
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.errors import UnsupportedModel
from optimum_prune.objectives import IGNORED, NTK, Objective, Outputs
from optimum_prune.scorers import ntk
from optimum_prune.scorers.base import Scorer, Statistics, no_weights, unit_scores
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
    (got,) = score_groups(model, bind(model), [scorer], data=data, batch_size=batch_size)
    for group, expected in zip(bind(model), loops(model), strict=True):
        scores = got[group.name]
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
    scorer = Scorer("probe", lambda w, s: gradients.setdefault(w, s.gradients["ntk"]).abs(), "", objectives=(NTK,))
    score_groups(model, bind(model), [scorer], data=data, batch_size=2)
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


def test_the_sign_survives_until_all_samples_are_in():
    """Two samples of opposite gradients cancel: |sum|, not the sum of the absolute values."""
    model = small_llama()

    def value(outputs):
        return sum((-1.0) ** i * sample.sum() for i, sample in enumerate(outputs.logits)) + 0 * outputs.logits.sum()

    data = CalibrationData([SAMPLES[0]] * 2, 6, "test")
    scorer = Scorer("probe", ntk.score, "", objectives=(Objective("ntk", value),))
    (found,) = score_groups(model, bind(model), [scorer], data=data, batch_size=2)
    assert all(scores.abs().max() < 1e-4 for scores in found.values())


def test_unit_scores_sums_rows_of_writers_and_columns_of_readers():
    writer, narrow = torch.arange(12.0).view(6, 2), torch.ones(3, 2)
    reader = torch.arange(6.0).view(1, 6)
    got = unit_scores([writer, narrow], [reader], 3)
    assert got.tolist() == [0 + 1 + 2 + 3 + 2 + 0 + 1, 4 + 5 + 6 + 7 + 2 + 2 + 3, 8 + 9 + 10 + 11 + 2 + 4 + 5]


@pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: scorer.name)
class TestContract:
    @staticmethod
    def call(scorer, weight, seed=0):
        if scorer.score is no_weights:
            pytest.skip("scores units, not weights")
        generator = torch.Generator().manual_seed(7)
        gradients = {o.name: torch.randn(weight.shape, generator=generator, device="cpu") for o in scorer.objectives}
        norm = torch.rand(weight.shape[1], generator=generator, device="cpu")
        return scorer.score(weight, Statistics(torch.Generator().manual_seed(seed), gradients, norm=norm))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    @pytest.mark.parametrize("shape", [(5, 8), (1, 1)])
    def test_scores_of_weights(self, scorer, shape, dtype):
        weight = torch.nn.Parameter(torch.randn(shape).to(dtype))
        before = weight.detach().clone()
        with torch.no_grad():
            score = self.call(scorer, weight)
        assert (score.shape, score.dtype) == (weight.shape, torch.float32)
        assert torch.isfinite(score).all()
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
            assert torch.equal(self.call(scorer, weight), expected)

    def test_facts(self, scorer):
        assert registry.load("scorers", scorer.name) is scorer
        assert scorer.reference
        assert scorer.allocation in ("uniform", "global", "gamma")
        assert scorer.comparable == "model" or scorer.allocation == "uniform"
        assert scorer.seq_len is None or scorer.needs_data  # without data no length means anything

    def test_scores_of_units(self, scorer):
        model = small_llama()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        data = CalibrationData(SAMPLES, 6, "test") if scorer.needs_data else None
        (first,), (again,) = (score_groups(model, bind(model), [scorer], data=data, seed=3) for _ in range(2))
        for group in bind(model):
            scores = first[group.name]
            assert scores.shape[:1] == (group.num_units,) and scores.dtype == torch.float32
            assert (scores.dim() == 1) or scorer.combine is not None
            assert scores.device.type == "cpu" and not scores.requires_grad
            assert (scores >= 0).all() and torch.equal(scores, again[group.name])
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_the_batch_size_changes_nothing(self, scorer):
        model = small_llama()
        data = CalibrationData(SAMPLES, 6, "test") if scorer.needs_data else None
        (alone,), (together,) = (
            score_groups(model, bind(model), [scorer], data=data, batch_size=size) for size in (1, 4)
        )
        for name, scores in alone.items():
            torch.testing.assert_close(scores, together[name], rtol=1e-3, atol=1e-7)

    def test_beside_others_it_gives_the_same(self, scorer):
        """One pass for several scorers, which share what they look at."""
        model, data = small_llama(), CalibrationData(SAMPLES, 6, "test")
        together = dict(zip(SCORERS, score_groups(model, bind(model), SCORERS, data=data), strict=True))[scorer]
        (alone,) = score_groups(model, bind(model), [scorer], data=data)
        for name, scores in alone.items():
            torch.testing.assert_close(together[name], scores, rtol=1e-5, atol=1e-9)

    def test_units_of_zeros_are_worth_least(self, scorer):
        if scorer.name == "random":
            return
        model = small_llama()
        mlp = bind(model)[1]
        for linear in mlp.writers:
            linear.weight.data[3] = 0
        mlp.readers[0].weight.data[:, 3] = 0
        data = CalibrationData(SAMPLES, 6, "test") if scorer.needs_data else None
        (found,) = score_groups(model, [mlp], [scorer], data=data)
        scores = found[mlp.name].view(CHANNELS, -1)
        assert not scores[3].any() and (scores > 0).sum() == (CHANNELS - 1) * scores.shape[1]


@pytest.mark.parametrize(
    "objective",
    [objectives.NTK, objectives.MEAN_LOGIT, objectives.LOGSUMEXP, objectives.LOSS, objectives.ENERGY],
    ids=lambda o: o.name,
)
def test_objective_is_a_sum_over_samples_that_does_not_see_padding(objective):
    logits, states = torch.randn(3, 5, 7, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    labels = torch.where(mask, torch.arange(5) % 7, IGNORED)

    value = objective.value(Outputs(logits, states, mask, labels))
    assert value.shape == () and value.dtype == torch.float32
    rows = zip(logits, states, mask, labels, strict=True)
    alone = [objective.value(Outputs(x[None, m], s[None, m], m[None, m], y[None, m])) for x, s, m, y in rows]
    torch.testing.assert_close(value, torch.stack(alone).sum())
    source = states if objective is objectives.ENERGY else logits
    (gradient,) = torch.autograd.grad(value, source)
    assert not gradient[~mask].any() and gradient[mask].any()


def test_random_follows_its_seed():
    model, scorer = small_llama(), registry.load("scorers", "random")
    (one,), (other,) = (score_groups(model, bind(model), [scorer], seed=seed) for seed in (0, 1))
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_scores_that_are_no_numbers_are_refused_by_name():
    model = small_llama()
    scorer = Scorer("broken", lambda weight, statistics: weight.float() / 0, "")
    with pytest.raises(UnsupportedModel, match=r"broken scores of model\.layers\.0\.self_attn are not finite"):
        score_groups(model, bind(model), [scorer])
