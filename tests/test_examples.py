"""Every example runs on the trained small model of its architecture, and what it saves loads in a fresh process."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimum_prune import Pruner
from tests import lab
from tests.processes import run

EXAMPLES = Path(__file__).parents[1] / "examples"
STOCK = {"qwen2", "qwen3", "opt"}
"""Whose checkpoints plain transformers loads."""
LOAD = """
import sys
{plugin}
import torch
from safetensors.torch import load_file, save_file
from tests.outputs import load

model, complaints = load(sys.argv[1])
assert not complaints, complaints
assert ("optimum_prune" in sys.modules) == {loaded}
given = load_file(sys.argv[2])
prompt = {{name: tensor for name, tensor in given.items() if name != "decoder_input_ids"}}
with torch.no_grad():
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=8, min_new_tokens=8)[:, -8:]
    save_file({{"logits": model(**given).logits.contiguous(), "tokens": tokens.contiguous()}}, sys.argv[3])
"""


def example(name):
    """Import an example; all of them together are a test of their own."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_model_of_the_lab_has_an_example():
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"demo"} == set(lab.NAMES)


@pytest.mark.parametrize("name", lab.NAMES)
def test_example(name, tmp_path, capsys):
    folder = tmp_path / "pruned"
    pruner = example(name).main(str(lab.folder(name)), folder, lab.calibration(name), lab.evaluation(name))
    printed = capsys.readouterr().out
    assert "asked" in printed and "dense" in printed and "ratio" in printed
    dense, pruned = pruner.evaluations["dense"], pruner.evaluations["pruned"]
    assert pruned.parameters < dense.parameters and pruned.kl > 1e-5
    # The model was trained: it is far better than guessing. That pruning raises the loss is not certain on few tokens.
    assert dense.loss < 0.8 * math.log(pruner.model.config.get_text_config().vocab_size)
    assert Pruner.from_pretrained(folder).report is not None

    given = inputs(name, pruner)
    save_file(given, tmp_path / "inputs.safetensors")
    script = LOAD.format(plugin="" if name in STOCK else "import optimum_prune", loaded=name not in STOCK)
    done = run(script, folder, tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors")
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "outputs.safetensors")
    prompt = {key: tensor for key, tensor in given.items() if key != "decoder_input_ids"}
    with torch.no_grad():
        tokens = pruner.model.generate(**prompt, do_sample=False, max_new_tokens=8, min_new_tokens=8)[:, -8:]
        assert torch.equal(found["logits"], pruner.model(**given).logits)
    assert torch.equal(found["tokens"], tokens)


def inputs(name, pruner):
    """Return what one forward takes: a text, with an answer begun or a picture."""
    if name == "llava":
        row = lab.evaluation(name)[0]
        return dict(pruner.processor(images=row["image"], text=row["text"], return_tensors="pt"))
    ids = pruner.tokenizer(lab.evaluation(name)[0][:200], return_tensors="pt").input_ids
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return given | ({"decoder_input_ids": ids[:, :6].clone()} if name == "t5" else {})
