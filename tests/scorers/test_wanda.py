"""Wanda's scores, and the facts of all scorers that make zeros."""

import pytest
import torch

from optimum_prune import registry
from optimum_prune.scorers.base import Scorer, Statistics
from optimum_prune.scorers.wanda import score

ZEROS = [
    scorer
    for name in registry.available("scorers")
    if "unstructured" in (scorer := registry.load("scorers", name)).patterns
]


def statistics(norm: torch.Tensor) -> Statistics:
    return Statistics(torch.Generator(), norm=norm)


def test_by_hand():
    """A small weight that reads a large input beats a larger one that reads a small input."""
    assert score(torch.tensor([[0.001, -0.01]]), statistics(torch.tensor([500.0, 10.0]))).tolist() == [
        pytest.approx([0.5, 0.1])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_plain_loops(dtype):
    generator = torch.Generator().manual_seed(0)
    weight, norm = torch.randn(5, 7, generator=generator).to(dtype), torch.rand(7, generator=generator) * 1e5
    got = score(weight, statistics(norm))  # in float16, some of it would be infinite
    expected = [[abs(w) * n for w, n in zip(row, norm.tolist(), strict=True)] for row in weight.tolist()]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(expected))


def test_which_scorers_make_zeros():
    assert [scorer.name for scorer in ZEROS] == ["admm", "afr", "magnitude", "random", "si", "sparsegpt", "wanda"]


@pytest.mark.parametrize("scorer", ZEROS, ids=lambda scorer: scorer.name)
class TestFacts:
    def test_patterns(self, scorer: Scorer):
        assert "n:m" in scorer.patterns and scorer.reference
        assert scorer.needs_data == (scorer.name not in ("magnitude", "random"))

    def test_where_it_ranks(self, scorer: Scorer):
        """Where nothing is asked, it ranks no wider than its scores mean something."""
        order = ["row", "matrix", "model"]
        assert order.index(scorer.scope) <= order.index(scorer.comparable)
        assert scorer.comparable != "model" or scorer.inputs is None or scorer.name == "afr"  # z-scores
        assert (scorer.name in ("wanda", "admm", "si")) == (scorer.scope == "row")

    def test_one_that_solves_has_no_scores(self, scorer: Scorer):
        assert (scorer.solve is not None) == (scorer.inputs == "hessian")
        if scorer.solve is not None:
            with pytest.raises(NotImplementedError, match="no scores of single weights"):
                scorer.score(torch.ones(2, 2), statistics(torch.ones(2)))
