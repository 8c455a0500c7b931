"""`optimum-cli prune report`: tables, pictures and a page, from files without weights."""

import json
from dataclasses import replace

import pytest

from optimum_prune.integrations.loading import REPORT, write_report
from optimum_prune.measurements import comparison
from optimum_prune.plots import style
from tests.integrations.hub_server import loopback
from tests.models import llama
from tests.processes import complaint, run
from tests.reports import DENSE, PRUNED, report

CLI = "from optimum.commands.optimum_cli import main; main()"
ERROR = "optimum-cli prune report: error: "
EVALUATIONS = {"dense": DENSE, "pruned": PRUNED}


@pytest.fixture
def checkpoint(tmp_path):
    """Return a pruned checkpoint of which only config and report are there."""
    return write(tmp_path / "pruned", report(warnings=["Something to know."]), EVALUATIONS)


def write(folder, found, evaluations):
    folder.mkdir()
    write_report(folder, found, evaluations)
    config = llama().config
    config.pruning_config = found.record()
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def cli(call_cli):
    """Return a function that runs `optimum-cli prune report` in this process -> (exit code, stdout, stderr)."""
    return lambda *arguments: call_cli("report", *arguments)


def test_prints_both_tables(cli, checkpoint):
    found = report(warnings=["Something to know."])
    assert cli(checkpoint) == (0, f"{found}\n\n{comparison(EVALUATIONS)}\n", "")
    assert "warning: Something to know." in str(found)


def test_without_measurements(cli, tmp_path):
    assert cli(write(tmp_path / "it", report(), {})) == (0, f"{report()}\n", "")


def test_page_and_pictures(cli, checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    file, folder = tmp_path / "it.html", tmp_path / "new" / "plots"
    code, shown, complaints = cli(checkpoint, "--html", file, "--plots", folder)
    assert (code, complaints) == (0, "")
    assert shown.endswith(f"Saved to {file}\nSaved to {folder / 'kept.png'}\nSaved to {folder / 'measured.png'}\n")
    assert sorted(path.name for path in folder.iterdir()) == ["kept.png", "measured.png"]
    assert "<h1>pruned</h1>" in file.read_text(encoding="utf-8")


def test_from_the_hub_without_weights(cli, checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with loopback(tmp_path, monkeypatch) as hub:
        (checkpoint / "model.safetensors").write_text("not to be read")
        hub.create("me/it", {path.name: path.read_bytes() for path in checkpoint.iterdir()})
        file = tmp_path / "it.html"
        code, shown, complaints = cli("me/it", "--html", file)
        assert (code, complaints) == (0, "") and shown.startswith("structured, ntk")
        assert "<h1>me/it</h1>" in file.read_text(encoding="utf-8")
        assert hub.log and not [request for request in hub.log if "safetensors" in request]


def test_refusals_are_one_line(cli, checkpoint, tmp_path):
    dense = tmp_path / "dense"
    dense.mkdir()
    llama().config.save_pretrained(dense)
    assert complaint(cli(dense), ERROR).startswith(f"{dense} was not pruned by optimum_prune: its config.json has no ")
    assert complaint(cli(tmp_path / "nothing"), ERROR) == f"{tmp_path / 'nothing'} does not exist."
    other = replace(report(), seconds=2.0, parameters_after=8_000)
    write_report(checkpoint, other, EVALUATIONS)
    assert "is of another pruning than its config.json records" in complaint(cli(checkpoint), ERROR)
    (checkpoint / REPORT).write_text(json.dumps({"version": 1}))
    assert "is damaged" in complaint(cli(checkpoint), ERROR)
    (checkpoint / REPORT).unlink()
    assert f"has no {REPORT}" in complaint(cli(checkpoint), ERROR)


def test_files_that_cannot_be_written(cli, checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    for flag, path, reason in (
        ("--html", tmp_path, "Is a directory"),
        ("--html", tmp_path / "no" / "it.html", "No such file or directory"),
        ("--plots", tmp_path / "file", "File exists"),
    ):
        code, _, complaints = cli(checkpoint, flag, path)
        assert code == 2 and complaints == f"{ERROR}{flag} {str(path)!r} cannot be written: {reason}.\n"


@pytest.mark.parametrize("flag", ["--html", "--plots"])
def test_without_matplotlib(flag, cli, checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    message = "Plots need the package 'matplotlib': pip install 'optimum-prune[plots]'."
    assert complaint(cli(checkpoint, flag, tmp_path / "new"), ERROR) == message
    assert cli(checkpoint)[0] == 0 and not (tmp_path / "new").exists()


def test_from_a_shell(checkpoint):
    done = run(CLI, "prune", "report", checkpoint)
    assert (
        done.returncode == 0
        and done.stdout == f"{report(warnings=['Something to know.'])}\n\n{comparison(EVALUATIONS)}\n"
    )
    assert done.stderr == ""
