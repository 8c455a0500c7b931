"""`optimum-cli prune plan`: the table, the file, and one line for a refusal; no weight is read."""

import json
from pathlib import Path

import pytest

from optimum_prune import PruningConfig
from optimum_prune.integrations.loading import load_skeleton
from optimum_prune.planning.planner import make_plan
from tests.models import llama
from tests.processes import run

CLI = "from optimum.commands.optimum_cli import main; main()"
ERROR = "optimum-cli prune plan: error: "


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """Return a checkpoint of which only the config is left: whoever reads weights fails."""
    folder = tmp_path_factory.mktemp("models") / "dense"
    llama(dtype="bfloat16").save_pretrained(folder)
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return folder


@pytest.fixture
def cli(dense, monkeypatch, call_cli):
    """Return a function that runs `optimum-cli prune plan` in this process -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(dense.parent)
    return lambda *arguments: call_cli("plan", "--model", "dense", *arguments)


def test_prints_the_plan(cli, dense):
    code, shown, complaints = cli("--sparsity", 0.3, "--scorer", "magnitude", "--tensor-parallel", 2)
    plan = make_plan(load_skeleton(dense), PruningConfig(scorer="magnitude", sparsity=0.3), 2, skeleton=True)
    assert (code, shown, complaints) == (0, f"{plan}\n", "")


def test_json_file(cli, dense, tmp_path):
    file = tmp_path / "plan.json"
    code, _, _ = cli("--sparsity", 0.5, "--scorer", "magnitude", "--round-to", 1, "--json", file)
    plan = make_plan(load_skeleton(dense), PruningConfig(scorer="magnitude", sparsity=0.5, round_to=1), skeleton=True)
    assert code == 0 and json.loads(file.read_text()) == json.loads(json.dumps(plan.to_dict()))


def test_dtype_and_recipe(cli, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("scorer: magnitude\nsparsity: 0.9\nallocation: uniform")
    _, shown, _ = cli("--recipe", recipe, "--sparsity", 0.5, "--dtype", "float32")
    assert shown.startswith("llama, float32: structured, magnitude, uniform, asked 50.0%")


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ("--pattern 2:4", "2:4, sparsegpt, row, asked 50.0%"),
        ("--pattern 2:4 --scorer wanda", "2:4, wanda, row, asked 50.0%"),
        ("--pattern unstructured --sparsity 0.3 --scorer admm", "unstructured, admm, row, asked 30.0%"),
        (
            "--pattern unstructured --sparsity 0.3 --scorer magnitude --allocation global",
            "unstructured, magnitude, global, asked 30.0%",
        ),
    ],
)
def test_plans_zeros(arguments, first, cli):
    code, shown, complaints = cli(*arguments.split(), "--layout", "stock")
    assert (code, complaints) == (0, "")
    assert shown.startswith(f"llama, float32: {first} of the targeted weights\n")
    assert "alone, they make a model neither smaller nor faster." in " ".join(shown.split())


def words(shown: str) -> list[str]:
    """Return lines with single spaces."""
    return [" ".join(line.split()) for line in shown.splitlines()]


def test_fractions_of_modules_come_from_a_recipe(cli, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('pattern: unstructured\nscorer: wanda\nsparsity: {"*.mlp": 0.5, "*.self_attn.q_proj": 0.25}')
    code, shown, _ = cli("--recipe", recipe)
    assert code == 0 and "0..2 weight (mlp.up_proj) 1,536 768" in words(shown)
    assert "q_proj" in shown and "k_proj" not in shown
    _, shown, _ = cli("--recipe", recipe, "--sparsity", 0.25)
    assert "0..2 weight (mlp.up_proj) 1,536 1,152" in words(shown) and "k_proj" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "sparsity is required: "),
        ("--pattern unstructured", "sparsity is required: "),
        ("--pattern 2:7 --scorer magnitude", "has 32 inputs, which do not fall into groups of 7."),
        ("--pattern 2:4 --scorer ntk", "cannot choose for '2:4'; scorers that can: "),
        ("--pattern 2:4 --allocation row", "allocation='row' has no meaning with pattern '2:4'"),
        ("--pattern unstructured --sparsity 0.5 --allocation uniform", "possible: 'auto', 'row', 'matrix', 'global'."),
        ("--pattern unstructured --sparsity 0.5 --scorer wanda --allocation global", "is not possible with wanda"),
        ("--pattern unstructured --sparsity 0.01 --scorer wanda", "a sparsity of 0.01 removes none of "),
        ("--pattern unstructured --sparsity 0.5 --units mlp_channel", "single weights go, not units"),
        ("--sparsity 0.01 --scorer magnitude --allocation uniform", "kv_group: 3 groups of 4 units, "),
        ("--sparsity 0.2 --exclude no_such_layer", "Unknown module pattern 'no_such_layer'"),
        ("--sparsity 0.2 --calibration-source no.txt", "Calibration source 'no.txt' does not exist."),
        ("--sparsity 0.2 --calibration-seq-len 65", "max_position_embeddings 64, got 65."),
        ("--sparsity 0.2 --tensor-parallel 0", "tensor_parallel must be an integer >= 1, got 0."),
        ("--sparsity 0.2 --layout stock", "layout='stock' is not possible: layers will differ in their "),
        ("--sparsity 0.2 --scorer magnitude --json no/such/folder.json", "cannot be written: No such file"),
        ("--sparsity 0.2 --model no-such/model", "no-such/model cannot be loaded (no folder of that name is here): "),
        ("--sparsity 0.2 --output x", "unrecognized arguments: --output x."),
    ],
)
def test_refusals_are_one_line(arguments, message, cli):
    code, shown, complaints = cli(*arguments.split())
    assert (code, shown) == (2, "")
    assert complaints.startswith(ERROR) and message in complaints and complaints.count("\n") == 1


def test_takes_a_layout_that_is_possible(cli):
    given = "--sparsity 0.5 --scorer magnitude --allocation uniform --layout"
    assert cli(*given.split(), "stock")[0] == 0


def test_from_a_shell(dense):
    done = run(CLI, "prune", "plan", "--model", dense, "--sparsity", 0.5, "--scorer", "magnitude")
    assert done.returncode == 0 and done.stderr == ""
    assert "layout: " in done.stdout
