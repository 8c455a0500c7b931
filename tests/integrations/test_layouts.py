"""Save, start a new process, load, compare to the bit."""

import errno
import json
import re
import resource
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GgufConfig, LlamaForCausalLM

from optimum_prune.binding import bind
from optimum_prune.config import PruningConfig
from optimum_prune.errors import CheckpointError, InvalidConfig
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.pipeline import prune
from optimum_prune.sizes import measure
from optimum_prune.surgery import slice_
from tests.models import VARIANTS, every_model, llama, mistral
from tests.outputs import load, outputs
from tests.processes import answer, run
from tests.pruned import unevenly, uniformly

NAMES = list(every_model())
OURS = {"quantization_config", "per_layer_config", "allow_global_per_layer_attribute_access"}

RELOAD = """
import json, sys
from pathlib import Path
{plugin}
from safetensors.torch import save_file
from tests.outputs import load, outputs

answer = {{}}
for folder in map(Path, sys.argv[1:]):
    model, complaints = load(folder, dtype="auto")
    save_file(outputs(model), folder.with_suffix(".safetensors"))
    answer[folder.name] = {{
        "class": type(model).__name__,
        "complaints": {{kind: sorted(map(str, found)) for kind, found in complaints.items()}},
        "tied": model.lm_head.weight is model.get_input_embeddings().weight,
        "dtype": str(model.dtype),
    }}
    assert ("optimum_prune" in sys.modules) == {loaded}
    print(json.dumps(answer))
"""
TIED = {name for name, model in every_model().items() if model.config.tie_word_embeddings}
WITH_PLUGIN = RELOAD.format(plugin="import optimum_prune", loaded=True)
WITHOUT_PLUGIN = RELOAD.format(plugin="", loaded=False)


def bfloat16(folder):
    """Load a dense model in bfloat16: `.to()` would cast the rotary buffers too, which loading does not."""
    llama().save_pretrained(folder)
    return unevenly(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))


def save_all(root, models, layout, **kwargs):
    """Save each model, and return what it computes."""
    expected = {}
    for name, model in models.items():
        assert save_checkpoint(model, root / name, **kwargs) == layout
        expected[name] = outputs(model)
    return expected


def check(root, name, expected):
    found = load_file(root / f"{name}.safetensors")
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    for cache in found.keys() & {"uncached", "static", "chunked", "alone"}:
        assert torch.equal(found[cache], found["dynamic"])


# Compact


@pytest.fixture(scope="module")
def compact(tmp_path_factory):
    root = tmp_path_factory.mktemp("compact")
    models = {name: unevenly(model) for name, model in every_model().items()}
    models["bfloat16"] = bfloat16(root / "dense")
    expected = save_all(root, models, "compact")
    expected |= save_all(root, {"sharded": unevenly(llama(seed=1))}, "compact", max_shard_size="6KB")
    return root, expected, answer(WITH_PLUGIN, *(root / name for name in expected))


@pytest.mark.parametrize("name", [*NAMES, "bfloat16", "sharded"])
def test_fresh_process_computes_the_same(compact, name):
    root, expected, found = compact
    check(root, name, expected[name])
    assert found[name]["complaints"] == {}
    assert found[name]["class"] == type(VARIANTS.get(name, llama)()).__name__


def test_checkpoints_are_as_uneven_as_they_can_be(compact):
    """As the config tells it, without a look at the weights."""
    root, expected, _ = compact
    for name in expected:
        config = json.loads((root / name / "config.json").read_text())
        groups: dict[tuple[str, str], list] = {}
        for group in bind(VARIANTS.get(name, llama)()):
            groups.setdefault((group.declared.path, group.group.site), []).append(group)
        for (path, _), members in groups.items():
            stack, counted = members[0].declared, next(iter(members[0].group.counts))
            own = config[stack.config] if stack.config else config
            layers = own.get("per_layer_config") or config["quantization_config"]["per_layer"][path]
            counts = {(own | layers.get(str(layer), {}))[counted] for layer in range(len(members))}
            assert len(counts) == (1 if members[0].group.tied else min(members[0].num_units, 3))


def test_bfloat16_stays(compact):
    assert compact[2]["bfloat16"]["dtype"] == "torch.bfloat16"


