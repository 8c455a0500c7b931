"""Packed storage: a format, bit for bit; what loads it, and what has to refuse it."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, T5ForConditionalGeneration

from optimum_prune import Pruner, PruningConfig
from optimum_prune.binding import named_linears
from optimum_prune.errors import CheckpointError, InvalidConfig, UnsupportedModel
from optimum_prune.integrations.card import model_card
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.integrations.loading import load_skeleton
from optimum_prune.layouts import packing
from optimum_prune.layouts.packing import BITMAP, pack, shapes_unpacked, unpack
from optimum_prune.masks import n_of_m_mask
from optimum_prune.sparsity import masks_of
from tests.models import VARIANTS, llama, t5, tokens
from tests.outputs import load
from tests.processes import run
from tests.pruned import holes, unevenly, uniformly
from tests.reports import masked
from tests.words import tokenizer

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
DOWN = "model.layers.1.mlp.down_proj.weight"
CUTS = {"dense": lambda model: model, "uniform": uniformly, "uneven": unevenly}
CLI = "import sys; from optimum.commands.optimum_cli import main; sys.argv[0] = 'optimum-cli'; main()"
WITHOUT_PLUGIN = """
import json, sys
from transformers import AutoModelForCausalLM
for options in ({}, {"device_map": "cpu"}, {"dtype": "bfloat16"}):
    try:
        AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
    except RuntimeError as error:
        print(json.dumps(str(error)))
