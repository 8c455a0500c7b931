"""`optimum-cli prune run`: one line for a user's mistake, and one real run from a shell to a reload."""

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path
from shutil import copytree

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import optimum_prune
from optimum_prune import measurements, registry
from optimum_prune import pruner as pruner_module
from optimum_prune.config import CalibrationConfig, InductionConfig, PruningConfig
from optimum_prune.integrations.layouts import LAYOUTS
from optimum_prune.pruner import Pruner
from tests.models import llama, mistral, t5, tokens
from tests.processes import complaint, run
from tests.words import tokenizer

CLI = "from optimum.commands.optimum_cli import main; main()"
ERROR = "optimum-cli prune run: error: "


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder.parent / "text.txt").write_text(" ".join(f"w{3 + i * 7 % 90}" for i in range(400)))
    return folder


@pytest.fixture
def cli(dense, monkeypatch, call_cli):
    """Return a function that runs `optimum-cli prune run` in this process -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(dense.parent)
    return lambda *arguments: call_cli("run", *arguments)


@pytest.fixture
def refused(cli, loads_nothing, tmp_path):
    """Return a function that runs what must be refused before any model is read -> the one line of stderr."""

    def call(*arguments: object, model: object = "dense", output: object = tmp_path / "output") -> str:
        line = complaint(cli("--model", model, "--output", output, *arguments), ERROR)
        assert not (tmp_path / "output").exists()
        return line

    return call


# Help


def flags() -> dict[str, str]:
    """Return the flag of every field, and its help."""
    parts = {"calibration": CalibrationConfig, "induction": InductionConfig}
    found = {f"--{option.name}": option for option in fields(PruningConfig) if option.name not in parts}
    found |= {f"--{name}-{option.name}": option for name, part in parts.items() for option in fields(part)}
    return {flag.replace("_", "-"): option.metadata["help"] for flag, option in found.items()}


def test_help_has_every_field(cli):
    code, shown, _ = cli("--help")
    assert code == 0
    words = " ".join(shown.split())
    for flag, text in flags().items():  # lines may be broken at hyphens, too
        assert f"{flag} " in words and "".join(text.split()) in "".join(shown.split())
    assert "--layout {" + ",".join(LAYOUTS) + "}" in shown
    architectures, scorers = (", ".join(registry.available(kind)) for kind in ("adapters", "scorers"))
    assert f"Architectures: {architectures}. Scorers: {scorers}." in words


def test_command_is_installed_as_it_is_written():
    """Editable installs copy this one file: after a change, `pip install -e .` is due."""
    installed = importlib.util.find_spec("optimum.commands.register.register_prune")
    assert installed is not None and installed.origin is not None
    written = Path(optimum_prune.__file__).parent / "commands" / "register_prune.py"
    assert Path(installed.origin).read_text() == written.read_text()


# Mistakes that need no model to be seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "sparsity is required: the fraction of the targeted weights to remove, in [0, 1)."),
        ("--sparsity 1.5", "sparsity must be in [0, 1), got 1.5."),
        ("--sparsity 1", "sparsity must be in [0, 1), got 1.0."),
        ("--sparsity -0.1", "sparsity must be in [0, 1), got -0.1."),
        ("--sparsity nan", "sparsity must be in [0, 1), got nan."),
        ("--sparsity much", "argument --sparsity: invalid float value: 'much'"),
        ("--sparsity 0.2 --seed x", "argument --seed: invalid int value: 'x'"),
        ("--sparsity 0.2 --gamma x", "gamma must be 'auto' or a finite number > 0, got 'x'."),
        (
            "--sparsity 0.2 --pattern 0:4",
            "pattern '0:4' is no n:m: n of every m consecutive weights are removed, ",
        ),
        ("--sparsity 0.9 --pattern 2:4", "sparsity=0.9 conflicts with pattern '2:4'"),
        ("--sparsity {'*.mlp':0.5}", "argument --sparsity: invalid float value: "),
        ("--scorer admm --sparsity 0.2", "scorer 'admm' ranks for pattern 'unstructured', 'n:m' and cannot choose "),
        ("--pattern 2:4 --scorer wanda --sparsity 0.6", "leave sparsity out."),
        ("--pattern 2:5 --scorer wanda", "has 32 inputs, which do not fall into groups of 5."),
        ("--sparsity 0.2 --scorer magnitud", "Unknown scorer 'magnitud'; supported: "),
        ("--sparsity 0.2 --scorer magnitud", "Did you mean 'magnitude'?"),
        ("--sparsity 0.2 --units mlp", "units=['mlp'] do not go with pattern 'structured', whose units are "),
        ("--sparsity 0.2 --calibration-num-samples 0", "num_samples must be an integer >= 1, got 0."),
        ("--sparsty 0.2", "unrecognized arguments: --sparsty 0.2. Did you mean --sparsity?"),
        ("--sparsty=0.2", "unrecognized arguments: --sparsty=0.2. Did you mean --sparsity?"),
        ("--spars 0.2", "unrecognized arguments: --spars 0.2."),  # no abbreviations
        ("--sparsity 0.2 --layout pad", "argument --layout: invalid choice: 'pad'"),
        ("--sparsity 0.2 --layout padded --storage packed", "layout='padded' does not go with storage='packed': "),
        ("--sparsity 0.2 --evaluate texts.txt --evaluate-seq-len 1", "seq_len=1: no sample has a second token"),
        ("--sparsity 0.2 --calibration-seq-len 1", "seq_len=1: no sample has a second token"),
        ("--sparsity 0.2 --evaluate no.txt", "Calibration source 'no.txt' does not exist."),
        (
            "--sparsity 0.2 --evaluate-num-samples 3 --evaluate-seq-len 9",
            "--evaluate-num-samples, --evaluate-seq-len has no meaning without --evaluate SOURCE.",
        ),
        ("--sparsity 0.2 --no-latency", "--no-latency has no meaning without --evaluate SOURCE."),
    ],
)
def test_mistakes(arguments, message, refused):
    assert message in refused(*arguments.split())


def test_missing_flags(cli):
    code, _, stderr = cli("--sparsity", 0.2)
    assert (code, stderr) == (2, f"{ERROR}the following arguments are required: --model, --output\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "Recipe '{}' cannot be read: No such file or directory."),
        ("recipe.toml", "", "A recipe must end in .yaml, .yml or .json, got 'recipe.toml'."),
        ("corrupt.yaml", "sparsity: [\n\n", "Recipe '{}' is not valid yaml: while parsing"),
        ("corrupt.json", '{"sparsity":\n', "Recipe '{}' is not valid json: Expecting value"),
        ("list.yaml", "- sparsity", "Recipe '{}' must hold a mapping of fields, got ['sparsity']."),
        ("unknown.yaml", "sparsty: 0.2", "Unknown PruningConfig field 'sparsty'; "),
        ("unknown.yaml", "calibration: {samples: 3}", "Unknown CalibrationConfig field 'samples'; "),
        ("value.json", '{"sparsity": 2}', "sparsity must be in [0, 1), got 2."),
        (
            "kind.json",
            '{"sparsity": 0.2, "calibration": [1]}',
            "CalibrationConfig must be a mapping of fields",
        ),
    ],
)
def test_bad_recipes(name, content, message, refused, tmp_path):
    recipe = tmp_path / name
    if content is not None:
        recipe.write_text(content)
    assert message.format(recipe) in refused("--recipe", recipe)


def test_output_that_must_not_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").touch()
    for output, message in {
        "dense": "is the model's own folder; choose another.",
        "./dense/": "is the model's own folder; choose another.",
        ".": "holds the working directory; choose another.",
        "..": "holds the working directory; choose another.",
        tmp_path / "file": "is a file; choose a folder.",
        tmp_path / "full": "is not empty and holds no checkpoint to replace; choose another.",
        tmp_path / "file" / "below": "cannot be written: Not a directory.",
        "/proc/nowhere/model": "cannot be written: ",
    }.items():
        assert message in refused("--sparsity", 0.2, output=output)
    assert (tmp_path / "full" / "diary.txt").exists()


def test_trying_the_output_leaves_nothing(refused, tmp_path):
    refused("--sparsity", 0.2, "--evaluate", "no.txt", output=tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", ["", "--allocation gamma", "--scorer magnitude --allocation global"])
def test_stock_layout_of_uneven_layers_is_refused_early(flags, refused):
    message = refused("--sparsity", 0.2, "--layout", "stock", *flags.split())
    assert re.match(r"layout='stock' is not (certain|possible): (one ranking decides|layers will differ)", message)
    assert "allocation='uniform'; the class takes kv_groups [1, 2, 4] of model.layers" in message


def test_stock_layout_that_the_class_refuses_is_refused_early(refused):
    given = "--sparsity 0.3 --scorer magnitude --allocation uniform --layout"
    message = refused(*given.split(), "stock")
    assert "The hidden size (32) is not a multiple of the number of attention heads (6)." in message
    assert "class_switch=True (it is saved as MistralForCausalLM" in message


@pytest.mark.parametrize("build", [mistral, t5])
@pytest.mark.parametrize("layout", ["stock", "padded"])
def test_layouts_without_room_for_new_biases_are_refused_early(build, layout, refused, tmp_path):
    build().save_pretrained(tmp_path / "model")
    given = f"--pattern 2:4 --scorer magnitude --calibration-source text.txt --induction-allow-bias --layout {layout}"
    message = refused(*given.split(), model=tmp_path / "model")
    assert message.startswith(f"layout='{layout}' ") and "biases are created where they help" in message
    assert message.endswith("(allocation='uniform')." if layout == "stock" else "Use layout='compact'.")


def test_evaluation_needs_its_package(refused, monkeypatch):
    monkeypatch.setattr(measurements, "find_spec", lambda name: None)
    message = "Evaluation needs the package 'evaluate': pip install 'optimum-prune[eval]'."
    assert refused("--sparsity", 0.2, "--evaluate", "text.txt") == message


def test_evaluation_data_is_opened_for_the_kind_of_model_before_pruning(refused, tmp_path):
    t5().save_pretrained(tmp_path / "t5")
    chat = {"messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    line = refused(
        "--sparsity", 0.2, "--scorer", "magnitude", "--evaluate", tmp_path / "chats.jsonl", model=tmp_path / "t5"
    )
    assert "An encoder-decoder reads questions with answers, not chats as in 'messages'; convert them:" in line


def test_evaluation_on_the_models_own_text_is_refused(refused):
    assert "text that the model did not write itself" in refused("--sparsity", 0.2, "--evaluate", "self")


# Mistakes that the model shows


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("/no/such/folder", "", "/no/such/folder does not exist."),
        ("no-such/model", "", "no-such/model cannot be loaded (no folder of that name is here): "),
        ("gpt2", "", "Unknown architecture 'gpt2'; supported: "),
        ("dense", "--calibration-source no.txt", "Calibration source 'no.txt' does not exist."),
        ("dense", "--exclude no_such_layer", "no_such_layer"),
        (
            "dense",
            "--calibration-seq-len 65",
            "seq_len must be at most the model's max_position_embeddings 64",
        ),
    ],
)
def test_mistakes_about_the_model(model, arguments, message, cli, dense, tmp_path):
    GPT2Config().save_pretrained(dense.parent / "gpt2")
    output = tmp_path / "output"
    code, stdout, stderr = cli("--model", model, "--output", output, "--sparsity", 0.2, *arguments.split())
    assert (code, stdout) == (2, "")
    *before, last = stderr.splitlines()
    assert last.startswith(ERROR) and message in last
    assert all("Loading weights" in line for line in before if line)  # a bar of transformers, nothing else
    assert list(tmp_path.iterdir()) == []


def test_interrupted(cli, monkeypatch, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Pruner, "prune", interrupted)
    code, stdout, stderr = cli("--model", "dense", "--output", tmp_path / "output", "--sparsity", 0.2)
    assert (code, stdout) == (130, "")
    assert stderr.endswith("\nInterrupted.\n") and "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


# Recipes and flags


@pytest.fixture
def merged(cli, monkeypatch, tmp_path):
    """Return a function that runs a recipe with flags -> the config that prune() is called with."""

    def call(recipe: dict, *arguments: object) -> PruningConfig:
        seen = []

        def stop(pruner, config):
            seen.append(config)
            raise KeyboardInterrupt

        monkeypatch.setattr(Pruner, "prune", stop)
        file = tmp_path / "recipe.json"
        file.write_text(json.dumps(recipe))
        cli("--model", "dense", "--output", tmp_path / "output", "--recipe", file, *arguments)
        return seen[0]

    return call


def test_flags_override_the_recipe(merged):
    recipe = PruningConfig(
        sparsity=0.2,
        scorer="magnitude",
        seed=5,
        units=["kv_group"],
        calibration=CalibrationConfig("text.txt", num_samples=3, seed=7),
    )
    assert merged(recipe.to_dict()) == recipe
    assert merged(
        recipe.to_dict(),
        *(
            "--sparsity",
            0.5,
            "--scorer",
            "ntk",
            "--gamma",
            2,
            "--seed",
            0,
            "--units",
            "kv_group",
            "mlp_channel",
        ),
        *("--exclude", "*.0.*", "--calibration-seed", 0, "--calibration-seq-len", 16),
    ) == PruningConfig(
        sparsity=0.5,
        scorer="ntk",
        gamma=2.0,
        seed=0,
        units=["kv_group", "mlp_channel"],
        exclude=["*.0.*"],
        calibration=CalibrationConfig("text.txt", num_samples=3, seed=0, seq_len=16),
    )


def test_recipe_may_leave_what_a_flag_gives(merged):
    assert merged({"scorer": "random"}, "--sparsity", 0.5) == PruningConfig(scorer="random", sparsity=0.5)


# Zeros


def zeros(folder: Path) -> dict[str, torch.Tensor]:
    """Return where the linears of a saved model's blocks are zero, by name; plain transformers reads them."""
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return {name: weight == 0 for name, weight in state.items() if name.endswith("_proj.weight")}


