"""What stands for a skipped sub-layer, and which blocks have to keep their attention."""

import pytest
import torch

from optimum_prune.adapters.llama import STACK
from optimum_prune.skipping import SkippedAttention, SkippedMLP, leaders, skipped, why_not_skip
from tests.models import llama
from tests.shallow import skip

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stand_ins_add_nothing(dtype):
    states = torch.randn(2, 3, 4, dtype=dtype)
    attention, weights = SkippedAttention()(hidden_states=states, attention_mask=None, cache=object())
    assert weights is None
    for output in (attention, SkippedMLP()(states)):
        assert (output.shape, output.dtype) == (states.shape, dtype) and not output.any()
    assert not [*SkippedAttention().state_dict(), *SkippedMLP().state_dict()]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (None, {0: "attention"}),
        ([FULL, FULL, FULL], {0: FULL}),
        ([FULL, SLIDING, SLIDING, FULL], {0: FULL, 1: SLIDING}),
        ([SLIDING, SLIDING, FULL, SLIDING], {0: SLIDING, 2: FULL}),
    ],
)
def test_the_first_of_every_kind_leads(kinds, expected):
    assert leaders(kinds) == expected


def test_only_a_leader_has_to_keep_its_attention():
    kinds = [FULL, SLIDING, FULL, SLIDING]
    assert [why_not_skip(STACK, kinds, layer, "attention") is None for layer in range(4)] == [False, False, True, True]
    assert all(why_not_skip(STACK, kinds, layer, "mlp") is None for layer in range(4))


def test_what_is_skipped_is_read_off_the_modules():
    model = skip(skip(llama(), "mlp", 1, 2), "attention", 2)
    assert [skipped(STACK, block) for block in model.model.layers] == [[], ["mlp"], ["attention", "mlp"]]
