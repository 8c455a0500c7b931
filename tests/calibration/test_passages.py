"""Passages that two sets of samples have in common, however their windows are cut."""

import pytest
import torch

from optimum_prune.calibration.passages import DIGITS, KEPT, LENGTH, passages, share
from optimum_prune.calibration.samples import CalibrationData
from tests.models import tokens


def rows(ids, length):
    return [(part,) for part in ids.split(length)]


def line(length, seed=0):
    return tokens(1, length, seed, vocabulary=50_000)[0]


def test_windows_of_any_length_and_offset_have_the_passages_of_their_text():
    text = line(600)
    seen = passages(rows(text, 600))
    assert share(seen, rows(text, 600)) == 1
    assert share(seen, rows(text, 120)) == share(seen, rows(text[77:577], 100)) == 1
    assert share(seen, rows(line(600, seed=1), 128)) == 0


def test_the_share_is_that_of_distinct_passages():
    text, other = line(LENGTH + 29), line(LENGTH + 69, seed=1)
    seen = passages([(text,)])
    assert len(seen) == 30 * DIGITS
    assert share(seen, [(text,), (other,)]) == pytest.approx(30 / 100)
    assert share(seen, [(text,)] * 3 + [(other,)]) == pytest.approx(30 / 100)


def test_of_much_data_few_hashes_are_kept_and_the_share_is_estimated():
    text, other = line(40_000), line(5_000, seed=1)
    seen = passages(rows(text, 40_000))
    assert len(seen) == KEPT * DIGITS
    assert share(seen, rows(text[10_000:20_000], 250)) == 1
    mixed = [(text[:5_000],), (other,)]
    assert share(seen, mixed) == pytest.approx(0.5, abs=0.1)
    assert share(seen, rows(other, 256)) == 0


@pytest.mark.parametrize("short", [1, 5, LENGTH - 1])
def test_what_is_shorter_than_a_passage_is_compared_as_a_whole(short):
    seen = passages(rows(line(short), 100))
    assert share(seen, rows(line(short), 100)) == 1
    assert share(seen, rows(line(short)[:-1], 100)) == 0


def test_order_and_length_matter():
    text = line(LENGTH)
    swapped = text.flip(0)
    assert share(passages([(text,)]), [(swapped,)]) == 0
    assert share(passages([(torch.tensor([0]),)]), [(torch.tensor([0, 0]),)]) == 0


def test_nothing_is_in_common_with_nothing():
    assert passages([]) == ""
    assert share("", rows(line(40), 40)) == 0 == share(passages(rows(line(40), 40)), [])


def test_a_caption_alone_is_not_the_same_picture():
    def data(shade):
        return CalibrationData([line(40)], 40, "x", images=[torch.full((1, 3, 2, 2), shade)], image_token=5)

    assert share(passages(data(0.5).rows()), data(0.5).rows()) == 1
    assert share(passages(data(0.5).rows()), data(0.25).rows()) == 0


def test_the_same_question_with_another_answer_is_another_pair():
    def data(seed):
        return CalibrationData([line(40)], 40, "x", targets=[line(5, seed)], start=0)

    assert share(passages(data(1).rows()), data(1).rows()) == 1
    assert share(passages(data(1).rows()), data(2).rows()) == 0


def test_hashes_are_the_same_everywhere():
    assert passages([(torch.arange(LENGTH + 1),)]) == "c28cbd16d91f2ec0"
