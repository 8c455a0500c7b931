"""What an import costs, seen from fresh processes, and when the plugin registers itself with transformers."""

import pytest

import optimum_prune
from tests.processes import answer

HEAVY = ["torch", "transformers", "huggingface_hub", "peft", "datasets", "evaluate", "matplotlib"]
LOADED = f"import json, sys; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
CLI = "import sys; from optimum.commands.optimum_cli import main; sys.argv[0] = 'optimum-cli'; main()"


# The package


@pytest.mark.parametrize(
    "script",
    [
        "import optimum_prune",
        "from optimum_prune import CalibrationConfig, PruningConfig, PruningError, InvalidConfig",
        "import optimum_prune; optimum_prune.PruningConfig(scorer='ntk', sparsity=0.2).to_dict()",
        "import optimum_prune; dir(optimum_prune)",
    ],
)
def test_imports_nothing_heavy(script):
    assert answer(f"{script}\n{LOADED}") == []


def test_pruner_leaves_optional_packages_alone():
    loaded = answer(f"from optimum_prune import Pruner\n{LOADED}")
    assert not {"peft", "evaluate", "matplotlib"} & set(loaded)


def test_this_test_can_fail():
    assert answer(f"import huggingface_hub\n{LOADED}") == ["huggingface_hub"]


@pytest.mark.parametrize("name", optimum_prune.__all__)
def test_every_public_name_exists(name):
    assert getattr(optimum_prune, name).__name__ == name
    assert name in dir(optimum_prune)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'optimum_prune' has no attribute 'Prunner'"):
        optimum_prune.Prunner  # noqa: B018


# optimum-cli


@pytest.mark.parametrize("arguments", ["--help", "prune", "prune --help", "prune run --help", "prune plan --help"])
def test_help_imports_nothing_heavy(arguments):
    script = f"import atexit\n@atexit.register\ndef _():\n    {LOADED}\n{CLI}"
    assert answer(script, *arguments.split()) == []


# Registration

ORDERS = [
    "import optimum_prune; import transformers.modeling_utils",
    "import transformers.modeling_utils; import optimum_prune",
    "import optimum_prune; import transformers.quantizers; from transformers import LlamaForCausalLM",
    "from optimum_prune.integrations.quantizer import register; register(); register()",
    # Registration imports these while transformers is being imported: none of them may close the circle.
    "import optimum_prune.surgery; import transformers.modeling_utils",
    "import optimum_prune.sizes; import transformers.modeling_utils",
    "import optimum_prune.layouts.headers",
    "import optimum_prune.integrations.card",
]


@pytest.fixture(scope="module")
def registered():
    """Return what each order of imports registers: in forks of one process that has torch, the slow part."""
    return answer(f"""
import accelerate, json, os, sys, torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
assert "transformers" not in sys.modules and "optimum_prune" not in sys.modules
results = {{}}
for order in {ORDERS}:
    reader, writer = os.pipe()
    if not os.fork():
        try:
            exec(order)
            from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known
            result = [name for name in known if "prune" in name]
        except BaseException as error:
            result = repr(error)
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    results[order] = json.loads(os.read(reader, 9999))
print(json.dumps(results))
""")


@pytest.mark.parametrize("order", ORDERS)
def test_the_plugin_is_registered_once(registered, order):
    assert registered[order] == ["optimum_prune"]
