"""`optimum-cli prune evaluate`: the table, the JSON, and one line for a user's mistake."""

import json
import math
import re
from dataclasses import asdict, fields

import pytest

from optimum_prune import Pruner, PruningConfig, checkpoint_evaluation
from optimum_prune.commands.evaluate import SCHEMA
from optimum_prune.measurements import Evaluation
from tests.models import llama
from tests.processes import complaint
from tests.words import tokenizer

ERROR = "optimum-cli prune evaluate: error: "
AMOUNT = ("--num-samples", 4, "--seq-len", 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    llama().save_pretrained(root / "dense")
    tokenizer().save_pretrained(root / "dense")
    (root / "text.txt").write_text(" ".join(f"w{3 + i * 7 % 90}" for i in range(400)))
    pruner = Pruner.from_pretrained(root / "dense")
    pruner.prune(PruningConfig(scorer="magnitude", sparsity=0.4, allocation="global", round_to=1))
    pruner.save_pretrained(root / "pruned")
    return root


@pytest.fixture
def cli(folder, monkeypatch, call_cli):
    monkeypatch.chdir(folder)
    return lambda *arguments: call_cli("evaluate", *arguments)


def test_table_and_json(cli, folder, tmp_path):
    out = tmp_path / "numbers.json"
    code, stdout, stderr = cli("pruned", "--dataset", "text.txt", "--dense", "dense", *AMOUNT, "--json", out)
    assert code == 0, stderr
    for line in (
        r"^ +dense +pruned +ratio$",
        r"^KL to the dense model +\d",
        r"^decoding, per token .*ms",
        r"^measured on",
    ):
        assert re.search(line, stdout, re.MULTILINE), line
    written = json.loads(out.read_text())
    assert written["version"] == 1 and list(written["evaluations"]) == ["dense", "pruned"]
    pruned = written["evaluations"]["pruned"]
    assert pruned.keys() == {"loss", *(field.name for field in fields(Evaluation))}
    assert math.exp(pruned["loss"]) == pytest.approx(pruned["perplexity"])
    assert f"{pruned['kl']:.4f}" in stdout
    assert pruned["data"]["samples"] == 4 and pruned["data"]["seq_len"] == 12
    assert {path.name for path in folder.iterdir()} == {"dense", "pruned", "text.txt"}


def test_help_names_every_value_of_the_json(cli):
    code, shown, _ = cli("--help")
    assert code == 0
    for name in ("loss", *(field.name for field in fields(Evaluation))):
        assert re.search(rf"\b{name}\b", SCHEMA), name
    assert "".join(SCHEMA.split()) in "".join(shown.split())


def test_json_on_stdout_is_nothing_else(cli):
    code, stdout, stderr = cli("dense", "--dataset", "text.txt", *AMOUNT, "--no-latency", "--json", "-")
    assert code == 0, stderr
    (found,) = json.loads(stdout)["evaluations"].values()
    assert found["perplexity"] > 1 and found["kl"] is None and found["prefill_ms"] is None


def test_a_dense_model_alone(cli):
    code, stdout, stderr = cli("dense", "--dataset", "text.txt", *AMOUNT, "--no-latency")
    assert code == 0, stderr
    assert re.match(r"perplexity +\d", stdout)
    assert "no KL" not in stderr and "prefill" not in stdout


def test_without_a_dense_model_the_flag_is_named(cli, caplog):
    code, stdout, stderr = cli("pruned", "--dataset", "text.txt", *AMOUNT, "--no-latency")
    assert code == 0, stderr
    assert "KL" not in stdout, stdout
    assert "--dense MODEL" in caplog.text


def test_what_is_not_finite_is_null(cli, monkeypatch):
    found = Evaluation(
        math.inf, math.nan, 3, 1, 10, 40, "cpu", 1, "float32", {"source": "x", "samples": 1, "tokens": 4}
    )
    monkeypatch.setattr(checkpoint_evaluation, "evaluate_checkpoint", lambda *_, **__: {"dense": found})
    code, stdout, stderr = cli("dense", "--dataset", "text.txt", "--json", "-")
    assert code == 0, stderr
    values = json.loads(stdout, parse_constant=pytest.fail)["evaluations"]["dense"]
    nulls = {"loss": None, "perplexity": None, "kl": None}
    assert values == asdict(found) | nulls


def test_where_it_is_loaded_to(cli, monkeypatch):
    seen = {}

    def evaluate(model, data, **options):
        seen.update(options, model=model, data=data)
        return {
            "dense": Evaluation(
                2.0, None, 3, 1, 10, 40, "cpu", 1, "float32", {"source": "x", "samples": 1, "tokens": 4}
            )
        }

    monkeypatch.setattr(checkpoint_evaluation, "evaluate_checkpoint", evaluate)
    loading = ("--device-map", "cpu", "--dtype", "bfloat16", "--trust-remote-code")
    code, _, stderr = cli("pruned", "--dataset", "text.txt", "--dense", "dense", "--batch-size", 2, *loading)
    assert code == 0, stderr
    assert (seen.pop("model"), seen.pop("data").batch_size) == ("pruned", 2)
    assert seen == {
        "dense": "dense",
        "latency": True,
        "device_map": "cpu",
        "dtype": "bfloat16",
        "trust_remote_code": True,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pruned", "the following arguments are required: --dataset"),
        ("--dataset text.txt", "the following arguments are required: MODEL"),
        ("pruned --dataset text.txt --seq-len 1", "seq_len=1: no sample has a second token"),
        ("pruned --dataset no.txt", "source 'no.txt' does not exist."),
        ("pruned --dataset self", "text that the model did not write itself"),
        ("pruned --dataset text.txt --num-samples 0", "num_samples must be an integer >= 1, got 0."),
        ("pruned --dataset text.txt --selection kl", "unrecognized arguments: --selection kl"),
        ("pruned --dataset text.txt --json no/such.json", "--json 'no/such.json' cannot be written: No such file"),
        ("pruned --dataset text.txt --json dense", "--json 'dense' is a folder; choose a file."),
        ("nothing --dataset text.txt", "nothing cannot be loaded (no folder of that name is here)"),
        ("pruned --dataset text.txt --dense nothing", "nothing cannot be loaded (no folder of that name is here)"),
        ("pruned --dataset text.txt --dense pruned", "pruned is pruned itself"),
    ],
)
def test_mistakes(arguments, message, cli, loads_nothing, monkeypatch):
    monkeypatch.setattr(checkpoint_evaluation, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    assert message in complaint(cli(*arguments.split()), ERROR)