def test_shards_are_several(compact):
    assert len(list((compact[0] / "sharded").glob("model-*.safetensors"))) > 3


def test_tie_survives(compact):
    root, _, found = compact
    assert {name for name in found if found[name]["tied"]} == TIED
    assert "llama-tied-biased" in TIED
    stored = load_file(root / "llama-tied-biased" / "model.safetensors")
    assert "model.embed_tokens.weight" in stored
    assert "lm_head.weight" not in stored


def test_config_is_as_designed(compact):
    config = json.loads((compact[0] / "llama-gqa" / "config.json").read_text())
    assert config["num_attention_heads"] == 8
    assert config["num_key_value_heads"] == 4
    assert config["intermediate_size"] == 43
    assert config["head_dim"] == 4
    assert config["allow_global_per_layer_attribute_access"] is True
    assert config["per_layer_config"] == {
        "1": {"intermediate_size": 39, "num_attention_heads": 6, "num_key_value_heads": 3},
        "2": {"intermediate_size": 28, "num_attention_heads": 4, "num_key_value_heads": 2},
    }
    assert config["quantization_config"] == {
        "quant_method": "optimum_prune",
        "version": 1,
        "layout": "compact",
        "hint": "pip install optimum-prune, then `import optimum_prune` before from_pretrained",
    }


@pytest.mark.parametrize("name", [*NAMES, "bfloat16"])
def test_saving_again_writes_the_same_bytes(compact, name, tmp_path):
    """By the plain method: what Trainer and `push_to_hub` call."""
    root, _, _ = compact
    load(root / name)[0].save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (root / name / "model.safetensors").read_bytes()
    again, first = ((folder / "config.json").read_text() for folder in (tmp_path, root / name))
    # Of a model of several parts, transformers adds their dtype when it saves for the second time.
    assert again == first or re.sub(r'    "dtype": "float32",\n', "", again) == first


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "6KB"}])
@pytest.mark.parametrize("cut", [unevenly, uniformly])
def test_saving_again_with_the_package_writes_the_same_bytes(cut, shards, tmp_path):
    save_checkpoint(cut(llama()), tmp_path / "first", **shards)
    save_checkpoint(AutoModelForCausalLM.from_pretrained(tmp_path / "first"), tmp_path / "again", **shards)
    first, again = (contents(tmp_path / name) for name in ("first", "again"))
    assert first == again and len(first) > (10 if shards else 2)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_itself_agrees_that_it_loads(compact, name):
    """On the meta device: its own loading code, without the weights. The oracle for `verify`."""
    assert load(compact[0] / name, device_map="meta")[1] == {}


# Stock


@pytest.fixture(scope="module")
def plain(tmp_path_factory, compact):
    """A process without the package, which loads uniform checkpoints, and at last an uneven one."""
    root = tmp_path_factory.mktemp("stock")
    models = {name: uniformly(model) for name, model in every_model().items()}
    # 6 heads do not divide a hidden size of 32, which only LlamaConfig minds.
    models["mistral-odd-heads"] = three_groups_each(mistral())
    expected = save_all(root, models, "stock")
    done = run(WITHOUT_PLUGIN, *(root / name for name in expected), compact[0] / "llama-gqa")
    return root, expected, json.loads(done.stdout.splitlines()[-1]), done


def three_groups_each(model):
    for group in bind(model):
        if group.unit == "kv_group":
            slice_(group, [0, 2, 3])
    return model


@pytest.mark.parametrize("name", [*NAMES, "mistral-odd-heads"])
def test_process_without_the_package_computes_the_same(plain, name):
    root, expected, found, _ = plain
    check(root, name, expected[name])
    assert found[name]["complaints"] == {}
    assert found[name]["tied"] == (name in TIED)


def test_stock_config_says_nothing_of_the_plugin(plain):
    for name in plain[1]:
        config = json.loads((plain[0] / name / "config.json").read_text())
        assert not OURS & config.keys()


def test_heads_that_the_class_refuses_are_compact(tmp_path):
    model = three_groups_each(llama())
    assert save_checkpoint(model, tmp_path / "it") == "compact"
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "it")
    assert measure(loaded) == measure(model)
    assert [counts["num_attention_heads"] for counts in measure(loaded)["model.layers"].values()] == [6, 6, 6]


