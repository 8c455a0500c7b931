"""Taylor gates against whole backwards in float64, against finite differences, and against gradients of weights."""
# pyright: reportArgumentType=false, reportCallIssue=false

import pytest
import torch

from optimum_prune.binding import bind
from optimum_prune.objectives import LOSS
from optimum_prune.scorers import taylor
from optimum_prune.scorers.base import Part, Scorer, Statistics, Units, no_weights
from optimum_prune.scoring import score_groups
from tests.drawn import data_for
from tests.models import VARIANTS
from tests.scorers.plain import gradients, in_float64, loss, predicted, pushed

ARCHITECTURES = ["llama-gqa", "llama-mqa", "llama-tied-biased", "opt", "opt-350m", "gemma2", "t5", "t5-gated", "llava"]


def readers(group):
    return dict(zip(group.linear_names[len(group.writers) :], group.readers, strict=True))


def gates(model, data):
    """Yield for each sample: name of a reader -> `x dL/dx` of every token and column, as lists."""
    model = in_float64(model)
    linears = {name: linear for group in bind(model) for name, linear in readers(group).items()}
    tokens = predicted(model, data)
    for i in range(len(data.samples)):
        with pushed(linears) as seen:
            value = loss(model, data, i) / tokens
        found = torch.autograd.grad(value, [zeros for _, zeros in seen.values()], allow_unused=True)
        yield {
            name: (x * (torch.zeros_like(x) if gradient is None else gradient)).flatten(0, -2).tolist()
            for (name, (x, _)), gradient in zip(seen.items(), found, strict=True)
        }


def loops(model, data):
    """S_u = mean over samples of |sum over tokens, and over the unit's columns, of x dL/dx|."""
    samples = list(gates(model, data))
    scores = {}
    for group in bind(model):
        size = {name: linear.in_features // group.num_units for name, linear in readers(group).items()}
        scores[group.name] = []
        for unit in range(group.num_units):
            total = 0.0
            for products in samples:
                signed = 0.0
                for name, block in size.items():
                    for token in products[name]:
                        for column in range(unit * block, (unit + 1) * block):
                            signed += token[column]
                total += abs(signed)
            scores[group.name].append(total / len(samples))
    return scores


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_plain_loops(name):
    model = VARIANTS[name]()
    data = data_for(model)
    expected = loops(model, data)
    assert sum(max(scores) > 0 for scores in expected.values()) >= len(expected) - 2  # LLaVA's last block is not read
    for batch_size in (1, 2):  # of which the second pads
        (got,) = score_groups(model, bind(model), [taylor.SCORER], data=data, batch_size=batch_size)
        assert got.keys() == expected.keys()
        for group, scores in got.items():
            wanted = torch.tensor(expected[group])
            torch.testing.assert_close(scores, wanted, rtol=1e-3, atol=1e-5 * wanted.max().item())


@pytest.mark.parametrize("name", ["llama-gqa", "opt", "t5", "llava"])
def test_equals_finite_differences(name):
    """What one sample loses where a unit is turned up by a small factor, of each group the unit with the largest gate.

    The sub-layers are not linear, so the factor is small, and norms compute in float32, so it is not tiny.
    """
    model = VARIANTS[name]()
    data = data_for(model, samples=1)
    (got,) = score_groups(model, bind(model), [taylor.SCORER], data=data)
    model = in_float64(model)
    tokens = predicted(model, data)

    def turned_up(linear, columns, factor):
        def turn(_, args):
            x = args[0].clone()
            x[..., columns] *= factor
            return (x,)

        handle = linear.register_forward_pre_hook(turn)
        value = loss(model, data, 0).item() / tokens
        handle.remove()
        return value

    with torch.no_grad():
        for group in bind(model):
            (linear,) = group.readers
            unit, size = int(got[group.name].argmax()), linear.in_features // group.num_units
            columns = slice(unit * size, (unit + 1) * size)
            above, below = (turned_up(linear, columns, 1 + step) for step in (1e-3, -1e-3))
            assert abs(above - below) / 2e-3 == pytest.approx(got[group.name][unit].item(), rel=2e-2, abs=1e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied-biased", "opt", "t5-gated"])
def test_with_its_sign_it_is_the_gradient_of_the_weights(name):
    """Summed over samples, the gate of a column is `sum_i G_ij W_ij` of the reader (METHODS.md 5)."""
    model, seen = VARIANTS[name](), {}
    data = data_for(model)

    def look(units):
        for reader in units.readers:
            seen[reader.weight] = reader.statistics.gates["loss"].sum(dim=0)
        return torch.zeros(units.number)

    score_groups(model, bind(model), [Scorer("probe", no_weights, "", score_units=look, gates=LOSS)], data=data)
    tokens = predicted(model, data)
    found = gradients(model, lambda m: sum(loss(m, data, i) for i in range(len(data.samples))) / tokens)
    for group in bind(model):
        for name, linear in readers(group).items():
            expected = (found[name] * linear.weight.detach()).sum(dim=0).float()
            atol = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(seen[linear.weight], expected, rtol=1e-3, atol=atol)


def test_samples_of_opposite_sign_do_not_cancel_but_tokens_do():
    rows = torch.tensor([[3.0, 1.0, 0.5, -0.5], [-3.0, 1.0, 2.0, 2.0]])  # 2 samples, 4 columns
    reader = Part(torch.ones(5, 4), Statistics(torch.Generator(), gates={"loss": rows}))
    assert taylor.score_units(Units([], [reader], 4)).tolist() == [3.0, 1.0, 1.25, 1.25]
    assert taylor.score_units(Units([], [reader], 2)).tolist() == [(4 + 2) / 2, (0 + 4) / 2]
