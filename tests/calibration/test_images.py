"""Images with text, one sample at a time."""
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import json
import logging
from itertools import cycle
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, Image, IterableDataset, List
from transformers import CLIPImageProcessorPil

from optimum_prune.calibration import images
from optimum_prune.calibration.data import load_samples
from optimum_prune.config import CalibrationConfig
from optimum_prune.errors import CalibrationError
from tests.calibration.conftest import picture
from tests.models import IMAGE_TOKEN, PATCHES, llava

CAPTIONS = [f"w{3 + i} w50" for i in range(20)]
PICTURES = [picture(10 * i) for i in range(20)]
ROWS = {"image": PICTURES, "text": CAPTIONS, "n": list(range(20))}


@pytest.fixture(scope="session")
def table():
    return Dataset.from_dict(ROWS)


@pytest.fixture
def load(llava_model, processor):
    def load(source, order: Any = "random", processor=processor, model=llava_model, **options):
        return load_samples(CalibrationConfig(source, **options), model, processor=processor, order=order)

    return load


@pytest.fixture(autouse=True)
def infos(caplog):
    caplog.set_level(logging.INFO, "optimum_prune")


def ids(data):
    return [sample.tolist() for sample in data.samples]


def shades(data):
    """The pictures, told by their red value, which is constant."""
    mean, std = CLIPImageProcessorPil().image_mean[0], CLIPImageProcessorPil().image_std[0]  # pyright: ignore
    return [[round(float(p[0].mean() * std + mean) * 255) for p in pixels] for pixels in data.images]


PATCHES_OF_ONE = [IMAGE_TOKEN] * PATCHES


@pytest.mark.parametrize("order", ["first", "random"])
@pytest.mark.parametrize("kind", ["table", "stream", "generator", "file", "torch"])
def test_images_with_their_text(load, table, tmp_path, order, kind):
    source = table
    if kind == "stream":
        source = table.to_iterable_dataset()
    elif kind == "generator":
        rows = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
        source = IterableDataset.from_generator(lambda: iter(rows))
    elif kind == "file":
        table.to_parquet(source := str(tmp_path / "a.parquet"))
    elif kind == "torch":
        source = table.with_format("torch")
    data = load(source, order, num_samples=20)
    expected = [([*PATCHES_OF_ONE, 3 + i, 50], [10 * i]) for i in range(20)]
    found = list(zip(ids(data), shades(data), strict=True))
    assert sorted(found) == expected
    assert (found == expected) == (order == "first")
    assert {pixels.shape for pixels in data.images} == {(1, 3, 16, 16)}
    assert {pixels.dtype for pixels in data.images} == {torch.float32}
    assert (data.task, data.image_token, data.texts) == ("image-text", IMAGE_TOKEN, 20)
    assert ids(load(source, order, num_samples=5)) == ids(data)[:5]
    assert load(source, order, num_samples=20).fingerprint == data.fingerprint


def test_the_seed_decides_the_draw(load, table):
    draws = [ids(load(table, num_samples=6, seed=seed)) for seed in (0, 1, 1)]
    assert draws[0] != draws[1] == draws[2]


def test_the_columns_may_have_other_names(load, table):
    other = table.rename_columns({"image": "photo", "text": "caption"})
    data = load(other, "first", image_column="photo", num_samples=1)
    assert ids(data) == [[*PATCHES_OF_ONE, 3, 50]]
    both = table.add_column("caption", ["w9"] * 20)
    assert ids(load(both, "first", text_column="caption", num_samples=1)) == [[*PATCHES_OF_ONE, 9]]


def test_a_text_may_say_itself_where_its_images_are(load):
    rows = {
        "image": [[picture(0), picture(50)], [picture(100)], [picture(150), picture(200)]],
        "text": ["w4 <image> w5 <image> w6", "w7 <image>", "w8"],
    }
    data = load(Dataset.from_dict(rows), "first", num_samples=3)
    assert ids(data) == [
        [4, *PATCHES_OF_ONE, 5, *PATCHES_OF_ONE, 6],
        [7, *PATCHES_OF_ONE],
        [*PATCHES_OF_ONE, *PATCHES_OF_ONE, 8],
    ]
    assert shades(data) == [[0, 50], [100], [150, 200]]
    assert data.to_dict()["images"] == 5


