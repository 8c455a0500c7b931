"""Flags that several commands share."""

import pytest
from huggingface_hub import ModelCard

from optimum_prune import Pruner, PruningConfig
from tests.own_code import rewrite, with_own_model, with_own_tokenizer
from tests.processes import complaint

MAGNITUDE = PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1)


@pytest.mark.parametrize(
    "command",
    [
        "run --model {} --output {}/out --scorer magnitude --sparsity 0.3",
        "compare --model {} --output {}/out --scorers magnitude random --sparsity 0.3 --evaluate {}/texts.txt",
        "recover --model {} --output {}/out --dataset {}/texts.txt",
        "convert {} --output {}/out",
        "evaluate {0} --dataset {1}/texts.txt --dense {0} --no-latency",
    ],
)
def test_trust_remote_code(command, tmp_path, call_cli, monkeypatch):
    """Refused with the flag's name, never asked for, and enough where it is given."""
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail(f"asked on stdin: {prompt}"))
    folder = with_own_tokenizer(tmp_path / "own")
    (tmp_path / "texts.txt").write_text("w3 w4 w5 w6 w7 w8\n" * 100)
    if command.startswith(("recover", "convert")):
        pruner = Pruner.from_pretrained(folder, trust_remote_code=True)
        pruner.prune(MAGNITUDE)
        folder = tmp_path / "pruned"
        pruner.save_pretrained(folder)
    words = command.format(folder, tmp_path, tmp_path).split()
    if words[0] == "recover":
        words += ["--max-steps", "1", "--loss", "lm", "--seq-len", "16", "--trainer-options", "report_to=none"]
    if words[0] == "evaluate":
        words += ["--num-samples", "2", "--seq-len", "16"]
    if words[0] == "compare":
        words += ["--evaluate-num-samples", "2", "--evaluate-seq-len", "16"]
    code, _, complaints = call_cli(*words)
    assert code == 2 and "--trust-remote-code" in complaints.splitlines()[-1], complaints
    code, _, complaints = call_cli(*words, "--trust-remote-code")
    assert code == 0, complaints


def test_plan_of_a_type_that_is_code_of_its_own(tmp_path, call_cli):
    folder = with_own_model(tmp_path / "own")
    rewrite(folder / "config.json", model_type="own")
    words = ("plan", "--model", folder, "--sparsity", 0.3)
    error = "optimum-cli prune plan: error: "
    assert "--trust-remote-code" in complaint(call_cli(*words), error)
    assert "'own'" in complaint(call_cli(*words, "--trust-remote-code"), error)  # a type that nobody can prune


@pytest.mark.parametrize(
    "command",
    [
        "run --model {dense} --output {it} --scorer magnitude --sparsity 0.3",
        "recover --model {dense} --output {it}",
        "convert {dense} --output {it}",
        "push {dense} me/it",
    ],
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--license", "MIT"], "Unknown license 'MIT'. Did you mean 'mit'?"),
        (["--base-model", "./dense"], "base_model must be the id of a model on the Hub"),
    ],
)
def test_card_flags_are_refused_early(command, flags, message, dense, tmp_path, call_cli, loads_nothing):
    words = command.format(dense=dense, it=tmp_path / "it").split()
    assert message in complaint(call_cli(*words, *flags), f"optimum-cli prune {words[0]}: error: ")
    assert not (tmp_path / "it").exists()


def test_card_flags(dense, tmp_path, call_cli):
    """Given to `run`, they hold for what is made of its output; given later, they change it."""
    run = ["run", "--model", dense, "--output", tmp_path / "it", "--scorer", "magnitude", "--sparsity", 0.3]
    assert call_cli(*run, "--base-model", "org/dense", "--license", "mit")[0] == 0
    assert call_cli("convert", tmp_path / "it", "--output", tmp_path / "other", "--layout", "padded")[0] == 0
    assert call_cli("convert", tmp_path / "it", "--output", tmp_path / "third", "--license", "apache-2.0")[0] == 0
    for folder, license in (("it", "mit"), ("other", "mit"), ("third", "apache-2.0")):
        data = ModelCard.load(tmp_path / folder / "README.md").data
        assert (data.get("base_model"), data.get("license")) == ("org/dense", license)
