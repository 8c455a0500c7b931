"""The lab itself, with trainings of a few steps."""

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from tests import lab, processes
from tests.lab import cache, captions, pictures, spans, text
from tests.lab.recipes import RECIPES
from tests.lab.train import train

AUTO = {"t5": AutoModelForSeq2SeqLM, "llava": AutoModelForImageTextToText}
STEPS = 2


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Train for `STEPS` steps, measure nothing, and keep the models elsewhere."""
    monkeypatch.setattr(cache, "ROOT", tmp_path / "lab")
    for name, recipe in RECIPES.items():
        monkeypatch.setitem(RECIPES, name, dataclasses.replace(recipe, steps=STEPS))
        monkeypatch.setattr(recipe.task, "measure", lambda self, model: {"measured": 1.0})
    monkeypatch.setattr(captions, "TRAINED", 64)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Stand in for training: write a file. Returns the names that were trained, in order."""
    trained = []

    def write(name, target):
        trained.append(name)
        time.sleep(0.2)  # time for somebody else to ask
        target.mkdir()
        (target / "model").write_text(name)

    monkeypatch.setattr(cache, "ROOT", tmp_path / "lab")
    monkeypatch.setattr(cache, "_write", write)
    return trained


@pytest.mark.parametrize("name", lab.NAMES)
def test_a_model_is_trained_and_loads(name, small):
    folder = lab.folder(name)
    model, info = AUTO.get(name, AutoModelForCausalLM).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = RECIPES[name].task()
        untrained = RECIPES[name].build(getattr(task.processor, "tokenizer", task.processor))
    weights = untrained.state_dict()
    assert any(not torch.equal(weight, weights[key]) for key, weight in model.state_dict().items())
    assert all(weight.dtype == torch.float32 for weight in model.state_dict().values() if weight.is_floating_point())
    assert set(lab.figures(name)) == {"parameters", "seconds", "measured"}
    assert model.generation_config.eos_token_id == _tokenizer(task).eos_token_id


@pytest.mark.parametrize("name", ["llama", "t5", "llava"])
def test_what_is_saved_computes_the_same(name, small):
    model, _, _ = train(RECIPES[name], name)
    loaded = AUTO.get(name, AutoModelForCausalLM).from_pretrained(lab.folder(name))
    batch = RECIPES[name].task().batch(torch.Generator().manual_seed(1), 0.9)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, loaded(**batch).logits)  # also: trained twice, the same weights


def test_nothing_global_changes(small):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train(RECIPES["opt"], "opt")
    assert torch.equal(state, torch.get_rng_state())
    assert threads == torch.get_num_threads()


def test_two_who_ask_at_once_get_one_training(fake):
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lab.folder, ["llama"] * 4))
    assert len(set(folders)) == 1 and fake == ["llama"]


def test_what_is_there_is_not_trained_again(fake):
    assert lab.folder("t5") == lab.folder("t5")
    assert fake == ["t5"]


def test_a_killed_training_is_no_model(tmp_path):
    script = """
import os, sys
from pathlib import Path
from tests.lab import cache
cache.ROOT = Path(sys.argv[1])
def write(name, target):
    target.mkdir()
    (target / "config.json").write_text("{}")
    os.kill(os.getpid(), 9)
cache._write = write
cache.folder("llama")
"""
    assert processes.run(script, tmp_path).returncode == -9
    assert [path.name for path in tmp_path.glob("*/*/config.json")] == ["config.json"]  # it did get that far
    assert not list(tmp_path.glob("*/llama"))


def test_what_a_killed_training_left_is_in_nobodys_way(fake):
    (part := cache.ROOT / cache._key() / "llama.part").mkdir(parents=True)
    (part / "half").write_text("")
    assert sorted(os.listdir(lab.folder("llama"))) == ["model"]