def test_the_placeholder_in_front_is_a_line_of_its_own(load, processor):
    seen = []

    class Spy(type(processor)):
        def __call__(self, images=None, text=None, **options):
            seen.append(text)
            return super().__call__(images=images, text=text, **options)

    processor.__class__ = Spy
    load(Dataset.from_dict({"image": [[picture(0)] * 2], "text": ["w4"]}), num_samples=1)
    assert seen == ["<image>\n<image>\nw4"]


# Lengths


def test_only_text_is_limited_and_only_behind_the_images_it_is_cut(load, caplog):
    rows = {
        "image": [picture(0)] * 4,
        "text": ["w4 w5 w6 w7", "w4 <image> w5 w6 w7", "w4 w5 w6 <image> w7", "w4 w5 w6 w7 <image>"],
    }
    data = load(Dataset.from_dict(rows), "first", num_samples=4, seq_len=3)
    assert ids(data) == [[*PATCHES_OF_ONE, 4, 5, 6], [4, *PATCHES_OF_ONE, 5, 6], [4, 5, 6, *PATCHES_OF_ONE]]
    assert len(data.images) == 3
    assert "3 samples of in-memory" in caplog.text and "were cut to 3 tokens" in caplog.text
    assert "1 samples whose images would have been cut of in-memory" in caplog.text


def test_the_images_count_towards_the_models_longest_context(load, caplog):
    model = llava()
    model.config.text_config.max_position_embeddings = 10
    rows = {"image": [[picture(0)], [picture(0)] * 2, [picture(0)] * 3], "text": ["w4 " * 9] * 3}
    data = load(Dataset.from_dict(rows), "first", model=model, num_samples=3)
    assert [len(sample) for sample in data.samples] == [10, 10] and data.seq_len == 10
    assert "1 samples whose images would have been cut" in caplog.text


# What is read


@pytest.fixture
def decoded(monkeypatch):
    """Count the images that are decoded."""
    counted = []
    decode = Image.decode_example
    monkeypatch.setattr(Image, "decode_example", lambda *args, **kw: counted.append(args) or decode(*args, **kw))
    return counted


@pytest.mark.parametrize("order", ["first", "random"])
@pytest.mark.parametrize("stream", [False, True])
def test_only_what_is_used_is_decoded(load, table, decoded, order, stream):
    source = table.to_iterable_dataset() if stream else table
    assert len(load(source, order, num_samples=3).samples) == 3
    assert len(decoded) == 3


def test_first_reads_a_generator_no_further_than_it_must(load):
    read = []

    def generate():
        for i in cycle(range(20)):
            read.append(i)
            yield {"image": PICTURES[i], "text": CAPTIONS[i]}

    assert len(load(IterableDataset.from_generator(generate), "first", num_samples=3).samples) == 3
    assert len(read) < 200


@pytest.mark.parametrize("order", ["first", "random"])
@pytest.mark.parametrize("stream", [False, True])
def test_rows_without_image_or_text_are_left_out_and_counted(load, caplog, order, stream):
    rows = {"image": [picture(0), None, picture(1), picture(2)], "text": ["w4", "w5", " ", None]}
    dataset = Dataset.from_dict(rows, features=datasets.Features(image=Image(), text=datasets.Value("string")))
    data = load(dataset.to_iterable_dataset() if stream else dataset, order, num_samples=4)
    assert ids(data) == [[*PATCHES_OF_ONE, 4]]
    assert "1 texts, 2 blank ones left out" in caplog.text and "1 empty samples" in caplog.text


