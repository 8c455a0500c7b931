"""`optimum-cli prune recover`, and `run --recover`: the same fields, mistakes in one line, and what is saved."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from optimum_prune.config import PruningConfig
from optimum_prune.pruner import Pruner
from optimum_prune.recovery.config import RecoveryConfig
from optimum_prune.recovery.report import RecoveryReport
from optimum_prune.recovery.training import RecoveryTrainer
from optimum_prune.report import PruningReport
from tests.models import llama
from tests.processes import complaint, run_two
from tests.words import tokenizer

RECOVER, RUN = "optimum-cli prune recover: error: ", "optimum-cli prune run: error: "
SMALL = {"max-steps": 2, "batch-size": 4, "seq-len": 12, "num-samples": 20, "learning-rate": 0.01, "evaluations": 1}


def flags(prefix: str = "", **changes: object) -> list[object]:
    return [part for name, value in (SMALL | changes).items() for part in (f"--{prefix}{name}", value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Hold a dense model, a pruned one, and text of few words."""
    folder = tmp_path_factory.mktemp("models")
    llama().save_pretrained(folder / "dense")
    tokenizer().save_pretrained(folder / "dense")
    (folder / "text.txt").write_text("\n".join(" ".join(f"w{5 + i * j % 8}" for j in range(40)) for i in range(60)))
    pruner = Pruner.from_pretrained(folder / "dense")
    pruner.prune(PruningConfig(pattern="unstructured", scorer="magnitude", sparsity=0.5))
    pruner.save_pretrained(folder / "pruned")
    pruner = Pruner.from_pretrained(folder / "dense")
    pruner.prune(PruningConfig(scorer="magnitude", sparsity=0.3, allocation="global", round_to=1, compensation="none"))
    for layout in ("compact", "padded"):
        pruner.save_pretrained(folder / layout, layout)
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    return folder


@pytest.fixture
def cli(folder, monkeypatch, call_cli):
    monkeypatch.chdir(folder)
    return call_cli


@pytest.fixture
def refused(cli, loads_nothing, tmp_path):
    """Return a function that runs what must be refused before any weight is read -> the one line of stderr."""

    def call(command: str, *arguments: object) -> str:
        where = ("--model", "pruned" if command == "recover" else "dense", "--output", tmp_path / "output")
        line = complaint(cli(command, *where, *arguments), RECOVER if command == "recover" else RUN)
        assert not (tmp_path / "output").exists()
        return line

    return call


def report(folder: Path) -> dict:
    return json.loads((folder / "pruning_report.json").read_text())


def test_help_has_every_field(cli):
    _, alone, _ = cli("recover", "--help")
    _, run, _ = cli("run", "--help")
    for option in fields(RecoveryConfig):
        flag = option.name.replace("_", "-")
        assert f"--{flag} " in alone or f"--{flag}," in alone, flag
        assert f"--recover-{flag} " in run or f"--recover-{flag}," in run or flag == "dataset"
    assert "--recover [SOURCE]" in run


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rank 0", "rank must be an integer >= 1, got 0."),
        ("--merge masket", "Unknown merge 'masket'"),
        (
            "--loss kl",
            "loss='kl' asks the dense model, and a pruned checkpoint does not tell where that is. Name it by",
        ),
        (
            "--control",
            "The control is the dense model, and a pruned checkpoint does not tell where that is. Name it by",
        ),
        ("--control --dense nowhere", "nowhere"),
        ("--dataset no.txt", "source 'no.txt' does not exist."),
        ("--dataset text.txt --target-modules q_prj", "q_prj"),
        ("--trainer-options max_steps=3", "trainer_options cannot set max_steps; say it by max_steps."),
        ("--trainer-options optim=adamwx", "trainer_options are refused by TrainingArguments: adamwx"),
        ("--teacher-top-k 3", "teacher_top_k has no meaning with loss 'lm'"),
        ("--evaluate text.txt --evaluate-seq-len 1", "seq_len=1: no sample has a second token"),
        ("--evaluate no.txt", "Calibration source 'no.txt' does not exist."),
        ("--evaluate-seq-len 3", "--evaluate-seq-len has no meaning without --evaluate SOURCE."),
        ("--layout padded --storage packed", "layout='padded' does not go with storage='packed'"),
        ("--layout padded --merge none", "merge='none' does not go with layout='padded'"),
        ("--model compact --layout stock", "layout='stock' is not possible: layers differ in"),
        ("--dataset text.txt --directory full", "is not empty and holds no checkpoints of a recovery"),
        ("--dataset text.txt --directory text.txt", "Checkpoints cannot be written to text.txt: File exists."),
        ("--max-step 3", "unrecognized arguments: --max-step 3. Did you mean --max-steps?"),
    ],
)
def test_mistakes(arguments, message, refused):
    assert message in refused("recover", *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recover --recover-rank 0", "rank must be an integer >= 1, got 0."),
        ("--recover-rank 4", "--recover-... flags have no meaning without --recover [SOURCE]."),
        ("--recover-control", "--recover-... flags have no meaning without --recover [SOURCE]."),
        ("--recover-directory steps", "--recover-... flags have no meaning without --recover [SOURCE]."),
        ("--recover no.txt", "source 'no.txt' does not exist."),
        ("--recover --recover-target-modules q_prj", "q_prj"),
        ("--recover --recover-trainer-options seed=3", "trainer_options cannot set seed; say it by seed."),
        ("--recover --recover-merge none --layout padded", "merge='none' does not go with layout='padded'"),
        ("--recover --recover-directory full", "is not empty and holds no checkpoints of a recovery"),
        (
            "--recover --model pruned --recover-loss kl",
            "then use `optimum-cli prune recover` with --dense MODEL.",
        ),
        (
            "--recover --model pruned --recover-control",
            "then use `optimum-cli prune recover` with --dense MODEL.",
        ),
    ],
)
def test_mistakes_of_a_run(arguments, message, refused):
    assert message in refused("run", "--sparsity", 0.3, "--scorer", "magnitude", *arguments.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("recovery: text.txt", "recovery of a recipe must be a mapping of fields, got 'text.txt'."),
        ("recovery: {ranks: 3}", "Unknown RecoveryConfig field 'ranks'"),
        ("recovery: {rank: 0}", "rank must be an integer >= 1, got 0."),
        ("recovery: {dataset: no.txt}", "source 'no.txt' does not exist."),
    ],
)
@pytest.mark.parametrize("command", ["run", "recover"])
def test_bad_recipes(command, content, message, refused, tmp_path):
    (tmp_path / "recipe.yaml").write_text(content)
    more = ["--sparsity", 0.3] if command == "run" else []
    assert message in refused(command, "--recipe", tmp_path / "recipe.yaml", *more)


