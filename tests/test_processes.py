"""Processes that train together: two of two sequences are one of four; and what would set them apart is refused."""

import json

import pytest
import torch
from accelerate import PartialState

from optimum_prune import Pruner, PruningConfig, processes
from optimum_prune.comparing import running
from optimum_prune.errors import InvalidConfig, PruningError
from optimum_prune.integrations import hub, layouts
from optimum_prune.recovery.data import load_training_data
from optimum_prune.recovery.recover import recover
from tests.processes import run_two
from tests.recovery.runs import IDS, config, largest_difference, pruned

STEPS = {"max_steps": 6, "evaluations": 3, "num_samples": 20}  # whole batches: DDP fills the last up
WORK = """
import json, sys
from pathlib import Path
import torch
from optimum_prune import Pruner
from optimum_prune.processes import join
from tests.recovery.runs import config, pruned

root, options = Path(sys.argv[1]), json.loads(sys.argv[2])
rank = join().process_index
for how in ("temporary", "kept"):
    folder, model = root / how, pruned()
    folder.mkdir(exist_ok=True)
    pruner = Pruner(model)
    report = pruner.recover(config(**options), directory=folder / "checkpoints" if how == "kept" else None)
    pruner.save_pretrained(folder / "saved")
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(report.to_dict()))
"""


MISTAKES = """
import sys
from pathlib import Path
import torch
from optimum_prune.errors import PruningError
from optimum_prune.processes import join
from optimum_prune.recovery.recover import recover
from tests.recovery.runs import config, pruned

folder, rank = Path(sys.argv[1]), join().process_index
same, other = pruned(), pruned()
torch.nn.init.zeros_(other.lm_head.weight[:1])
tried = [
    (same, folder),
    (same, folder / "mine" if rank else None),
    (other if rank else same, None),
    (same, folder / "ours"),
]
for model, directory in tried:
    try:
        recover(model, config(max_steps=2), directory=directory)
    except PruningError as error:
        with open(folder / f"{rank}.txt", "a") as file:  # not printed: two lines at once may be one
            print(error, file=file)
"""


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory):
    """Two recoveries by two processes, checkpoints in a temporary folder and in one of the user, and what they printed.

    One launch for both: starting the processes takes longer than the recoveries.
    """
    root = tmp_path_factory.mktemp("together")
    (root / "work.py").write_text(WORK)
    done = run_two(root / "work.py", root, json.dumps(STEPS | {"batch_size": 2}))
    assert done.returncode == 0, done.stderr
    return root, done.stderr


@pytest.fixture(params=["temporary", "kept"])
def together(request, both_ways):
    root, said = both_ways
    return root / request.param, said


def test_two_processes_are_one_of_twice_the_batch(together):
    """The data of a step, the number of its tokens, its gradients: nothing of it is each one's own."""
    folder, _ = together
    model = pruned()
    report = recover(model, config(**STEPS, batch_size=4))
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert both[0] | {"seconds": 0} == both[1] | {"seconds": 0}
    assert both[0]["machine"] == f"2 x {report.machine}"
    for name in ("before", "after", "merged"):
        assert both[0][name]["lm"] == pytest.approx(getattr(report, name).lm, abs=1e-5)
    for row, alone in zip(both[0]["curve"], report.curve, strict=True):
        assert row == pytest.approx(alone, abs=1e-5)
    weights = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[0][name], weights[1][name]), name
        assert largest_difference(weights[0][name], tensor) < 1e-4, name


def test_one_of_them_speaks_and_writes(together):
    folder, said = together
    assert said.count("Recovery:   0%") == 2  # one of the two processes, for each of the two recoveries
    found = {path.name for path in folder.iterdir()} - {"checkpoints"}
    assert found == {"saved", "0.pt", "1.pt", "0.json", "1.json"}
    assert (folder / "saved" / "model.safetensors").is_file()


def test_what_one_is_refused_all_are_refused(tmp_path):
    """And none waits for ever for one that has found out: all may try again."""
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    done = run_two(tmp_path / "mistakes.py", tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        first, second, third = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert "is not empty and holds no checkpoints of a recovery. Pass another directory." in first
        assert "The 2 processes that train together differ in their directory." in second
        assert third.startswith("The 2 processes that train together differ in their weights. Tell them the same, load")
    assert (tmp_path / "ours" / "checkpoint-2").is_dir() and not (tmp_path / "mine").exists()


def test_processes_that_would_each_train_alone_are_refused(monkeypatch):
    """A PartialState of a CPU, made without saying so, joins nobody."""
    PartialState()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PruningError, match="This is one of 2 processes, and accelerate was set up in it to work alone"):
        processes.join()


def test_a_model_that_is_spread_over_devices_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    model = pruned()
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1}
    with pytest.raises(InvalidConfig, match="Each of the 2 processes needs a whole model on its device, and this one"):
        recover(model, config())


def test_one_process_trains_on_one_gpu(tmp_path, monkeypatch):
    """nn.DataParallel would multiply the batch by the number of GPUs that a process sees."""
    from transformers import TrainingArguments

    from optimum_prune.recovery.arguments import arguments

    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 4))
    made = arguments(config(batch_size=3), tmp_path, on_cpu=False)
    assert (made.n_gpu, made.train_batch_size) == (1, 3)


def test_each_process_has_samples_of_its_own(monkeypatch):
    rows = [[5 + i % 8, 5 + i // 8, 6, 7] for i in range(60)]
    asked = config(dataset=rows, num_samples=None, max_steps=4, batch_size=4)
    alone = load_training_data(asked, pruned())
    monkeypatch.setattr(processes, "count", lambda: 2)
    assert (len(alone.train), len(load_training_data(asked, pruned()).train)) == (16, 32)


def test_others_save_nothing(monkeypatch, tmp_path):
    pruner = Pruner(pruned())
    layout = pruner.save_pretrained(tmp_path / "main")
    for module in (layouts, running):
        monkeypatch.setattr(module, "is_main", lambda: False)
    assert pruner.save_pretrained(tmp_path / "other") == layout
    pruner.compare([PruningConfig(scorer="random", sparsity=0.2)], IDS, directory=tmp_path / "compared", seq_len=16)
    assert [path.name for path in tmp_path.iterdir()] == ["main"]


def test_others_publish_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "is_main", lambda: False)
    monkeypatch.setattr(hub, "_asking", lambda *_: pytest.fail("the Hub was asked"))
    to = hub.Destination("me/name", token="hf_x")
    assert hub.prepare(to) == to
    assert hub.upload(tmp_path, to).endswith("/me/name")


def test_alone_one_is_all():
    assert (processes.count(), processes.is_main(), processes.from_main("x")) == (1, True, "x")
    processes.check_alike({"weights": 1})
