"""Span corruption: nothing is lost, the share and the length of what is dropped, sentinels."""

from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optimum_prune.calibration.spans import corrupt, corruptible, special_tokens
from optimum_prune.errors import CalibrationError

END = 1
SENTINELS = list(range(99, 79, -1))  # descending, as T5's
SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def windows(draw: st.DrawFn) -> list[int]:
    """Return windows of words, some of them with sentinels in between. Lists of hypothesis would be short."""
    largest = draw(st.sampled_from([79, 79, 85, 99]))
    return Random(draw(SEEDS)).choices(range(2, largest + 1), k=draw(st.integers(2, 500) | st.integers(2, 20)))


def corrupted(window, sentinels=SENTINELS, end=(END,), seed=0):
    source, target = corrupt(torch.tensor(window), sentinels, end, seed)
    assert source.dtype == target.dtype == torch.int64
    return source.tolist(), target.tolist()


def spans_of(target, sentinels):
    """Sentinel -> what it stands for, in order."""
    spans, current = {}, []
    for token in target:
        if token in sentinels:
            assert token not in spans
            spans[token] = current = []
        else:
            current.append(token)
    return spans


@settings(deadline=None)
@given(windows(), st.integers(2, 20), SEEDS)
def test_input_and_target_together_are_the_window(window, count, seed):
    sentinels = SENTINELS[:count]
    if not corruptible(torch.tensor(window), sentinels):
        assert len(set(sentinels) - set(window)) < 2
        return
    source, target = corrupted(window, sentinels, seed=seed)
    assert source.pop() == target.pop() == END
    free = [sentinel for sentinel in sentinels if sentinel not in window]
    spans = spans_of(target, free)
    used = list(spans)
    assert used == free[: len(used)], "in their order, none twice"
    assert spans.pop(used.pop()) == [], "the last one closes the target"
    assert [token for token in source if token in free] == used
    assert not any(one in used and other in used for one, other in pairwise(source)), "spans do not touch"

    restored = [token for each in source for token in spans.get(each, [each])]
    assert restored == window
    dropped = sum(map(len, spans.values()))
    assert all(spans.values())
    assert dropped == max(1, round(0.15 * len(window)))
    assert len(spans) == min(max(1, round(dropped / 3)), len(free) - 1)


@pytest.mark.parametrize("length", [2, 3, 9])
def test_of_a_very_short_window_one_token_is_dropped(length):
    source, target = corrupted(list(range(2, 2 + length)))
    assert (len(source), len(target)) == (length + 1, 4)


def test_windows_that_cannot_be_used():
    assert not corruptible(torch.tensor([5]), SENTINELS)
    assert not corruptible(torch.tensor([5, 6, 99]), [99, 98])
    assert corruptible(torch.tensor([5, 6, 99]), [99, 98, 97])


def test_with_few_sentinels_the_spans_are_fewer_and_longer():
    window = [2 + i % 70 for i in range(2000)]
    many = [i + 1000 for i in range(200)]
    assert len(spans_of(corrupted(window, many)[1], many)) == 100 + 1
    source, target = corrupted(window, many[:7])
    assert len(spans_of(target, many)) == 7
    assert len(target) == 300 + 7 + 1 and len(source) == 1700 + 6 + 1


def test_without_an_end_token_there_is_none():
    source, target = corrupted([5, 6, 7], end=())
    assert len(source) == 3 and len(target) == 3 and target[-1] == SENTINELS[1]


def test_the_seed_and_the_window_decide_and_nothing_else():
    window = list(range(2, 80))
    assert corrupted(window) == corrupted(window)
    torch.manual_seed(3)
    assert corrupted(window) == corrupted(window)
    assert len({str(corrupted(window, seed=seed)) for seed in range(20)}) == 20
    where = {tuple(i for i, token in enumerate(corrupted([*window, last])[0]) if token > 79) for last in range(2, 22)}
    assert len(where) > 10, "another window, other spans"


def test_no_part_of_a_window_is_preferred():
    window = torch.arange(2, 42)
    dropped = torch.zeros(100)
    for seed in range(4000):
        source, _ = corrupt(window, SENTINELS, [], seed)
        dropped[2:42] += 1
        dropped[source] -= 1
    share = dropped[2:42] / 4000
    # Fewer of the spans that are possible lie across a token near an end.
    assert share.mean().item() == pytest.approx(0.15, abs=1e-6)
    assert share.min() > 0.04 and share[3:-3].min() > 0.12 and share.max() < 0.19
    torch.testing.assert_close(share, share.flip(0), atol=0.03, rtol=0)


class TestSpecialTokens:
    def test_those_of_t5(self, t5_tokenizer):
        sentinels, end = special_tokens(t5_tokenizer, 96)
        assert sentinels == t5_tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(20)])
        assert end == [1]

    def test_a_tokenizer_without_sentinels_or_none_at_all(self, tokenizer):
        for unfit, why in ((tokenizer, "this .* lacks them"), (None, "no tokenizer was passed")):
            with pytest.raises(CalibrationError, match=rf"<extra_id_0>.* {why}\. .* target_column"):
                special_tokens(unfit, 280)

    def test_sentinels_that_the_model_has_no_embedding_for(self, t5_tokenizer):
        with pytest.raises(CalibrationError, match=r"sentinels \(is it this model's .* holds token id \d+; .* 0 to 69"):
            special_tokens(t5_tokenizer, 70)
