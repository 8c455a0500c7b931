"""Block influence of single tokens."""

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