def test_process_without_the_package_fails_loudly_on_a_compact_one(plain):
    done = plain[-1]
    assert done.returncode != 0
    assert "RuntimeError" in done.stderr.splitlines()[-1]
    assert "optimum_prune" in done.stderr


def test_layers_made_even_again_are_stock(tmp_path):
    model = unevenly(llama())
    smallest = measure(model)["model.layers"][2]
    for group in bind(model):
        slice_(group, range(next(smallest[name] for name in group.group.counts)))
    assert save_checkpoint(model, tmp_path / "it") == "stock"
    config = json.loads((tmp_path / "it" / "config.json").read_text())
    assert smallest.items() <= config.items()
    assert not OURS & config.keys()
    assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(tmp_path / "it"))["logits"], outputs(model)["logits"])


def test_dense_model_is_stock(tmp_path):
    model = llama()
    assert save_checkpoint(model, tmp_path / "it") == "stock"
    assert torch.equal(outputs(LlamaForCausalLM.from_pretrained(tmp_path / "it"))["logits"], outputs(model)["logits"])


# Choice of the layout


def test_unknown_layout(tmp_path):
    with pytest.raises(InvalidConfig, match=r"Unknown layout 'stok'; supported: .*Did you mean 'stock'\?"):
        save_checkpoint(llama(), tmp_path / "it", layout="stok")
    assert not any(tmp_path.iterdir())


def test_stock_is_refused_for_uneven_widths(tmp_path):
    reason = "layout='stock' is not possible: layers differ in .*intermediate_size.*'compact'.*plan"
    with pytest.raises(InvalidConfig, match=reason):
        save_checkpoint(unevenly(llama()), tmp_path / "it", layout="stock")
    assert not any(tmp_path.iterdir())


def test_stock_is_refused_with_the_reason_of_the_class(tmp_path):
    with pytest.raises(InvalidConfig, match="not a multiple of the number of attention heads"):
        save_checkpoint(three_groups_each(llama()), tmp_path / "it", layout="stock")


@pytest.mark.parametrize("layout", ["auto", "stock", "compact"])
def test_uniform_widths_are_stock_whatever_is_asked(layout, tmp_path):
    assert save_checkpoint(uniformly(llama()), tmp_path / "it", layout=layout) == "stock"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What goes wrong outside


def test_model_of_a_gguf_file_becomes_a_normal_checkpoint(tmp_path):
    """Its weights are plain. A block in the config and a quantizer are left of the file: both must go."""
    model: Any = llama()
    expected = outputs(model)
    model.config.quantization_config = GgufConfig(gguf_file="dense.gguf")
    model.hf_quantizer, model.is_quantized, model.quantization_method = object(), True, "gguf"
    save_checkpoint(model, tmp_path / "uncut")
    assert not hasattr(model, "hf_quantizer")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "uncut")
    assert not hasattr(loaded.config, "quantization_config")
    assert torch.equal(outputs(loaded)["logits"], expected["logits"])

    model.config.quantization_config = {"quant_method": "gguf", "gguf_file": "dense.gguf"}
    prune(model, PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1))
    assert save_checkpoint(model, tmp_path / "cut") == "compact"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    assert loaded.config.quantization_config.quant_method == "optimum_prune"
    assert torch.equal(outputs(loaded)["logits"], outputs(model)["logits"])


def test_full_disk(tmp_path):
    """The error is safetensors' own, which is no OSError; here it comes from a limit on the size of files."""
    target = tmp_path / "it"
    save_checkpoint(unevenly(llama()), target)
    before = contents(target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"nothing was changed there: .*File too large"):
            save_checkpoint(unevenly(llama(seed=1)), target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("odd"),
        RuntimeError("tensors share memory"),
    ],
)
def test_whatever_saving_raises_is_ours(error, tmp_path, monkeypatch):
    def fail(self, folder, **kwargs):
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    with pytest.raises(CheckpointError, match=f"nothing was changed there: .*{error.args[-1]}"):
        save_checkpoint(llama(), tmp_path / "it")
    assert not any(tmp_path.iterdir())


