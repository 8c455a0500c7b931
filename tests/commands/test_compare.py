"""`optimum-cli prune compare`: mistakes in one line, and real comparisons from the shell."""

import json
from pathlib import Path

import pytest

from optimum_prune import registry
from optimum_prune.comparing import running
from optimum_prune.plots import style
from tests.models import llama
from tests.processes import answer, complaint
from tests.words import tokenizer

ERROR = "optimum-cli prune compare: error: "
TEXTS = ("--calibration-source", "text.txt", "--calibration-seq-len", 16, "--calibration-num-samples", 8)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder.parent / "text.txt").write_text(" ".join(f"w{3 + i * 7 % 90}" for i in range(400)))
    (folder.parent / "other.txt").write_text(" ".join(f"w{3 + i * 11 % 90}" for i in range(200)))
    return folder


@pytest.fixture
def cli(dense, monkeypatch, call_cli, tmp_path):
    """Return a function that runs `optimum-cli prune compare` in this process -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(dense.parent)
    common = ("compare", "--model", "dense", "--evaluate", "other.txt", "--output", tmp_path / "out")
    return lambda *arguments: call_cli(*common, *arguments)


@pytest.fixture
def refused(cli, loads_nothing, tmp_path):
    """Return a function that runs what must be refused before the model is loaded -> the one line of stderr."""

    def call(*arguments: object) -> str:
        line = complaint(cli(*arguments), ERROR)
        assert not (tmp_path / "out").exists()
        return line

    return call


def written(folder: Path) -> dict:
    return json.loads((folder / "comparison.json").read_text())


def test_scorers_at_sparsities(cli, dense, tmp_path):
    before = (dense / "model.safetensors").read_bytes()
    given = ("--scorers", "ntk", "wanda", "random", "--sparsities", 0.3, 0.5, "--units", "mlp_channel", *TEXTS)
    code, shown, _ = cli(*given)
    assert code == 0
    lines = shown.splitlines()
    assert lines[0].split()[:4] == ["setting", "asked", "achieved", "perplexity"] and lines[1].startswith("dense ")
    assert lines[-1] == f"Saved to {tmp_path / 'out'}" and "correlation of the scores" in lines
    data = written(tmp_path / "out")
    assert {(row["setting"], row["asked"]) for row in data["rows"]} == {
        (name, sparsity) for name in ("ntk", "wanda", "random") for sparsity in (0.3, 0.5)
    }
    assert all(config["units"] == ["mlp_channel"] for config in data["settings"].values())
    assert data["calibration"]["seq_len"] == 16 and data["calibration"]["samples"] == 8
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".md", ".png"]
    assert (dense / "model.safetensors").read_bytes() == before


def test_pattern_without_a_sparsity(cli, tmp_path):
    assert cli("--scorers", "wanda", "magnitude", "--pattern", "2:4", *TEXTS)[0] == 0
    rows = written(tmp_path / "out")["rows"]
    assert [(row["asked"], row["achieved"]) for row in rows] == [(0.5, 0.5)] * 2


def test_settings_from_a_file(cli, tmp_path):
    (tmp_path / "settings.yaml").write_text(
        "base: {scorer: ntk, sparsity: 0.3, seed: 1}\n"
        "settings:\n  plain:\n  loss: {scorer_options: {objective: loss}, seed: 2}\n"
    )
    assert cli("--settings", tmp_path / "settings.yaml", "--seed", 5, "--compensation", "none", *TEXTS)[0] == 0
    data = written(tmp_path / "out")
    assert {name: (c["seed"], c["sparsity"], c["compensation"]) for name, c in data["settings"].items()} == {
        "plain": (5, 0.3, "none"),
        "loss": (2, 0.3, "none"),
    }
    one, other = data["rows"]
    assert one["perplexity"] != other["perplexity"]


def test_columns_of_calibration_hold_for_evaluation(cli, dense, tmp_path):
    rows = [{"words": " ".join(f"w{3 + (i * 7 + j) % 90}" for j in range(40)), "text": "w3"} for i in range(9)]
    (dense.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ("--evaluate", "rows.jsonl", "--calibration-source", "rows.jsonl", "--calibration-text-column", "words")
    assert cli("--scorers", "wanda", "--sparsity", 0.5, *given)[0] == 0
    assert written(tmp_path / "out")["dense"]["tokens"] > 200


def test_columns_of_calibration_are_none_of_a_text(cli, call_cli, dense, tmp_path):
    folder = dense.parent / "rows"
    folder.mkdir()
    rows = [{"words": " ".join(f"w{3 + (i * 7 + j) % 90}" for j in range(40)), "title": "w3"} for i in range(9)]
    for split, chosen in (("train", rows), ("test", rows[:1])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, chosen)))
    given = ("--calibration-source", folder, "--calibration-text-column", "words")
    given = ("--scorers", "random", "--sparsity", 0.5, *given)
    assert cli(*given)[0] == 0, "--evaluate is a text file"
    given = ("compare", "--model", "dense", *given, "--evaluate", folder, "--evaluate-split", "test")
    code, _, errors = call_cli(*given, "--output", tmp_path / "test")
    assert code == 0, errors
    assert written(tmp_path / "test")["dense"]["tokens"] == 39


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "one of the arguments --scorers --settings is required"),
        ("--scorers ntk --settings s.yaml", "argument --settings: not allowed with argument --scorers"),
        ("--scorers ntk", "Setting 'ntk': sparsity is required: the fraction of the targeted weights to remove"),
        ("--scorers ntk nkt --sparsity 0.2", "Setting 'nkt': Unknown scorer 'nkt'; supported: "),
        ("--scorers ntk ntk --sparsity 0.2", "--scorers names 'ntk' twice."),
        ("--scorers ntk --scorer wanda --sparsity 0.2", "Give --scorer with --settings, or --scorers; not both."),
        ("--scorers ntk --sparsity 0.2 --sparsities 0.3", "Give --sparsity or --sparsities, not both."),
        ("--scorers ntk --sparsities 0.2 1.5", "Setting 'ntk': sparsity must be in [0, 1), got 1.5."),
        ("--scorers ntk --sparsities much", "argument --sparsities: invalid float value: 'much'"),
        ("--scorers ntk admm --sparsity 0.2", "Setting 'admm': scorer 'admm' ranks for pattern"),
        ("--scorers ntk --sparsity 0.2 --exclude no", "Setting 'ntk': "),
        ("--scorers ntk --sparsity 0.2 --calibration-source no.txt", "Calibration source 'no.txt' does not exist."),
        ("--scorers ntk --sparsity 0.2 --evaluate no.txt", "Calibration source 'no.txt' does not exist."),
        ("--scorers ntk --sparsity 0.2 --evaluate-seq-len 1", "seq_len=1: no sample has a second token"),
        ("--scorers ntk taylor --sparsity 0.2 --calibration-seq-len 1", "seq_len=1: no sample has a second token"),
        ("--scorers ntk --sparsity 0.2 --evaluate self", "text that the model did not write itself"),
        ("--scorers ntk --sparsity 0.2 --model no/such", "no/such cannot be loaded"),
        ("--settings no.yaml", "Recipe 'no.yaml' cannot be read: No such file or directory."),
        ("--scorers ntk --sparsty 0.2", "unrecognized arguments: --sparsty 0.2. Did you mean --sparsity?"),
        ("--scorers ntk --sparsit 0.2", "unrecognized arguments: --sparsit 0.2. Did you mean --sparsit"),
    ],
)
def test_mistakes(arguments, message, refused):
    assert message in refused(*arguments.split())


def test_plots_need_their_package(refused, monkeypatch):
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    message = "Plots need the package 'matplotlib': pip install 'optimum-prune[plots]'."
    assert refused("--scorers", "random", "--sparsity", 0.5) == message


def test_output_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "below"
    message = f"directory {str(output)!r} cannot be made: Not a directory."
    assert refused("--scorers", "random", "--sparsity", 0.5, "--output", output) == message


def test_interrupted(cli, monkeypatch, tmp_path):
    calls = []

    def evaluate_model(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    original = running.evaluate_model
    monkeypatch.setattr(running, "evaluate_model", evaluate_model)
    code, stdout, stderr = cli("--scorers", "random", "magnitude", "--sparsity", 0.5)
    assert (code, stdout) == (130, "")
    assert stderr.endswith("\nInterrupted.\n") and "Traceback" not in stderr
    assert [row["setting"] for row in written(tmp_path / "out")["rows"]] == ["random"]


def test_help(call_cli):
    code, shown, _ = call_cli("compare", "--help")
    assert code == 0 and f"Scorers: {', '.join(registry.available('scorers'))}." in " ".join(shown.split())
    for flag in ("--settings FILE", "--scorers NAME", "--sparsities X", "--scorer-options", "--calibration-selection"):
        assert flag in shown


def test_help_imports_nothing_heavy():
    heavy = ["torch", "transformers", "matplotlib", "datasets", "evaluate"]
    script = f"""
import atexit, json, sys
@atexit.register
def _():
    print(json.dumps([name for name in {heavy} if name in sys.modules]))
from optimum.commands.optimum_cli import main
sys.argv[0] = "optimum-cli"
main()
"""
    assert answer(script, "prune", "compare", "--help") == []