def test_lists_without_images_are_left_out(load):
    features = datasets.Features(image=List(Image()), text=datasets.Value("string"))
    rows = {"image": [[], [picture(0), None], None, [picture(3)]], "text": ["w4"] * 4}
    assert shades(load(Dataset.from_dict(rows, features=features), num_samples=4)) == [[3]]


# Text alone


@pytest.mark.parametrize("source", [["w4 w5 w6"], [[4, 5, 6]], "self", Dataset.from_dict({"text": ["w4 w5 w6"]})])
def test_text_alone_is_allowed_with_one_warning(load, caplog, source):
    data = load(source, num_samples=1, seq_len=3)
    assert data.images is data.image_token is data.task is None
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"Calibration on {data.source} sees no images, which this model reads too."
    ]


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        ({"photo": PICTURES[:2]}, "Set image_column to a column of images: 'photo'."),
        (
            {"photo": PICTURES[:2], "views": [[picture(0)], []]},
            "Set image_column to a column of images: 'photo' or 'views'.",
        ),
        ({"file_name": ["a.png", "b.png"]}, "give datasets.load_dataset('imagefolder', data_dir=..., split='train')"),
    ],
)
def test_images_that_are_there_and_not_read_are_warned_of_with_advice(load, caplog, columns, advice):
    data = load(Dataset.from_dict(columns | {"text": ["w4 w5", "w6 w7"]}), num_samples=1, seq_len=2)
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert warning.startswith(f"Calibration on {data.source} sees no images, which this model reads too. ")
    assert advice in warning and "image_column" in warning


@pytest.mark.parametrize("file", ["", "metadata.jsonl"])
def test_the_captions_of_a_folder_of_pictures_are_warned_of(load, caplog, tmp_path, file):
    for name in ("a.png", "b.png"):
        picture(90).save(tmp_path / name)
    rows = [{"file_name": "a.png", "text": "w4 w5"}, {"file_name": "b.png", "text": "w6 w7"}]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load(str(tmp_path / file), num_samples=1, seq_len=2)
    assert "sees no images, which this model reads too. Its column 'file_name' seems to name pictures" in caplog.text
    caplog.clear()
    advised = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "c"))
    assert shades(load(advised, num_samples=2, image_column="image")) == [[90], [90]] and "no images" not in caplog.text


def test_advice_comes_with_the_refusal_of_captions_too(load):
    dataset = Dataset.from_dict({"photo": PICTURES[:1], "a": ["w4"], "b": ["w5"]})
    with pytest.raises(CalibrationError, match=r"Set text_column to one of strings\. Set image_column to .* 'photo'"):
        load(dataset)


def test_columns_of_images_mean_nothing_to_a_decoder(model, tokenizer, caplog):
    dataset = Dataset.from_dict({"photo": PICTURES[:1], "text": ["the fox"]})
    load_samples(CalibrationConfig(dataset, num_samples=1), model, tokenizer)
    assert all(record.levelno == logging.INFO for record in caplog.records)


# A stack that reads nothing but images


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (["w4 w5"], r"this source sees none\. Give a dataset with a column of images \(image_column\)\."),
        ([[4, 5]], r"this source sees none\."),
        ("self", r"source='self' sees none\. Give a dataset"),
        (Dataset.from_dict({"photo": PICTURES[:1], "text": ["w4"]}), r"sees none\. Set image_column to .* 'photo'\."),
    ],
)
def test_a_tower_is_not_scored_without_images(llava_model, monkeypatch, source, what):
    for work in ("draw_samples", "choose"):
        monkeypatch.setattr(f"optimum_prune.calibration.data.{work}", lambda *_: pytest.fail("read a sample"))
    message = rf"Stack 'vision' of LlavaForConditionalGeneration reads nothing but images, and calibration on .*{what}"
    with pytest.raises(CalibrationError, match=message):
        load_samples(CalibrationConfig(source), llava_model, image_stack="vision")


