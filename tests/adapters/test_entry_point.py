"""Another package's adapter: one file and one entry point make an architecture prunable, saved and loaded again."""

import pytest

from tests.processes import run

ADAPTER = """
from dataclasses import replace

from optimum_prune.adapters import llama

ADAPTER = replace(llama.ADAPTER, model_type="olmo")
"""
PRUNE = """
import sys

sys.path.insert(0, sys.argv[1])  # as an installed package is found

import torch
from transformers import OlmoConfig, OlmoForCausalLM

from optimum_prune import Pruner, PruningConfig

torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, pad_token_id=0)
model = OlmoForCausalLM(OlmoConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)).eval()
pruner = Pruner(model)
report = pruner.prune(PruningConfig(sparsity=0.4, scorer="magnitude", allocation="global", round_to=1))
assert report.model_type == "olmo" and 0.35 < report.achieved < 0.4, report
assert pruner.save_pretrained(sys.argv[2]) == "compact"
torch.save(model(input_ids=torch.arange(12)[None]).logits, sys.argv[2] + "/logits.pt")
"""
LOAD = """
import sys

sys.path.insert(0, sys.argv[1])

import torch
from transformers import AutoModelForCausalLM

import optimum_prune

with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(sys.argv[2])(input_ids=torch.arange(12)[None]).logits
assert torch.equal(logits, torch.load(sys.argv[2] + "/logits.pt"))
"""


@pytest.fixture
def package(tmp_path):
    """A folder as pip leaves it: a module, and metadata that names its adapter."""
    folder = tmp_path / "site"
    metadata = folder / "olmo_pruning-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "olmo_pruning.py").write_text(ADAPTER)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: olmo-pruning\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[optimum_prune.adapters]\nolmo = olmo_pruning:ADAPTER\n")
    return folder


def test_prunes_saves_and_loads_in_a_fresh_process(package, tmp_path):
    for script in (PRUNE, LOAD):
        done = run(script, package, tmp_path / "pruned")
        assert done.returncode == 0, done.stderr


def test_without_the_package_it_is_unknown(tmp_path):
    done = run(PRUNE, tmp_path, tmp_path / "pruned")
    assert done.returncode != 0
    assert "Unknown architecture 'olmo'" in done.stderr.splitlines()[-1]