def test_padding_cannot_be_packed_which_is_said_before_training(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(Pruner, "recover", lambda *_, **__: pytest.fail("it was trained"))
    given = ("--model", "padded", "--output", tmp_path / "it", "--dataset", "text.txt", "--storage", "packed")
    code, _, complaints = cli("recover", *given)
    assert code == 2 and "The weights are padded, and cannot be packed too" in complaints


@pytest.mark.parametrize("command", ["run", "recover"])
def test_a_reader_that_has_enough_costs_nobody_the_model(command, cli, tmp_path, monkeypatch):
    """As `| head` has: what took hours is saved all the same."""

    def closed(*_):
        raise BrokenPipeError

    report = RecoveryReport if command == "recover" else PruningReport
    monkeypatch.setattr(report, "__str__", closed)
    monkeypatch.setattr("os.dup2", lambda *_: None)  # the output of this process is the test's
    options = flags(dataset="text.txt") if command == "recover" else ["--sparsity", 0.3, "--scorer", "magnitude"]
    model = "compact" if command == "recover" else "dense"
    code, _, complaints = cli(command, "--model", model, "--output", tmp_path / "it", *options)
    assert code == 141 and "Traceback" not in complaints
    assert (tmp_path / "it" / "model.safetensors").exists()


# Runs


@pytest.fixture
def asked(cli, monkeypatch, tmp_path):
    """Return a function that runs a command up to the recovery -> what it is asked for."""

    def call(*arguments: object):
        seen = {}

        def stop(pruner, config, **options):
            seen.update(options, config=config)
            raise KeyboardInterrupt

        monkeypatch.setattr(Pruner, "recover", stop)
        code, *_ = cli(*arguments, "--output", tmp_path / "output")
        assert code == 130
        return seen

    return call


def test_flags_override_the_recipe(asked, tmp_path):
    recipe = tmp_path / "recipe.json"
    section = {"dataset": {"text.txt": 1, "self": 2}, "rank": 3, "max_steps": 7, "trainer_options": {"bf16": True}}
    recipe.write_text(json.dumps({"sparsity": 0.3, "scorer": "magnitude", "recovery": section}))
    wanted = RecoveryConfig({"text.txt": 1, "self": 2}, rank=5, max_steps=7, trainer_options={"bf16": True})
    run = ("run", "--model", "dense", "--recipe", recipe)
    assert asked(*run, "--recover-rank", 5) == {"config": wanted, "control": False, "directory": None}
    assert asked(*run, "--recover", "text.txt")["config"].dataset == "text.txt"
    found = asked("recover", "--model", "pruned", "--recipe", recipe, "--rank", 5, "--dense", "dense", "--control")
    assert found == {"config": wanted, "control": True, "dense": "dense", "directory": None}
    recipe.write_text(json.dumps(section))
    assert asked("recover", "--model", "pruned", "--recipe", recipe, "--rank", 5)["config"] == wanted


def test_pruned_and_recovered(cli, tmp_path):
    how = ("--sparsity", 0.5, "--pattern", "unstructured", "--scorer", "magnitude")
    evaluation = ("--evaluate", "text.txt", "--evaluate-num-samples", 4, "--evaluate-seq-len", 12)
    more = ("--recover-control", "--recover-directory", tmp_path / "steps")
    code, stdout, stderr = cli(
        *("run", "--model", "dense", "--output", tmp_path / "out", *how, *evaluation),
        *("--recover", "text.txt", *flags("recover-"), *more),
    )
    assert code == 0, stderr
    for line in (
        r"^unstructured, magnitude",
        r"^recovery: LoRA rank 8, loss lm, 2 steps",
        r"^ +dense, trained alike ",
        r"^ +dense +pruned +recovered +control +recovered / dense$",
        rf"^Saved to {re.escape(str(tmp_path / 'out'))} \(stock\)$",
    ):
        assert re.search(line, stdout, re.MULTILINE), line
    saved = report(tmp_path / "out")
    assert list(saved["evaluations"]) == ["dense", "pruned", "recovered", "control"]
    (recovery,) = saved["recovery"]
    assert recovery["config"]["dataset"] == "text.txt" and recovery["control"]["kept"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.pruning_config["recovery"][0]["steps"] == 2
    assert (tmp_path / "steps" / "control" / "recovery.json").exists()


def test_a_checkpoint_is_recovered_and_goes_on_after_a_break(cli, monkeypatch, tmp_path):
    arguments = ("recover", "--model", "pruned", "--output", tmp_path / "out", "--dataset", "text.txt")
    arguments += (*flags("", **{"max-steps": 4, "evaluations": 4}), "--directory", tmp_path / "steps")
    loss = RecoveryTrainer.compute_loss

    def broken(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        return loss(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", broken)
    code, stdout, stderr = cli(*arguments)
    assert (code, stdout) == (130, "") and stderr.endswith("\nInterrupted.\n") and "Traceback" not in stderr
    assert not (tmp_path / "out").exists()
    steps = []

    def counted(self, *args, **kwargs):
        steps.append(self.state.global_step)
        return loss(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", counted)
    code, stdout, stderr = cli(*arguments)
    assert code == 0, stderr
    assert steps == [2, 3]
    assert re.search(r"^  zeros ([\d,]+) -> \1 \(merge 'masked'\)$", stdout, re.MULTILINE)
    assert len(report(tmp_path / "out")["recovery"]) == 1
    code, stdout, stderr = cli(*arguments, "--rank", 2)
    assert (code, stdout) == (2, "") and "holds checkpoints of another recovery: config differ" in stderr


def test_two_processes_say_and_save_it_once(folder, tmp_path):
    what = ["--model", folder / "dense", "--output", tmp_path / "recovered", "--pattern", "unstructured"]
    how = ["--sparsity", 0.5, "--scorer", "magnitude", "--recover", folder / "text.txt", *flags("recover-")]
    more = ["--recover-control", "--recover-directory", tmp_path / "steps"]
    done = run_two("-m", "optimum.commands.optimum_cli", "prune", "run", *what, *how, *more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recovery: LoRA") == 1 and done.stdout.count("Saved to") == 2  # before and after training
    assert done.stderr.count("Recovery:   0%") == 2  # and that of the control
    (recovery,) = report(tmp_path / "recovered")["recovery"]
    assert recovery["machine"].startswith("2 x cpu") and recovery["steps"] == 2
    assert recovery["control"]["steps"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"recovered", "steps"}


def test_an_adapter_of_its_own(cli, tmp_path):
    code, stdout, stderr = cli(
        *("recover", "--model", "pruned", "--output", tmp_path, "--dataset", "text.txt", "--merge", "none", *flags()),
        *("--dense", "dense", "--loss", "mix", "--teacher-top-k", 8),
    )
    assert code == 0, stderr
    assert "KL to the dense model" in stdout and "merged" not in stdout
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_an_interrupted_recovery_does_not_cost_the_pruned_model(cli, monkeypatch, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Pruner, "recover", interrupted)
    how = ("--sparsity", 0.5, "--scorer", "magnitude", "--recover", "text.txt")
    code, *_ = cli("run", "--model", "dense", "--output", tmp_path, *how)
    assert code == 130
    assert report(tmp_path)["recovery"] == []
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() < llama().num_parameters()