assert "optimum_prune" not in sys.modules
"""


def same_bits(one, two):
    word = WORDS[one.element_size()]
    return one.dtype == two.dtype and torch.equal(one.view(word), two.view(word))


def assert_same(model, other):
    state, other_state = model.state_dict(), other.state_dict()
    assert state.keys() == other_state.keys()
    assert [name for name, tensor in state.items() if not same_bits(tensor, other_state[name])] == []


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# The format


def test_documented_example():
    weight = torch.tensor([[0, 1, 0, 0, 2], [3, 0, 0, 0, 4]], dtype=torch.bfloat16)
    numbers, bitmap = pack(weight)
    assert numbers.dtype == torch.bfloat16 and numbers.tolist() == [1, 2, 3, 4]
    assert bitmap.dtype == torch.uint8 and bitmap.tolist() == [0b00110010, 0b00000010]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 8), (5, 64), (0, 4)])
@pytest.mark.parametrize("density", [0, 0.1, 0.5, 1])
def test_round_trip(dtype, shape, density):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    weight[torch.rand(shape, generator=generator) >= density] = 0
    numbers, bitmap = pack(weight)
    assert len(numbers) == weight.count_nonzero() and len(bitmap) == -(-weight.numel() // 8)
    assert same_bits(unpack(numbers, bitmap, weight.shape), weight)


def test_every_byte():
    bitmap = torch.arange(256, dtype=torch.uint8)
    stored = ((bitmap[:, None].int() >> torch.arange(8)) & 1).bool().view(-1)
    weight = torch.zeros(256 * 8).masked_scatter(stored, torch.arange(1.0, 2000.0))
    assert torch.equal(pack(weight)[1], bitmap)
    assert torch.equal(unpack(weight[stored], bitmap, weight.shape), weight)


def test_only_positive_zero_is_left_out():
    smallest = torch.finfo(torch.float32).smallest_normal / 2**20
    weight = torch.tensor([[0.0, -0.0, float("nan"), float("inf"), smallest, 1.0]])
    numbers, bitmap = pack(weight)
    assert bitmap.tolist() == [0b111110]
    assert same_bits(unpack(numbers, bitmap, weight.shape), weight)


def test_of_a_weight_that_is_not_contiguous():
    weight = holes(llama()).get_parameter(DOWN).detach().t()
    assert torch.equal(unpack(*pack(weight), weight.shape), weight)


@pytest.mark.parametrize("change", [lambda n, b: (n[:-1], b), lambda n, b: (n, b ^ 1)])
def test_counts_that_differ(change):
    numbers, bitmap = change(*pack(torch.ones(4, 4)))
    with pytest.raises(CheckpointError, match=r"its bitmap marks 1\d weights, but 1\d are stored"):
        unpack(numbers, bitmap, torch.Size([4, 4]))


@pytest.mark.parametrize("pattern", ["2:4", "50%"])
def test_size_of_half_zeros(pattern):
    scores = torch.rand(256, 512, generator=torch.Generator().manual_seed(0))
    mask = n_of_m_mask(scores, 2, 4) if pattern == "2:4" else scores > scores.median()
    weight = torch.randn(256, 512).bfloat16().masked_fill(~mask, 0)
    numbers, bitmap = pack(weight)
    assert (numbers.nbytes + bitmap.nbytes) / weight.nbytes == pytest.approx(0.5625, abs=1e-4)


# On disk and back


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_survive_with_every_layout(name, cut, tmp_path):
    model = holes(CUTS[cut](VARIANTS[name]()))
    with torch.no_grad():
        next(iter(named_linears(model).values())).weight[0, 0] = -0.0
    layout = save_checkpoint(model, tmp_path / "dense")
    config = model.config.to_dict()
    assert save_checkpoint(model, tmp_path / "it", storage="packed") == layout
    assert layout == ("compact" if cut == "uneven" else "stock")
    assert model.config.to_dict() == config
    stored = config_of(tmp_path / "it")["quantization_config"]
    assert (stored["quant_method"], stored["version"], stored["layout"], stored["storage"]) == (
        "optimum_prune",
        1,
        layout,
        "packed",
    )
    again, complaints = load(tmp_path / "it")
    assert complaints == {}
    assert_same(model, again)


@pytest.mark.parametrize("name", ["llama-tied-biased", "t5", "llava"])
@pytest.mark.parametrize("cut", CUTS)
def test_what_was_loaded_is_dense_and_saved_dense(name, cut, tmp_path):
    model = holes(CUTS[cut](VARIANTS[name]()))
    save_checkpoint(model, tmp_path / "packed", storage="packed")
    save_checkpoint(model, tmp_path / "dense")
    again = load(tmp_path / "packed")[0]
    assert not hasattr(again, "hf_quantizer")
    assert not again.is_quantized
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "dense" / "model.safetensors"
    ).read_bytes()
    block = config_of(tmp_path / "again").get("quantization_config")
    assert block == config_of(tmp_path / "dense").get("quantization_config")
    assert (block is None) == (cut != "uneven")


def test_names_are_those_on_disk(tmp_path):
    save_checkpoint(holes(VARIANTS["llava"]()), tmp_path / "it", storage="packed")
    stored = load_file(tmp_path / "it" / "model.safetensors")
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    assert stored[name].dim() == stored[name + BITMAP].dim() == 1
    assert stored["language_model.model.embed_tokens.weight"].dim() == 2


def test_only_what_gets_smaller_is_packed(tmp_path):
    model: Any = llama().bfloat16()
    with torch.no_grad():
        up, down = (model.get_parameter(f"model.layers.0.mlp.{name}.weight") for name in ("up_proj", "down_proj"))
        up.view(-1)[: 48 * 32 // 16] = 0  # a bit of 16 for each weight: no gain
        down.view(-1)[: 48 * 32 // 16 + 1] = 0
    save_checkpoint(model, tmp_path / "it", storage="packed")
    stored = load_file(tmp_path / "it" / "model.safetensors")
    assert [name for name in stored if name.endswith(BITMAP)] == [f"model.layers.0.mlp.down_proj.weight{BITMAP}"]
    assert_same(model, LlamaForCausalLM.from_pretrained(tmp_path / "it"))


@pytest.mark.parametrize("cut", ["dense", "uneven"])
def test_without_zeros_it_is_dense(cut, tmp_path, caplog):
    model = CUTS[cut](llama())
    save_checkpoint(model, tmp_path / "it", storage="packed")
    assert "No linear has enough zeros to get smaller by packing" in caplog.text
    assert "storage" not in config_of(tmp_path / "it").get("quantization_config", {})
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path / "it"))


def test_dense_is_the_default(tmp_path):
    save_checkpoint(holes(llama()), tmp_path / "it")
    assert "quantization_config" not in config_of(tmp_path / "it")
    assert load_file(tmp_path / "it" / "model.safetensors")[DOWN].dim() == 2


def test_shards(tmp_path):
    model = holes(unevenly(llama()))
    save_checkpoint(model, tmp_path / "it", storage="packed", max_shard_size="2KB")
    weights = json.loads((tmp_path / "it" / "model.safetensors.index.json").read_text())["weight_map"]
    parted = [name for name in weights if weights.get(name + BITMAP, weights[name]) != weights[name]]
    assert parted  # numbers and bitmap of a weight may lie in two files
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path / "it"))


def test_given_tensors_are_packed(tmp_path):
    model, other = llama(), holes(llama(seed=1))
    save_checkpoint(model, tmp_path / "it", storage="packed", state_dict=other.state_dict())
    assert_same(other, AutoModelForCausalLM.from_pretrained(tmp_path / "it"))


# Ways to load


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "it"
    save_checkpoint(holes(llama()), folder, storage="packed")
    return folder


@pytest.mark.parametrize(
    "options", [{"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}, {"disable_mmap": True}]
)
def test_device_maps(options, packed):
    assert_same(holes(llama()), AutoModelForCausalLM.from_pretrained(packed, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_while_loading(dtype, packed):
    loaded: Any = AutoModelForCausalLM.from_pretrained(packed, dtype=dtype)
    expected: Any = holes(llama())
    assert_same(expected.to(dtype), loaded)


def test_weights_that_stay_float32(tmp_path):
    model = holes(t5())
    save_checkpoint(model, tmp_path / "it", storage="packed")
    loaded: Any = T5ForConditionalGeneration.from_pretrained(tmp_path / "it", dtype=torch.float16)
    wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    assert same_bits(loaded.get_parameter(wo), model.get_parameter(wo))
    assert loaded.encoder.block[0].layer[0].SelfAttention.q.weight.dtype == torch.float16


def test_layer_on_disk(packed, tmp_path):
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(packed, device_map=places, offload_folder=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, holes(llama())(tokens()).logits)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.\S+ is not in memory .* storage='dense'"):
        save_checkpoint(model, tmp_path / "again", storage="packed")


def test_base_model(packed, tmp_path):
    base = AutoModel.from_pretrained(packed)
    assert_same(holes(llama()).model, base)
    save_checkpoint(base, tmp_path / "base", storage="packed")
    assert_same(base, AutoModel.from_pretrained(tmp_path / "base"))
    loaded, complaints = load(tmp_path / "base")
    assert complaints == {"missing_keys": {"lm_head.weight"}}
    assert_same(base, loaded.model)


def test_meta_device(packed):
    model = LlamaForCausalLM.from_pretrained(packed, device_map="meta")
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in llama().state_dict().items()
    }


def test_skeleton(packed):
    skeleton = load_skeleton(packed)
    assert not hasattr(skeleton.config, "quantization_config")
    assert skeleton.num_parameters() == llama().num_parameters()


@pytest.mark.parametrize(
    ("layout", "storage", "reason"),
    [
        ("stock", "dense", None),
        ("stock", "packed", "Its weights are packed."),
        ("compact", "dense", "Its layers differ in size."),
        ("compact", "packed", "Its layers differ in size and its weights are packed."),
    ],
)
def test_card_says_why_it_needs_the_package(layout, storage, reason):
    text = model_card(masked(), evaluations={}, layout=layout, storage=storage).text
    assert ("import optimum_prune" in text) == ("pip install optimum-prune" in text) == (reason is not None)
    assert reason is None or f"- {reason} Plain transformers does not load it" in text
    assert ("Only the files are smaller" in text) == (storage == "packed")
    assert ("they make the files no smaller" in text) == (storage == "dense")


def test_command(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    flags = ("--pattern", "2:4", "--scorer", "magnitude", "--storage", "packed")
    done = run(CLI, "prune", "run", "--model", tmp_path / "dense", "--output", tmp_path / "it", *flags)
    assert done.returncode == 0, done.stderr
    assert config_of(tmp_path / "it")["quantization_config"]["storage"] == "packed"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "it")
    assert all(int(mask.sum()) * 2 == mask.numel() for mask in masks_of(loaded).values())
    done = run(CLI, "prune", "run", "--model", "x", "--output", tmp_path / "it", "--storage", "zip")
    assert done.returncode == 2 and "argument --storage: invalid choice: 'zip'" in done.stderr


def test_pruner_loads_prunes_and_packs(packed, tmp_path):
    pruner = Pruner.from_pretrained(packed)
    assert pruner.masks().keys() == named_linears(llama()).keys()
    pruner.tokenizer = tokenizer()
    pruner.prune(PruningConfig(scorer="magnitude", pattern="2:4"))
    assert pruner.save_pretrained(tmp_path / "it", storage="packed") == "stock"
    assert_same(pruner.model, AutoModelForCausalLM.from_pretrained(tmp_path / "it"))
    card = (tmp_path / "it" / "README.md").read_text()
    assert "import optimum_prune  # registers" in card
    assert "Its weights are packed. Plain transformers does not load it" in card
    assert "take one bit each in the files" in card
    size = (tmp_path / "it" / "model.safetensors").stat().st_size
    pruner.save_pretrained(tmp_path / "dense")
    assert size < 0.75 * (tmp_path / "dense" / "model.safetensors").stat().st_size
    assert "import optimum_prune  # registers" not in (tmp_path / "dense" / "README.md").read_text()


# What refuses


def test_plain_transformers_stops(packed):
    done = run(WITHOUT_PLUGIN, packed)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 3
    assert all("`ignore_mismatched_sizes` to `False`, thus raising an error" in answer for answer in answers)
    assert "Unknown quantization type, got optimum_prune" in done.stderr


def rewritten(packed, folder, change):
    shutil.copytree(packed, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shorten(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


def flip(tensors):
    tensors[DOWN + BITMAP][7] ^= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip, rf"{DOWN} is damaged: its bitmap marks \d+ weights, but \d+ are stored\. \(1 damaged"),
        (shorten(DOWN), rf"{DOWN} is damaged: its bitmap marks \d+ weights, but \d+ are stored"),
        (shorten(DOWN + BITMAP), rf"{DOWN} is \[32, 48\], but in the checkpoint it is \[\d+\]"),
        (lambda tensors: tensors.pop(DOWN + BITMAP), rf"{DOWN} is \[32, 48\], but in the checkpoint it is \[\d+\]"),
        (lambda tensors: tensors.pop(DOWN), rf"{DOWN} is \[32, 48\], but in the checkpoint it is absent"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
def test_damage_is_named(change, message, options, packed, tmp_path):
    folder = rewritten(packed, tmp_path / "it", change)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder, **options)


def test_packed_weights_of_a_config_that_does_not_say_so(tmp_path):
    save_checkpoint(holes(unevenly(llama())), tmp_path / "it", storage="packed")
    config = config_of(tmp_path / "it")
    del config["quantization_config"]["storage"]
    (tmp_path / "it" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight is \[\d+, \d+\], but in the checkpoint it is \[\d+\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "it")


@pytest.mark.parametrize("change", [{"storage": "zipped"}, {"layout": "padded"}, {"version": 2}])
def test_formats_of_the_future(change, packed, tmp_path):
    shutil.copytree(packed, tmp_path / "it")
    config = config_of(packed)
    config["quantization_config"] |= change
    (tmp_path / "it" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{next(iter(change))} {next(iter(change.values()))!r}.* Update it"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "it")


def test_unknown_storage(tmp_path):
    with pytest.raises(InvalidConfig, match="Unknown storage 'pack'; supported: 'dense', 'packed'"):
        save_checkpoint(llama(), tmp_path / "it", storage="pack")
    assert not any(tmp_path.iterdir())


def test_saving_verifies_what_was_packed(tmp_path, monkeypatch):
    def lossy(weight):
        numbers, bitmap = pack(weight)
        return numbers, bitmap[:-1]

    monkeypatch.setattr(packing, "pack", lossy)
    model = holes(llama())
    with pytest.raises(CheckpointError, match=r"weight is \[\d+, \d+\], but in the checkpoint it is \[\d+\]"):
        save_checkpoint(model, tmp_path / "it", storage="packed")
    assert not any(tmp_path.iterdir())
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("stored", "unpacked"),
    [
        ({"w": [5], "w.packed_bitmap": [2]}, {"w": (3, 4)}),
        ({"w": [5], "w.packed_bitmap": [3]}, {"w": (5,), "w.packed_bitmap": (3,)}),
        ({"w": [3, 4], "w.packed_bitmap": [2]}, {"w": (3, 4), "w.packed_bitmap": (2,)}),
        ({"w": [5], "w.packed_bitmap": [2, 1]}, {"w": (5,), "w.packed_bitmap": (2, 1)}),
        ({"w": [5], "w.packed_bitmap": []}, {"w": (5,), "w.packed_bitmap": ()}),
        ({"w": [5]}, {"w": (5,)}),
        ({"w.packed_bitmap": [2]}, {"w.packed_bitmap": (2,)}),
        ({"v": [5], "v.packed_bitmap": [2]}, {"v": (5,), "v.packed_bitmap": (2,)}),
    ],
)
def test_shapes(stored, unpacked):
    assert shapes_unpacked(stored, {"w": (3, 4)}) == unpacked
