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


@pytest.mark.parametrize("field", ["asked", "groups", "config", "calibration", "recovery", "evaluations", "versions"])
@pytest.mark.parametrize("value", [None, "x", 5, [[1]], {"a": 1}, float("nan")], ids=repr)
@pytest.mark.parametrize("flag", [None, "--html"])
def test_reports_of_strangers(field, value, flag, cli, checkpoint, tmp_path):
    """Whatever is in it, a command ends in a table or in one line."""
    if flag:
        pytest.importorskip("matplotlib")
    data = json.loads((checkpoint / REPORT).read_text()) | {field: value}
    (checkpoint / REPORT).write_text(json.dumps(data))
    result = cli(checkpoint, *([flag, tmp_path / "it.html"] if flag else []))
    if result[0]:
        assert result[2].startswith(f"{ERROR}{REPORT} of {checkpoint} is ") and result[2].count("\n") == 1


def test_a_report_that_no_page_can_show(cli, checkpoint, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise KeyError("scores")

    monkeypatch.setattr("optimum_prune.integrations.page.write_page", broken)
    monkeypatch.setattr("optimum_prune.plots.style.check_installed", lambda: None)
    code, _, complaints = cli(checkpoint, "--html", tmp_path / "it.html")
    assert code == 2 and complaints == f"{ERROR}{REPORT} of {checkpoint} is damaged (KeyError: 'scores').\n"


def test_a_deeply_nested_file(cli, checkpoint):
    (checkpoint / REPORT).write_text("[" * 100_000)
    assert f"{REPORT} of {checkpoint} cannot be read" in complaint(cli(checkpoint), ERROR)


def test_control_characters_are_shown_not_obeyed(cli, tmp_path):
    found = report(warnings=["\x1b]0;owned\x07\x9b2J \ud800 na\u00efve \U0001f642\u202e"])
    code, shown, complaints = cli(write(tmp_path / "it", found, {}))
    assert (code, complaints) == (0, "")
    assert "warning: \\x1b]0;owned\\x07\\x9b2J \\ud800 na\u00efve \U0001f642\\u202e" in shown
    folder = tmp_path / "\x1b[2J"
    assert complaint(cli(folder), ERROR) == f"{tmp_path}/\\x1b[2J does not exist."


def test_a_reader_that_has_enough(checkpoint):
    """As `| head` is: no traceback, and nothing at the exit of Python either."""
    script = f"import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); sys.argv[0] = 'optimum-cli'; {CLI}"
    done = run(script, "prune", "report", checkpoint)
    assert (done.returncode, done.stderr) == (141, "")


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
