"""What a model is fed, and what it should predict."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from optimum_prune.calibration.samples import CalibrationData
from tests.models import IMAGE_TOKEN, PATCHES, llama, llava, t5, tokens

LENGTHS = (7, 3, 9)


def rows(*lengths, seed=0, vocabulary=95):
    return [tokens(1, length, seed + i, vocabulary)[0] for i, length in enumerate(lengths)]


def plain():
    return CalibrationData(rows(*LENGTHS), 9, "test")


def answered():
    return CalibrationData(rows(*LENGTHS), 9, "test", targets=rows(2, 6, 1, seed=9), start=0, task="pairs")


def illustrated():
    samples = [
        torch.cat([row[:i], torch.full((PATCHES * n,), IMAGE_TOKEN), row[i:]])
        for i, n, row in zip((0, 2, 9), (1, 2, 1), rows(*LENGTHS), strict=True)
    ]
    images = list(torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)).split([1, 2, 1]))
    return CalibrationData(samples, 9, "test", images=images, image_token=IMAGE_TOKEN, task="image-text")


KINDS = {"decoder": (llama, plain), "encoder-decoder": (t5, answered), "image-text": (llava, illustrated)}


def expected_loss(model, data, index):
    """The loss that transformers itself computes on one sample."""
    inputs = {"input_ids": data.samples[index][None]}
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE_TOKEN, -100)
    if data.targets is not None:
        labels = data.targets[index][None]
    if data.images is not None:
        inputs["pixel_values"] = data.images[index]
    return model(**inputs, labels=labels).loss


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_loss_of_what_is_predicted_is_transformers_own(kind, batch_size):
    model, data = (make() for make in KINDS[kind])
    index = 0
    for batch in data.batches(batch_size, pad_token_id=0):
        for logits in model(**batch).logits:
            positions, labels = data.predicted(index)
            loss = cross_entropy(logits[positions], labels)
            torch.testing.assert_close(loss, expected_loss(model, data, index), rtol=1e-4, atol=1e-5)
            index += 1
    assert index == len(LENGTHS)


def test_batches_of_an_encoder_decoder():
    targets = [torch.tensor(t) for t in ([6, 7, 1], [1])]
    data = CalibrationData([torch.tensor(s) for s in ([5, 1], [5, 5, 1])], 3, "test", targets=targets, start=4)
    (batch,) = data.batches(2, pad_token_id=3)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 1, 3], [5, 5, 1]],
        "attention_mask": [[1, 1, 0], [1, 1, 1]],
        "decoder_input_ids": [[4, 6, 7], [4, 3, 3]],
        "decoder_attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert [tensor.tolist() for tensor in data.predicted(0)] == [[0, 1, 2], [6, 7, 1]]
    assert data.tokens == 9


def test_batches_of_images_hold_as_many_as_their_samples():
    first, second = illustrated().batches(2, pad_token_id=0)
    assert first["pixel_values"].shape == (3, 3, 16, 16) and second["pixel_values"].shape == (1, 3, 16, 16)


def test_patches_are_predicted_by_nothing():
    sample = torch.tensor([1, IMAGE_TOKEN, IMAGE_TOKEN, 8, 9])
    data = CalibrationData([sample], 9, "test", images=[torch.zeros(1, 3, 2, 2)], image_token=IMAGE_TOKEN)
    assert [tensor.tolist() for tensor in data.predicted(0)] == [[2, 3], [8, 9]]


def test_one_token_predicts_nothing():
    positions, labels = CalibrationData([torch.tensor([5])], 9, "test").predicted(0)
    assert len(positions) == len(labels) == 0 and positions.dtype == labels.dtype == torch.int64


def test_the_fingerprint_of_plain_samples_is_that_of_earlier_versions():
    data = CalibrationData([torch.tensor([1, 2]), torch.tensor([3])], 4, "lists")
    assert data.fingerprint == "sha256:be3cb7e04dcce365974b9116333f0587adb7a1d2469dcd987e098564d77203b7"


def test_the_fingerprint_sees_targets_and_pixels_and_where_they_end():
    def pixels(*values, side=1):
        return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, side, side)

    def data(samples, targets=None, images=None):
        samples = [torch.tensor(s) for s in samples]
        targets = targets and [torch.tensor(t) for t in targets]
        return CalibrationData(samples, 4, "test", targets=targets, images=images).fingerprint

    prints = [
        data([[1], [2]]),
        data([[1]], targets=[[2]]),
        data([[1]], targets=[[3]]),
        data([[1], [2]], targets=[[3], [4]]),
        data([[1], [2], [3]], targets=[[4]]),
        data([[1], [2]], images=[pixels(1), pixels(2)]),
        data([[1], [2]], images=[pixels(1), pixels(3)]),
        data([[1], [2]], images=[pixels(1, 2), pixels()]),
        data([[1], [2]], images=[pixels(1, 2, 3, 4), pixels()]),
        data([[1], [2]], images=[pixels(1, 2, 3, 4, side=2), pixels()]),
        data([[1], [2]], images=[pixels(1, 2, 3, 4, side=2).reshape(1, 1, 1, 4), pixels()]),
    ]
    assert all(one != other for one, other in pairwise(sorted(prints)))


def test_the_description_says_only_what_applies():
    extra = {kind: set(make().to_dict()) - set(plain().to_dict()) for kind, (_, make) in KINDS.items()}
    assert extra == {"decoder": set(), "encoder-decoder": {"task"}, "image-text": {"task", "images"}}
    described = json.loads(json.dumps(illustrated().to_dict()))
    assert (described["task"], described["images"], described["tokens"]) == ("image-text", 4, 19 + 4 * PATCHES)


class TestEvenBatches:
    @staticmethod
    def rows_of(batch):
        """Tell the samples of a batch apart, with all that belongs to them."""
        count = len(batch["input_ids"])
        return [
            tuple(str(t.view(count, -1, *t.shape[1:])[i].tolist()) for t in batch.values() if t.numel())
            for i in range(count)
        ]

    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_sample_once_and_nothing_padded(self, kind, size):
        _, make = KINDS[kind]
        twice = make()
        twice = replace(
            twice,
            samples=[*twice.samples, *(row.flip(0) for row in twice.samples)],
            targets=twice.targets and [*twice.targets, *(row + 1 for row in twice.targets)],
            images=twice.images and [*twice.images, *(pixels + 1 for pixels in twice.images)],
        )
        batches = list(twice.even_batches(size))
        assert all(tensor.all() for batch in batches for name, tensor in batch.items() if "mask" in name)
        assert all(len(batch["input_ids"]) <= size for batch in batches)
        alone = [row for batch in twice.batches(1, pad_token_id=0) for row in self.rows_of(batch)]
        assert sorted(row for batch in batches for row in self.rows_of(batch)) == sorted(alone)
        assert len(batches) == {1: 6, 2: 3, 3: 3, 8: 3}[size]

    def test_shapes_come_in_the_order_of_their_first_sample(self):
        data = CalibrationData(rows(7, 3, 7, 3, 7), 7, "test")
        lengths = [tuple(batch["input_ids"].shape) for batch in data.even_batches(2)]
        assert lengths == [(2, 7), (1, 7), (2, 3)]

    def test_answers_of_other_lengths_are_other_shapes(self):
        data = CalibrationData(rows(4, 4, 4), 4, "test", targets=rows(2, 3, 2, seed=9), start=0)
        batches = list(data.even_batches(4))
        assert [tuple(batch["decoder_input_ids"].shape) for batch in batches] == [(2, 2), (1, 3)]
        assert batches[0]["decoder_input_ids"][1].tolist() == [0, int(data.predicted(2)[1][0])]

    def test_more_images_are_another_shape(self):
        shapes = [tuple(batch["pixel_values"].shape) for batch in illustrated().even_batches(4)]
        assert sorted(shapes) == [(1, 3, 16, 16), (1, 3, 16, 16), (2, 3, 16, 16)]

    def test_the_data_itself_stays(self):
        data = answered()
        before = data.fingerprint
        list(data.even_batches(2))
        assert data.fingerprint == before and data == data