def test_companions_are_part_of_the_whole(tmp_path):
    seen = []

    def write(folder, written):
        seen.append((written.layout, written.storage, written.weight_bytes))
        (folder / "README.md").write_text("card")

    save_checkpoint(unevenly(llama()), tmp_path / "it", companions=write, max_shard_size="6KB")
    shards = list((tmp_path / "it").glob("*.safetensors"))
    assert seen == [("compact", "dense", sum(shard.stat().st_size for shard in shards))]
    assert (tmp_path / "it" / "README.md").read_text() == "card"

    def fail(folder, written):
        raise OSError(errno.EACCES, "Permission denied")

    before = contents(tmp_path / "it")
    with pytest.raises(CheckpointError, match="Permission denied"):
        save_checkpoint(llama(), tmp_path / "it", companions=fail)
    assert contents(tmp_path / "it") == before


def test_old_weights_go_and_foreign_files_stay(tmp_path):
    target = tmp_path / "it"
    save_checkpoint(unevenly(llama()), target, max_shard_size="6KB")
    foreign = {
        "notes.txt": "kept",
        "model-best.safetensors": "no name that transformers reads",
        "adapter_model.safetensors": "an adapter",
        "onnx/model.onnx": "another format",
        "pruning_report.md": "kept",
    }
    for name, text in foreign.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text)
    stale = [
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "pruning_report.json",
        "pytorch_model-00001-of-00002.bin",
    ]
    for name in stale:
        (target / name).write_text("old")
    save_checkpoint(uniformly(llama()), target)
    new = {"config.json", "generation_config.json", "model.safetensors"}
    assert contents(target).keys() == new | foreign.keys()
    assert {name: (target / name).read_text() for name in foreign} == foreign
    LlamaForCausalLM.from_pretrained(target)


# Death in the middle

SAVE_UNTIL_KILLED = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from optimum_prune.integrations import directories, layouts
from tests.models import llama
from tests.pruned import unevenly

root = Path(sys.argv[1])

def save(which):
    # Different layouts, and shards of different sizes, so that a mixture of both would be noticed.
    options = {"layout": ("compact", "padded")[which], "max_shard_size": ("30KB", "120KB")[which]}
    layouts.save_checkpoint(unevenly(llama(seed=which)), root / "it", **options)

def child(*saves):
    # This process itself never saves: it must have no threads when it forks.
    process = os.fork()
    if process:
        return process
    for which in saves:
        save(which)
    os._exit(0)

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def exchange_and_die(*paths):
    exchange(*paths)
    die()

exchange = directories._exchange
replaced = {
    (layouts, "verify_checkpoint"): die,
    (directories, "_sync"): die,
    (directories, "_swap"): die,
    (directories, "_exchange"): exchange_and_die,
}
start = time.perf_counter()
assert os.waitpid(child(0), 0)[1] == 0
duration = time.perf_counter() - start
left_over = []

def note_death(process):
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    shutil.copytree(root / "it", root / str(len(left_over)))
    left_over.append([name for name in os.listdir(root) if name.startswith(".it.saving-")])

for (module, name), function in replaced.items():
    original = getattr(module, name)
    setattr(module, name, function)
    note_death(child(1))
    setattr(module, name, original)

generator = random.Random(0)
for _ in range(20):
    process = child(*[1, 0] * 100)
    time.sleep(generator.uniform(0, 2 * duration))
    os.kill(process, signal.SIGKILL)
    note_death(process)

assert os.waitpid(child(0), 0)[1] == 0
at_last = [name for name in os.listdir(root) if not name.isdigit()]
print(json.dumps({"left_over": left_over, "at last": at_last}))
"""


def test_killed_at_any_moment_leaves_the_old_or_the_new(tmp_path):
    found = answer(SAVE_UNTIL_KILLED, tmp_path)
    whole = [outputs(unevenly(llama(seed=seed)))["logits"] for seed in (0, 1)]
    states = []
    for moment in range(len(found["left_over"])):
        model, complaints = load(tmp_path / str(moment))
        assert complaints == {}
        logits = outputs(model)["logits"]
        states.append(next(i for i, of in enumerate(whole) if (logits - of).abs().max() < 1e-5))
    # Killed three times before the exchange, and once between it and the removal of the old.
    assert states[:4] == [0, 0, 0, 1]
    # Each killed process leaves at most its own half, and the next save removes it.
    assert all(len(names) <= 1 for names in found["left_over"])
    assert any(found["left_over"])
    assert found["at last"] == ["it"]