def test_with_images_there_is_no_warning(load, table, caplog):
    load(table, num_samples=4)
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_a_column_of_file_names_is_no_image(load):
    dataset = Dataset.from_dict({"image": ["a.png"], "text": ["w4"]})
    assert load(dataset, num_samples=1).images is None


@pytest.mark.parametrize(
    ("source", "what"), [([[4], [IMAGE_TOKEN]], "Sample 1"), (["w4 <image> w5"], "The text, tokenised")]
)
def test_a_placeholder_without_an_image_is_refused(load, source, what):
    with pytest.raises(CalibrationError, match=rf"{what}.* holds token id 95, which stands for an image.*image_column"):
        load(source)


def test_a_decoder_ignores_images(table, model, tokenizer):
    assert load_samples(CalibrationConfig(table, num_samples=1), model, tokenizer).images is None
    with pytest.raises(CalibrationError, match="image_column='image' is for image-text models, and LlamaForCausalLM"):
        load_samples(CalibrationConfig(table, image_column="image"), model, tokenizer)


def test_targets_are_not_for_image_text_models(load, table):
    with pytest.raises(CalibrationError, match="target_column='text' is for encoder-decoder models"):
        load(table, target_column="text")


# What cannot be used


def test_without_a_processor(load, table, processor, monkeypatch):
    for given, what in ((None, "there is none"), (processor.tokenizer, r"a \w+ is none")):
        with pytest.raises(
            CalibrationError, match=rf"Images need the model's processor, and {what}: .*AutoProcessor"
        ) as caught:
            load(table, processor=given)
        assert "Pillow" not in str(caught.value)
    monkeypatch.setattr(images, "is_vision_available", lambda: False)
    with pytest.raises(CalibrationError, match="needs Pillow, which is not installed"):
        load(table, processor=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_column": "photo"},
            r"image_column 'photo' is no column of images .* 'image' \(image\), 'text' \(string\)",
        ),
        ({"image_column": "n"}, r"image_column 'n' is no column of images .* 'n' \(int64\)"),
        ({"text_column": "txt"}, "text_column 'txt' is no column of strings"),
    ],
)
def test_columns_that_do_not_exist(load, table, options, message):
    with pytest.raises(CalibrationError, match=message):
        load(table, **options)


def test_other_than_one_placeholder_for_each_image(load):
    dataset = Dataset.from_dict({"image": [[picture(0), picture(1)]], "text": ["w4 <image> w5"]})
    with pytest.raises(CalibrationError, match="'w4 <image> w5' has 1 times '<image>', but comes with 2 images"):
        load(dataset)


def test_a_damaged_image(load):
    features = datasets.Features(image=Image(), text=datasets.Value("string"))
    dataset = Dataset.from_dict({"image": [{"bytes": b"no image", "path": None}], "text": ["w4"]}, features=features)
    for source in (dataset, dataset.to_iterable_dataset()):
        with pytest.raises(CalibrationError, match=r"Cannot read .*: cannot identify image"):
            load(source)


def test_a_processor_of_another_model(load, table, processor, llava_model):
    processor.image_processor.size, processor.patch_size = {"shortest_edge": 16}, None
    with pytest.raises(CalibrationError, match="The processor cannot use the image of the text '<image>"):
        load(table)
    model = llava(image_token_index=94)
    processor.patch_size = 8
    with pytest.raises(CalibrationError, match=r"0 tokens 94\. Is it this model's\?"):
        load(table, model=model)


def test_images_that_do_not_become_one_size(load, processor):
    processor.image_processor.do_center_crop = False
    dataset = Dataset.from_dict({"image": [picture(0), picture(0).resize((30, 30))], "text": ["w4", "w5"]})
    with pytest.raises(CalibrationError, match=r"images of different sizes, .*only one size can be batched"):
        load(dataset)


@torch.no_grad()
def test_the_batches_go_into_the_model(load, table, llava_model):
    for batch in load(table, num_samples=5).batches(2, pad_token_id=0):
        assert llava_model(**batch).logits.shape[:2] == batch["input_ids"].shape