CALIBRATED = ("--calibration-source", "text.txt", "--calibration-seq-len", 16)


@pytest.mark.parametrize("scorer", ["wanda", "sparsegpt", "admm", "magnitude"])
def test_two_of_four(scorer, cli, dense, tmp_path):
    given = ("--pattern", "2:4", "--scorer", scorer, *CALIBRATED)
    code, shown, _ = cli("--model", dense, "--output", tmp_path / "out", *given)
    assert code == 0 and shown.startswith(f"2:4, {scorer}, ") and "asked 50.0%, achieved 50.0%" in shown
    for name, zero in zeros(tmp_path / "out").items():
        assert (zero.unflatten(1, (-1, 4)).sum(dim=-1) == 2).all(), name
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"-{scorer}-2:4\n" in card and "size ratio" in card


@pytest.mark.parametrize(("allocation", "scorer"), [("row", "wanda"), ("matrix", "wanda"), ("global", "magnitude")])
def test_unstructured(allocation, scorer, cli, dense, tmp_path):
    given = ("--pattern", "unstructured", "--sparsity", 0.5, "--scorer", scorer, "--allocation", allocation)
    code, shown, _ = cli("--model", dense, "--output", tmp_path / "out", *given, *CALIBRATED)
    assert code == 0 and shown.startswith(f"unstructured, {scorer}, {allocation}: asked 50.0%, achieved 50.0%")
    found = zeros(tmp_path / "out").values()
    equal = {
        "row": all((zero.sum(dim=1) == zero.shape[1] // 2).all() for zero in found),
        "matrix": all(zero.sum() == zero.numel() // 2 for zero in found),
        "global": sum(int(zero.sum()) for zero in found) == sum(zero.numel() for zero in found) // 2,
    }
    order = list(equal)
    assert list(equal.values()) == [order.index(scope) >= order.index(allocation) for scope in order]


def test_fractions_of_modules(cli, dense, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('pattern: unstructured\nscorer: magnitude\nsparsity: {"*.mlp": 0.5, "*.1.self_attn": 0.25}')
    assert cli("--model", dense, "--output", tmp_path / "out", "--recipe", recipe)[0] == 0
    fractions = {name: zero.float().mean().item() for name, zero in zeros(tmp_path / "out").items()}
    for name, fraction in fractions.items():
        assert fraction == (0.5 if ".mlp." in name else 0.25 if ".1." in name else 0)


# The whole way


EVALUATED = ("--evaluate", "text.txt", "--evaluate-num-samples", 4, "--evaluate-seq-len", 16)


def test_the_dense_model_is_measured_while_it_is_the_only_one(cli, monkeypatch, tmp_path):
    load, loaded, steps = pruner_module.load_model, [], []
    monkeypatch.setattr(pruner_module, "load_model", lambda *a, **k: loaded.append(a) or load(*a, **k))
    for name in ("evaluate", "prune"):
        method = getattr(Pruner, name)

        def logged(self, *args, name=name, method=method, **options):
            steps.append((name, options.get("latency")))
            return method(self, *args, **options)

        monkeypatch.setattr(Pruner, name, logged)
    how = ("--sparsity", 0.5, "--scorer", "magnitude", *EVALUATED)
    code, stdout, stderr = cli("--model", "dense", "--output", tmp_path / "out", *how)
    assert code == 0, stderr
    assert steps == [("evaluate", True), ("prune", None), ("evaluate", True)]
    assert len(loaded) == 1
    assert re.search(r"^KL to the dense model +\d", stdout, re.MULTILINE)
    times = [
        found["timed_at"]
        for found in json.loads((tmp_path / "out" / "pruning_report.json").read_text())["evaluations"].values()
    ]
    assert len(times) == 2 and all(times)
    # what is pruned already is not the dense model
    steps.clear()
    again = ("--pattern", "2:4", "--scorer", "magnitude", *EVALUATED, "--no-latency")
    code, stdout, stderr = cli("--model", tmp_path / "out", "--output", tmp_path / "again", *again)
    assert code == 0, stderr
    assert steps == [("prune", None), ("evaluate", False)]


def test_no_latency(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("optimum_prune.stages.measure_latency", lambda *_, **__: pytest.fail("it was timed"))
    how = ("--sparsity", 0.5, "--scorer", "magnitude", *EVALUATED, "--no-latency")
    code, stdout, stderr = cli("--model", "dense", "--output", tmp_path / "out", *how)
    assert code == 0, stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Latency was not measured." in card
    evaluations = json.loads((tmp_path / "out" / "pruning_report.json").read_text())["evaluations"]
    assert {found[name] for found in evaluations.values() for name in ("prefill_ms", "timed_at")} == {None}
    from optimum_prune.integrations.page import page
    from optimum_prune.integrations.reading import open_report

    for shown in (stdout, card, page(*open_report(tmp_path / "out"), title="it")):
        assert "KL to the dense model" in shown
        assert not re.search("prefill|decoding|Times are", shown)


@pytest.fixture(scope="module")
def finished(dense):
    """Run the command from a shell, with a recipe, an evaluation and an older checkpoint to replace."""
    folder = dense.parent
    copytree(dense, folder / "pruned")
    (folder / "recipe.yaml").write_text(
        "version: 2\nhyperdrive: on\nsparsity: 0.9\nround_to: 1\ncalibration: {num_samples: 4, seq_len: 16}"
    )
    done = run(
        CLI,
        *(
            "prune",
            "run",
            "--model",
            dense,
            "--output",
            folder / "pruned",
            "--recipe",
            folder / "recipe.yaml",
        ),
        *("--sparsity", 0.3, "--calibration-source", folder / "text.txt", "--evaluate", folder / "text.txt"),
        *("--evaluate-num-samples", 30, "--evaluate-seq-len", 16),
        *("--dtype", "bfloat16"),
    )
    assert done.returncode == 0, done.stderr
    return done, folder / "pruned"


def test_the_whole_way(finished):
    _, folder = finished
    model, dense = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, folder.with_name("dense")))
    assert model.num_parameters() < 0.9 * dense.num_parameters()
    assert model.dtype == torch.bfloat16
    assert model(tokens()).logits.isfinite().all()
    assert AutoTokenizer.from_pretrained(folder)("w3 w4")["input_ids"] == [3, 4]
    report = json.loads((folder / "pruning_report.json").read_text())
    assert (report["config"]["sparsity"], report["config"]["round_to"]) == (0.3, 1)
    assert report["calibration"]["samples"] == 4
    assert "perplexity" in (folder / "README.md").read_text()


def test_what_is_printed(finished):
    done, folder = finished
    for line in (
        r"^structured, taylor, .*: asked 30.0%, achieved \d+\.\d% of the targeted weights$",
        r"^ +dense +pruned +ratio$",
        r"^perplexity +\d.*x$",
        r"^KL to the dense model +\d",
        r"^decoding, per token .*x$",
        r"^measured on .*, 25 samples, 400 tokens",
        rf"^Saved to {re.escape(str(folder))} \((stock|compact)\)$",
    ):
        assert re.search(line, done.stdout, re.MULTILINE), line


def test_standard_error_is_calm(finished):
    """Bars of what takes long, what the package has to say in plain lines, and nothing of other libraries."""
    done, _ = finished
    lines = {line.strip() for line in re.split(r"[\r\n]", done.stderr)} - {""}
    bars = {bar[1] for line in lines if (bar := re.match(r"([\w ]+): +\d+%\|", line))}
    assert bars >= {"Forward", "Backward", "Evaluation", "Latency"}
    said = sorted(line for line in lines if line.partition(":")[0] not in bars)
    assert len(said) == 3
    assert any("calibrated on" in line for line in said)  # calibration and evaluation read the same file
    said = [line for line in said if "calibrated on" not in line]
    assert re.fullmatch(r"Asked for 30 samples; .*text.txt gives only \d+ samples, .*", said[0])
    assert re.fullmatch(r"This PruningConfig was written by a newer .* are ignored: 'hyperdrive'\.", said[1])
