"""Block influence of single tokens."""

import math

import pytest
import torch

from optimum_prune import registry
from optimum_prune.scorers.block_influence import SCORER, influence


def test_angles():
    before = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    after = torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [1.0, 1.0]])
    assert influence(before, after).tolist() == pytest.approx([0, 1, 2, 1 - 0.5**0.5], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    before = torch.full((2, 64), 300.0).to(dtype)  # its squares overflow in float16
    got = influence(before, before * 2)
    assert got.dtype == torch.float32 and got.tolist() == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize("width", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equal_states_score_exactly_zero(width, dtype):
    """`1 - cos` gives some 1e-7 of either sign, and which of two layers that do nothing goes would be chance."""
    states = torch.randn(50, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    laid_out_otherwise = states.T.contiguous().T
    assert torch.equal(influence(states, states.clone()), torch.zeros(50))
    assert torch.equal(influence(states, laid_out_otherwise), torch.zeros(50))


@pytest.mark.parametrize("angle", [1e-1, 1e-3, 1e-5])
def test_small_angles_keep_their_digits(angle):
    """In float32 the cosine of 1e-5 is 1: the difference to 1 would be 0."""
    one, other = torch.eye(2)[:, None].expand(2, 3, 2)
    turned = math.cos(angle) * one + math.sin(angle) * other
    assert influence(one, 5 * turned).tolist() == pytest.approx([2 * math.sin(angle / 2) ** 2] * 3, rel=1e-3)


def test_states_without_a_direction():
    zero, some = torch.zeros(1, 4), torch.ones(1, 4)
    assert influence(zero, zero).tolist() == [0] and influence(zero, some).tolist() == [0.5]
    assert influence(some, zero).tolist() == [0.5]


def test_facts():
    assert registry.load("scorers", "block_influence") is SCORER
    assert SCORER.patterns == ("layers",) and SCORER.needs_data and SCORER.seq_len is None
    assert "2403.03853" in SCORER.reference and "2406.15786" in SCORER.reference
    with pytest.raises(NotImplementedError, match="no scores of single weights"):
        SCORER.score(torch.ones(2, 2), None)  # pyright: ignore[reportArgumentType]


def test_random_is_for_every_pattern():
    scorer = registry.load("scorers", "random")
    assert scorer.patterns == ("structured", "layers", "unstructured", "n:m") and not scorer.needs_data
    draws = [scorer.draw(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
