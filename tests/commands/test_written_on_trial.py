"""What a save would refuse is refused by every command that saves, and by `plan`, before a weight is read."""

import pytest

from tests.models import llama
from tests.pruned import unevenly
from tests.refused import on_disk


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Return the folders of a dense and of a pruned model whose config cannot be written again."""
    root = tmp_path_factory.mktemp("refused")
    pruned = unevenly(llama())
    pruned.config.pruning_config = {"version": 1, "layout": "compact", "recipe": {"pattern": "structured"}}
    return {
        "dense": on_disk(root / "dense"),
        "pruned": on_disk(root / "pruned", pruned, output_attentions=True),
    }


@pytest.mark.parametrize(
    ("which", "arguments"),
    [
        ("dense", ["plan", "--model", "{model}", "--scorer", "magnitude", "--sparsity", "0.5"]),
        ("dense", ["run", "--model", "{model}", "--scorer", "magnitude", "--sparsity", "0.5", "--output", "{output}"]),
        ("pruned", ["recover", "--model", "{model}", "--loss", "lm", "--output", "{output}"]),
        ("pruned", ["convert", "{model}", "--output", "{output}"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_refused(which, arguments, refused, call_cli, loads_nothing, tmp_path):
    places = {"model": refused[which], "output": tmp_path / "out"}
    code, _, said = call_cli(*(argument.format(**places) for argument in arguments))
    assert code == 2
    assert "LlamaForCausalLM does not take its config (" in said and "output_attentions" in said
    assert not (tmp_path / "out").exists()
