"""What is not imported before it is needed, seen from fresh processes."""

import pytest

import optimum_prune
from tests.processes import answer

HEAVY = ("torch", "transformers", "huggingface_hub", "peft", "datasets", "evaluate", "matplotlib", "numpy")


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Return what is in memory of HEAVY after each step."""
    return answer(
        f"""
import json, sys
loaded = {{}}
def step(name):
    loaded[name] = sorted(set({HEAVY}) & set(sys.modules))

import optimum_prune
dir(optimum_prune), optimum_prune.__version__
step("package")

from optimum_prune import CalibrationConfig, InvalidConfig, PruningConfig
PruningConfig.from_dict(PruningConfig(sparsity=0.2, calibration=CalibrationConfig("x")).to_dict())
step("config")

from optimum_prune import registry
registry.available("scorers"), registry.load("adapters", "mistral")
step("adapter")
loaded["scorers"] = [name for name in sys.modules if name.startswith("optimum_prune.scorers")]
loaded["adapters"] = sorted(name for name in sys.modules if name.startswith("optimum_prune.adapters."))

import optimum_prune.commands.register_prune
step("command")

import transformers
loaded["plugin"] = [name for name in sys.modules if name.startswith("optimum_prune.integrations")]

optimum_prune.Pruner
step("pruner")
print(json.dumps(loaded))
"""
    )


@pytest.mark.parametrize("step", ["package", "config", "adapter", "command"])
def test_brings_nothing_heavy(step, loaded):
    assert loaded[step] == []


def test_listing_imports_nothing_and_loading_only_the_one_file(loaded):
    assert loaded["scorers"] == []
    assert loaded["adapters"] == [f"optimum_prune.adapters.{name}" for name in ("base", "llama", "mistral")]


def test_plugin_waits_for_models(loaded):
    assert loaded["plugin"] == []


def test_pruner_brings_only_what_every_run_needs(loaded):
    assert set(loaded["pruner"]) == {"torch", "transformers", "huggingface_hub", "numpy"}


@pytest.mark.parametrize(
    "imports",
    [
        "import optimum_prune; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.register; import optimum_prune",
        "import transformers.modeling_utils, optimum_prune",
        "import optimum_prune.integrations.quantizer",
    ],
)
def test_plugin_is_registered_in_every_order(imports):
    registered = answer(
        f"""
{imports}
import json
import transformers.modeling_utils
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from optimum_prune.integrations.quantizer import CheckpointConfig, PruningQuantizer, register
register()
print(json.dumps([
    AUTO_QUANTIZER_MAPPING["optimum_prune"] is PruningQuantizer,
    AUTO_QUANTIZATION_CONFIG_MAPPING["optimum_prune"] is CheckpointConfig,
]))
"""
    )
    assert registered == [True, True]


def test_public_names_resolve():
    assert sorted(optimum_prune.__all__) == optimum_prune.__all__
    for name in optimum_prune.__all__:
        assert getattr(optimum_prune, name).__name__ == name
        assert name in dir(optimum_prune)
    assert set(optimum_prune._HOMES) < set(optimum_prune.__all__)


def test_other_names_do_not():
    with pytest.raises(AttributeError, match="module 'optimum_prune' has no attribute 'Prune'"):
        optimum_prune.Prune