def test_an_error_leaves_no_model(fake, monkeypatch):
    monkeypatch.setattr(cache, "_write", lambda name, target: target.mkdir() or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lab.folder("llama")
    assert not list(cache.ROOT.glob("*/llama"))


@pytest.mark.parametrize("change", ["source", "version", "texts"])
def test_a_change_trains_anew(change, fake, monkeypatch, tmp_path):
    old = lab.folder("llama")
    if change == "source":
        (tmp_path / "recipes.py").write_text("# changed")
        monkeypatch.setattr(cache, "LAB", tmp_path)
    elif change == "version":
        monkeypatch.setattr(cache, "version", lambda package: "0")
    else:
        monkeypatch.setattr(text, "training", lambda: ["other"])
    assert lab.folder("llama") != old
    assert fake == ["llama", "llama"]


def test_tests_do_not_retrain(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "LAB", tmp_path)
    old = cache._key()
    (tmp_path / "test_lab.py").write_text("")
    (tmp_path / "__main__.py").write_text("")
    assert cache._key() == old


def test_an_unknown_name_is_refused(fake):
    for ask in (lab.folder, lab.calibration, lab.evaluation):
        with pytest.raises(ValueError, match=r"no model 'bert'; it has: llama, qwen2, qwen3, opt, t5, llava"):
            ask("bert")
    assert not cache.ROOT.exists()


def test_texts_for_evaluation_are_new():
    known = "\n\n".join(text.training()) + "\n\n"
    new = [paragraph for t in text.evaluation() for paragraph in t.split("\n\n")]
    assert len(new) > 100
    assert not [paragraph for paragraph in new if f"\n\n{paragraph}\n\n" in known]
    assert lab.calibration("llama") == lab.calibration("t5") == text.training()
    assert lab.evaluation("opt") == text.evaluation()


@pytest.mark.parametrize("sentinels", [0, 32])
def test_the_tokenizer_is_the_same_in_every_process(sentinels):
    script = f"""
import json
from tests.lab import text
print(json.dumps(text.train_tokenizer(text.training(), {sentinels}).get_vocab()))
"""
    tokenizer = text.train_tokenizer(text.training(), sentinels)
    assert len(tokenizer) == text.VOCABULARY
    assert processes.answer(script) == tokenizer.get_vocab()


def test_any_text_survives_the_tokenizer():
    tokenizer = text.train_tokenizer(text.training())
    strange = "naïve \t 中文\n\n    🙂 x == y"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange


def test_sentinels_are_the_last_ids_in_falling_order():
    task = spans.Spans()
    assert task.sentinels == list(range(text.VOCABULARY - 1, text.VOCABULARY - 1 - spans.SENTINELS, -1))
    assert task.processor.decode([text.VOCABULARY - 1]) == "<extra_id_0>"
    assert task.processor("a")["input_ids"][-1] == task.processor.eos_token_id


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length", [2, 7, 128])
def test_inputs_and_targets_together_are_the_window(seed, length):
    ids, sentinels, end = torch.arange(length), [1000 - i for i in range(32)], 2000
    inputs, targets = spans.corrupt(ids, sentinels, end, torch.Generator().manual_seed(seed))
    cut = max(1, round(0.15 * length))
    count = max(1, round(cut / 3))
    assert len(inputs) == length - cut + count + 1 and len(targets) == cut + count + 2
    *targets, last, final = targets.tolist()
    assert (last, final, inputs[-1].item()) == (sentinels[count], end, end)
    filling: dict[int, list[int]] = {}
    for token in targets:
        if token in sentinels:
            filling[token] = span = []
        else:
            span.append(token)
    assert list(filling) == sentinels[:count] and all(filling.values())
    restored = [part for token in inputs[:-1].tolist() for part in filling.get(token, [token])]
    assert restored == ids.tolist()


def test_spans_touch_both_ends_but_never_each_other():
    generators = (torch.Generator().manual_seed(seed) for seed in range(99))
    windows = [spans.corrupt(torch.arange(40), [-1, -2, -3], 99, generator)[0] for generator in generators]
    assert any(inputs[0] < 0 for inputs in windows) and any(inputs[-2] < 0 for inputs in windows)
    assert not any(((inputs[:-1] < 0) & (inputs[1:] < 0)).any() for inputs in windows)


def test_pictures_are_the_same_every_time_and_never_shared():
    first, again = pictures.for_training(300), pictures.for_training(400)
    assert [_bytes(p) for p in first] == [_bytes(p) for p in again[:300]]
    assert [p.caption for p in first] == [p.caption for p in again[:300]]
    assert not {_bytes(p) for p in again} & {_bytes(p) for p in pictures.for_evaluation(400)}


def test_captions_are_true():
    for image, caption in pictures.for_evaluation(200):
        words = caption.split()
        place = {"left": (8, 16), "right": (24, 16), "top": (16, 8), "above": (16, 8), "bottom": (16, 24)}
        relation = next(word for word in words if word in place)
        assert image.getpixel(place[relation]) == pictures.COLOURS[words[1]]
        if relation == "above" or "of" in words:
            second = (16, 24) if relation == "above" else (24, 16)
            assert image.getpixel(second) == pictures.COLOURS[words[-2]]


def test_the_datasets_hold_pictures_and_captions():
    known, new = lab.calibration("llava"), lab.evaluation("llava")
    assert known.column_names == new.column_names == ["image", "text"]
    assert known[0]["image"].size == (32, 32) and known[0]["text"].startswith("<image> a ")
    assert not {row["image"].tobytes() for row in known} & {row["image"].tobytes() for row in new}


def test_the_processor_loads_elsewhere(tmp_path):
    processor = captions.build_processor()
    processor.save_pretrained(tmp_path)
    (picture,) = pictures.for_training(1)
    picture.image.save(tmp_path / "picture.png")
    batch = processor(images=picture.image, text=f"<image> {picture.caption}", return_tensors="pt")
    script = """
import json, sys
from PIL import Image
from transformers import AutoProcessor
processor = AutoProcessor.from_pretrained(sys.argv[1])
batch = processor(images=Image.open(sys.argv[1] + "/picture.png"), text=sys.argv[2], return_tensors="pt")
print(json.dumps([batch["input_ids"].tolist(), batch["pixel_values"].double().sum().item()]))
"""
    ids, total = processes.answer(script, tmp_path, f"<image> {picture.caption}")
    assert ids == batch["input_ids"].tolist()
    assert ids[0].count(processor.image_token_id) == (pictures.SIZE // captions.PATCH) ** 2
    assert processor.tokenizer.unk_token_id not in ids[0]
    assert total == batch["pixel_values"].double().sum().item()


def test_only_captions_are_learned(monkeypatch):
    monkeypatch.setattr(captions, "TRAINED", 64)
    task = captions.Captions()
    batch = task.batch(torch.Generator().manual_seed(0), 0.0)
    learned = [row[row != -100] for row in batch["labels"]]
    assert all(task.processor.decode(row).endswith(" </s>") for row in learned)
    assert {task.processor.decode(row[:-1]) for row in learned} <= {p.caption for p in pictures.for_training(64)}


def _tokenizer(task):
    return getattr(task.processor, "tokenizer", task.processor)


def _bytes(picture):
    return picture.image.tobytes()
