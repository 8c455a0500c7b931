"""Flags that several commands share."""

import pytest

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
