"""Masks against sorting, with ties in every place."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optimum_prune.masks import global_masks, matrix_mask, n_of_m_mask, removed_of, row_mask

UNTIMED = settings(deadline=None)  # a busy machine is no failure
# Few values, so that most of them are equal to some other; both zeros are equal too.
VALUES = st.sampled_from([-0.0, 0.0, 0.5, 1.0, 1e-45, 3e38, math.inf])


@st.composite
def matrices(draw: st.DrawFn, multiple: int = 1) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 4)), multiple * draw(st.integers(1, 5))
    values = draw(st.lists(VALUES, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values).view(rows, columns)


def by_sorting(scores: list[float], remove: int) -> list[bool]:
    """The lowest go, of equal ones those to the left."""
    gone = sorted(range(len(scores)), key=lambda i: (scores[i], i))[:remove]
    return [i not in gone for i in range(len(scores))]


@UNTIMED
@given(st.data(), matrices())
def test_rows(data, scores):
    remove = data.draw(st.integers(0, scores.shape[1]))
    mask = row_mask(scores, remove)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [by_sorting(row, remove) for row in scores.tolist()]


@UNTIMED
@given(st.data(), matrices())
def test_whole_matrices(data, scores):
    remove = data.draw(st.integers(0, scores.numel()))
    mask = matrix_mask(scores, remove)
    assert (mask.shape, mask.dtype) == (scores.shape, torch.bool)
    assert mask.flatten().tolist() == by_sorting(scores.flatten().tolist(), remove)


@UNTIMED
@given(st.data(), st.lists(matrices(), min_size=1, max_size=4))
def test_several_matrices(data, scores):
    joined = [value for matrix in scores for value in matrix.flatten().tolist()]
    remove = data.draw(st.integers(0, len(joined)))
    masks = global_masks(scores, remove)
    assert [mask.shape for mask in masks] == [matrix.shape for matrix in scores]
    assert [kept for mask in masks for kept in mask.flatten().tolist()] == by_sorting(joined, remove)


@UNTIMED
@given(st.data(), st.integers(2, 9))
def test_groups(data, m):
    scores, n = data.draw(matrices(multiple=m)), data.draw(st.integers(1, m - 1))
    mask = n_of_m_mask(scores, n, m)
    assert (mask.shape, mask.dtype) == (scores.shape, torch.bool)
    groups = scores.view(-1, m).tolist()
    assert mask.view(-1, m).tolist() == [by_sorting(group, n) for group in groups]


@pytest.mark.parametrize("n", [1, 126])
def test_groups_as_wide_as_a_matrix(n):
    scores = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(n_of_m_mask(scores, n, 128), row_mask(scores, n))


def test_scores_that_are_ordered_in_several_parts(monkeypatch):
    scores = torch.randint(0, 9, (7, 12), generator=torch.Generator().manual_seed(0)).float()
    whole = row_mask(scores, 5)
    for chunk in (1, 12, 30, 83):
        monkeypatch.setattr("optimum_prune.masks.CHUNK", chunk)
        assert torch.equal(row_mask(scores, 5), whole)


def test_scores_stay_as_they_are():
    scores = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = scores.detach().clone()
    for mask in (row_mask(scores, 3), matrix_mask(scores, 9), global_masks([scores], 9)[0], n_of_m_mask(scores, 2, 4)):
        assert not mask.requires_grad
    assert torch.equal(scores, before)


def test_a_device_without_numpy_finds_the_same(monkeypatch):
    """Accelerators order by `kthvalue`."""
    scores = torch.randint(0, 9, (7, 12), generator=torch.Generator().manual_seed(0)).float()
    expected = [row_mask(scores, remove) for remove in range(13)]
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert all(torch.equal(row_mask(scores, remove), mask) for remove, mask in enumerate(expected))


def test_a_transposed_view_is_read_as_it_is_seen():
    """SparseGPT stores weights transposed."""
    scores = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(n_of_m_mask(scores.t(), 2, 4), n_of_m_mask(scores.t().contiguous(), 2, 4))
    assert torch.equal(row_mask(scores.t(), 5), row_mask(scores.t().contiguous(), 5))
    assert torch.equal(matrix_mask(scores.t(), 5), matrix_mask(scores.t().contiguous(), 5))


@pytest.mark.parametrize("percent", range(100))
@pytest.mark.parametrize("count", [100, 12_800, 4096 * 14_336 * 25])
def test_counts_survive_binary_fractions(count, percent):
    """0.29 * 100 is 28.999999999999996."""
    assert removed_of(count, percent / 100) == count * percent // 100


def test_counts_are_rounded_down():
    assert [removed_of(7, 0.5), removed_of(1, 0.999), removed_of(48, 0.999), removed_of(5, 0.0)] == [3, 0, 47, 0]
