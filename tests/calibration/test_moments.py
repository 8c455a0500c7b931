"""Second moments of inputs, over all tokens."""

import pytest
import torch

from optimum_prune.calibration.moments import check_finite, second_moment
from optimum_prune.errors import UnsupportedModel


def micro_batches(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 6), (1, 3, 6), (7, 6), (1, 1, 6))  # some models flatten tokens; a batch may be one token
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_means_over_tokens_equal_plain_loops(dtype):
    rows = [row for x in micro_batches(dtype) for row in x.double().reshape(-1, 6).tolist()]
    expected = torch.tensor(
        [[sum(row[i] * row[j] for row in rows) / len(rows) for j in range(6)] for i in range(6)], dtype=torch.float64
    )
    full = second_moment("m", iter(micro_batches(dtype)), full=True)
    alone = second_moment("m", iter(micro_batches(dtype)), full=False)
    assert (full.shape, full.dtype, alone.shape, alone.dtype) == ((6, 6), torch.float32, (6,), torch.float32)
    torch.testing.assert_close(full.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alone.double(), expected.diagonal(), rtol=1e-5, atol=1e-6)


def test_tokens_weigh_the_same_in_any_batch():
    together = torch.cat([x.reshape(-1, 6) for x in micro_batches()])
    torch.testing.assert_close(
        second_moment("m", [together], full=True), second_moment("m", micro_batches(), full=True)
    )


def test_squares_of_half_precision_do_not_overflow():
    x = torch.full((4, 2), 300.0, dtype=torch.float16)
    assert second_moment("m", [x], full=False).tolist() == [90_000.0] * 2
    assert second_moment("m", [x], full=True).tolist() == [[90_000.0] * 2] * 2


@torch.enable_grad()
def test_inputs_stay_and_no_graph_grows():
    x = torch.randn(3, 4, requires_grad=True)
    before = x.detach().clone()
    for full in (False, True):
        assert not second_moment("m", [x], full=full).requires_grad
    assert torch.equal(x, before)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name(full, bad):
    batches = micro_batches()
    batches[2][0, 3] = bad
    with pytest.raises(UnsupportedModel, match=r"The input of model\.layers\.1\.mlp\.up_proj is not finite .*bfloat16"):
        second_moment("model.layers.1.mlp.up_proj", batches, full=full)
    with pytest.raises(UnsupportedModel, match="The input of m is not finite"):
        check_finite("m", batches[2])
    check_finite("m", batches[1])
