"""The whole recovery: what it gives, what it keeps, and what it leaves as it was."""
# pyright: reportArgumentType=false

import json
import os
import random
import shutil
import signal
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors import SafetensorError

from optimum_prune import PruningConfig, processes
from optimum_prune.errors import CalibrationError, CheckpointError, InvalidConfig, PruningError, UnsupportedModel
from optimum_prune.pipeline import prune
from optimum_prune.recovery import lora, masked_linear
from optimum_prune.recovery import recover as module
from optimum_prune.recovery.checkpoints import IDENTITY, LOCK, checkpoints, latest
from optimum_prune.recovery.recover import check_recovery, recover
from optimum_prune.recovery.training import RecoveryTrainer
from tests.calibration.conftest import picture
from tests.models import IMAGE_TOKEN, VARIANTS, llama, llava, source, t5
from tests.pruned import holes, unevenly
from tests.recovery.runs import IDS, LONG, SEQ_LEN, adapter, config, everything, pruned, valid_two_of_four
from tests.recovery.test_training import stop_at_step
from tests.shallow import drop
from tests.zeroed import bits, targeted
from tests.zeroed import config as two_of_four


def sparse():
    model = llama()
    prune(model, two_of_four(scorer="magnitude"))
    return model


def zeros(model):
    weights = [linear.weight for linear in targeted(model).values()]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


# What it gives


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen2-mixed-windows", "gemma2", "opt-350m", "t5", "llava"])
def test_pruned_models_get_better(name):
    model = holes(unevenly(VARIANTS[name]()))
    before, size = everything(model), zeros(model)
    encoder_decoder = model.config.is_encoder_decoder
    report = recover(model, config(dataset=source(model, 24) if encoder_decoder else IDS, learning_rate=2e-2))
    assert report.kept and report.merged is not None
    assert report.merged.lm == pytest.approx(report.after.lm, abs=1e-5)
    assert report.merged.lm < report.before.lm - 1e-2
    assert report.zeros_after == report.zeros_before > 0 and zeros(model) == size
    assert report.warnings == []
    after = everything(model)
    changed = {name for name, found in before["bits"].items() if after["bits"][name] != found}
    assert changed == {f"{name}.weight" for name in targeted(model)}
    assert after | {"bits": None} == before | {"bits": None}


def test_images_are_trained_with(processor):
    model = llava()
    rows = [{"image": picture(10 * i), "text": f"<image> w{i + 3} w{i + 4} w{i + 5}"} for i in range(12)]
    seen = []
    model.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    report = recover(holes(model), config(dataset=Dataset.from_list(rows), num_samples=10), processor=processor)
    assert report.kept
    assert all("pixel_values" in given and (given["input_ids"] == IMAGE_TOKEN).any() for given in seen)


def test_fewer_layers():
    model = drop(llama(), [1])
    report = recover(model, config())
    assert report.kept and report.zeros_before == 0
    assert report.merge_gap == pytest.approx(0, abs=1e-5)


def test_bfloat16():
    model = pruned().to(torch.bfloat16)
    report = recover(model, config(learning_rate=2e-2))
    assert report.kept and report.merge_gap == pytest.approx(0, abs=1e-3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert report.machine.startswith("cpu, bfloat16")


def test_autocast_is_for_training_alone():
    model = pruned()
    report = recover(model, config(trainer_options={"bf16": True}))
    assert report.kept and report.merge_gap == pytest.approx(0, abs=1e-5)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def masked():
    model = sparse()
    return model, recover(model, config())


def test_two_of_four_stay_two_of_four(masked):
    model, report = masked
    assert report.kept and zeros(model) == 0.5
    assert all(valid_two_of_four(linear.weight) for linear in targeted(model).values())
    assert report.merge_gap == pytest.approx(0, abs=1e-5)
    assert report.zeros_after == report.zeros_before


def test_two_runs_are_equal(masked):
    model, report = masked
    twin = sparse()
    again = recover(twin, config())
    assert bits(twin) == bits(model)
    assert again.to_dict() | {"seconds": 0} == report.to_dict() | {"seconds": 0}
    other = sparse()
    recover(other, config(seed=1))
    assert bits(other) != bits(model)


def test_zeros_put_back_after_training_are_reported_with_what_they_cost():
    model = sparse()
    report = recover(model, config(merge="remask"))
    assert report.kept and zeros(model) == 0.5
    assert report.merge_gap is not None and report.merge_gap > 1e-3


def test_a_merge_that_costs_more_than_was_gained_is_warned_of(monkeypatch):
    @torch.no_grad()
    def damaging(tuned, how):
        model = lora.merge_(tuned, how)
        model.lm_head.weight.mul_(30)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        return model

    monkeypatch.setattr(module, "merge_", damaging)
    report = recover(sparse(), config(merge="remask"))
    assert report.kept and report.merged is not None
    (warning,) = report.warnings
    assert warning == (
        f"Merging by 'remask' took back more than training had gained: the trained loss was {report.before.lm:.4f} "
        f"before, {report.after.lm:.4f} with the adapter, and is {report.merged.lm:.4f}. Load the pruned model again, "
        "and use merge='masked'."
    )
    assert f"warning: {warning}" in str(report)


def test_zeros_that_a_plain_merge_loses_are_warned_of():
    model = sparse()
    report = recover(model, config(merge="plain"))
    assert report.kept and zeros(model) < 0.1
    assert report.merge_gap == pytest.approx(0, abs=1e-5)
    assert report.warnings == [
        f"Merging by 'plain' lost {report.zeros_before - report.zeros_after:,} of {report.zeros_before:,} zeros; "
        "merge='masked' keeps them."
    ]


@pytest.mark.parametrize("merge", ["masked", "remask", "plain"])
def test_zeros_by_chance_are_trained_like_other_weights(merge, monkeypatch):
    """Those of a dequantised model of which units went: no mask is computed, and nothing is lost that counts."""
    monkeypatch.setattr(masked_linear, "masked_linear", lambda *_, **__: pytest.fail("a mask was computed"))
    model = holes(llama(), sparsity=0.1)
    prune(model, PruningConfig(scorer="magnitude", sparsity=0.3))
    held = zeros(model)
    report = recover(model, config(merge=merge))
    assert report.kept and report.warnings == []
    assert (report.zeros_before, report.zeros_after) == (0, 0) and "zeros" not in str(report)
    assert held > 0.05 and zeros(model) < 0.01
    assert report.merge_gap == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "share"),
    [({"loss": "kl"}, 1.0), ({"loss": "mix", "teacher_top_k": 20}, 0.5)],
    ids=["live", "cached"],
)
def test_the_dense_model_teaches(options, share):
    model, loaded = pruned(), []

    def dense():
        loaded.append(llama())
        return loaded[-1]

    report = recover(model, config(**options), dense=dense)
    assert report.kept and report.before.kl is not None and report.merged is not None and report.merged.kl is not None
    assert report.merged.kl < report.before.kl
    assert len(loaded) == 1
    trained = [row["held_out"] for row in report.curve if "held_out" in row]
    assert report.after.kl is not None
    assert min(trained) == pytest.approx((1 - share) * report.after.lm + share * report.after.kl, rel=1e-5)


def test_it_writes_the_text_too():
    model, asked = pruned(), []

    def dense():
        asked.append(True)
        return llama()

    report = recover(model, config(dataset="self", num_samples=4, max_steps=1), dense=dense)
    assert asked and report.data["sources"][0]["source"] == "self"


@pytest.mark.parametrize("name", ["llama-gqa", "t5"])
def test_every_update_moves_with_gradient_checkpointing(name, monkeypatch):
    found = {}

    def spying(tuned, how):
        found.update(adapter(tuned))
        return lora.merge_(tuned, how)

    monkeypatch.setattr(module, "merge_", spying)
    model = unevenly(VARIANTS[name]())
    before = everything(model)
    data = source(model, 24) if name == "t5" else IDS
    assert recover(model, config(dataset=data, gradient_checkpointing=True)).kept
    updates = [tensor for path, tensor in found.items() if ".lora_B." in path]
    assert len(updates) == len(targeted(model)) and all(update.any() for update in updates)
    assert_untouched(model, before, but=["bits", "attributes"])


def test_the_adapter_alone(tmp_path):
    model = pruned()
    before = everything(model)
    report = recover(model, config(merge="none", learning_rate=2e-2, max_steps=8), adapter=tmp_path / "adapter")
    assert report.kept and report.merged is None and report.merge_gap is None
    assert everything(model) == before
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    given = torch.tensor([row for row in IDS if len(row) == SEQ_LEN])
    with torch.no_grad():
        apart = model(given, labels=given).loss.item()
        tuned = PeftModel.from_pretrained(model, tmp_path / "adapter")
        assert tuned(given, labels=given).loss.item() < apart - 0.1


# What it leaves as it was


def assert_untouched(model, before, but=()):
    after = everything(model)
    assert {name: after[name] for name in after if name not in but} == {
        name: before[name] for name in before if name not in but
    }
    assert not any("peft" in name for names in after["attributes"].values() for name in names)


def unusual():
    """Return a model in a state of its own: flags, modes and a cache that training would change."""
    model = pruned()
    model.config.use_cache = True
    model.model.layers[1].train()
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def test_nothing_better_leaves_the_model_as_it_was():
    model = unusual()
    before = everything(model)
    # Its own teacher: there is nothing to be learned.
    report = recover(model, config(loss="kl", learning_rate=1.0), dense=pruned)
    assert report.before.kl == 0 and report.steps == 4
    assert not report.kept and report.merged is None and report.best_step == 0
    assert report.after == report.before
    assert "no step was better than none" in str(report) and "with the adapter" not in str(report)
    assert_untouched(model, before)


def test_a_training_that_diverges_leaves_the_model_as_it_was():
    model = unusual()
    before = everything(model)
    report = recover(model, config(learning_rate=1e30))
    assert not report.kept
    (warning,) = report.warnings
    assert warning == (
        "Training diverged: the held-out loss was not finite at step 2, and training ended there. Lower learning_rate."
    )
    json.dumps(report.to_dict(), allow_nan=False)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("error", "options"), [(KeyboardInterrupt, {}), (RuntimeError, {"gradient_checkpointing": True})]
)
def test_an_error_in_the_middle_leaves_the_model_as_it_was(error, options, monkeypatch, tmp_path):
    loss = RecoveryTrainer.compute_loss

    def broken(self, *args, **kwargs):
        if self.state.global_step == 1:
            raise error("in the middle")
        return loss(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = unusual()
    before = everything(model)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
    with pytest.raises(error):
        recover(model, config(**options))
    assert_untouched(model, before, but=["attributes"] if options else [])  # transformers leaves those of the switch
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()) == states
    assert list(tmp_path.iterdir()) == []


def test_a_refused_merge_leaves_the_model_as_it_was(monkeypatch):
    def refused(tuned, how):
        raise UnsupportedModel("no")

    monkeypatch.setattr(module, "merge_", refused)
    model = unusual()
    before = everything(model)
    with pytest.raises(UnsupportedModel, match=r"^no$"):
        recover(model, config(max_steps=2))
    assert_untouched(model, before)


def test_an_interrupted_merge_is_told_as_such(monkeypatch):
    def interrupted(tuned, how):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "merge_", interrupted)
    with pytest.raises(PruningError, match=r"^The merge was interrupted \(KeyboardInterrupt\(\)\): weights are partly"):
        recover(pruned(), config(max_steps=2))


# Breaks


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    model = pruned()
    folder = tmp_path_factory.mktemp("unbroken") / "checkpoints"
    return recover(model, config(**LONG), directory=folder), bits(model), folder


def same(report, other):
    return report.to_dict() | {"seconds": 0} == other.to_dict() | {"seconds": 0}


def test_killed_half_way_and_started_again(unbroken, tmp_path):
    """SIGKILL, as by a cluster: the second process goes on from the last checkpoint, to the same weights."""

    def killed(self, *args, **kwargs):
        if self.state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(self, *args, **kwargs)

    def child():
        RecoveryTrainer.compute_loss = killed
        recover(pruned(), config(**LONG), directory=tmp_path / "folder")

    loss = RecoveryTrainer.compute_loss
    process = get_context("fork").Process(target=child)  # half a minute less than one that imports all anew
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "folder" / "checkpoint-4").is_dir()
    model = pruned()
    report = recover(model, config(**LONG), directory=tmp_path / "folder")
    assert same(report, unbroken[0])
    assert bits(model) == unbroken[1]


def test_a_half_written_checkpoint_is_passed_over(unbroken, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    stop_at_step(monkeypatch, 6)
    with pytest.raises(KeyboardInterrupt):
        recover(pruned(), config(**LONG), directory=folder)
    state = folder / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    (folder / "checkpoint-6").mkdir()  # killed before it held anything
    monkeypatch.undo()
    assert same(recover(pruned(), config(**LONG), directory=folder), unbroken[0])


def test_a_training_that_had_ended_is_not_begun_again(unbroken, monkeypatch):
    report, weights, folder = unbroken
    stop_at_step(monkeypatch, 0)
    model = pruned()
    assert same(recover(model, config(**LONG), directory=folder), report)
    assert bits(model) == weights


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"config": config(**LONG, rank=2)}, "config"),
        ({"config": config(**LONG | {"dataset": IDS[1:]})}, "config, data"),
        ({"model": llama}, "weights"),
    ],
    ids=["config", "data", "weights"],
)
def test_checkpoints_of_another_recovery_are_refused(changes, what, unbroken):
    model = changes.get("model", pruned)()
    before = everything(model)
    with pytest.raises(CheckpointError, match=f"holds checkpoints of another recovery: {what} differ. Pass another"):
        recover(model, changes.get("config", config(**LONG)), directory=unbroken[2])
    assert_untouched(model, before)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty and holds no checkpoints of a recovery"):
        recover(pruned(), config(), directory=tmp_path)


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(CheckpointError, match=r"^Checkpoints cannot be written to .*\. Pass another directory\.$"):
            recover(pruned(), config(), directory=folder)


def test_two_recoveries_in_one_folder(tmp_path, monkeypatch):
    """The second, started by mistake, must not write between the checkpoints of the first."""
    evaluate = RecoveryTrainer.evaluate

    def meanwhile(self, *args, **kwargs):
        with pytest.raises(CheckpointError, match=r"Another process trains in .* at this moment\."):
            recover(pruned(), config(), directory=tmp_path)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "evaluate", meanwhile)
    assert recover(pruned(), config(), directory=tmp_path).steps == 4
    monkeypatch.undo()
    assert recover(pruned(), config(), directory=tmp_path).steps == 4  # the first is over


def test_a_lock_that_is_somebody_elses(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(CheckpointError, match=r"recovery\.lock cannot be locked: .*\. Delete it, or pass another"):
        recover(pruned(), config(), directory=tmp_path)


def test_what_a_killed_process_left_of_its_trial_does_not_count(tmp_path):
    (tmp_path / ".trial-abc").mkdir()
    assert recover(pruned(), config(), directory=tmp_path).steps == 4


def test_checkpoints_of_another_number_of_processes_are_refused(tmp_path, monkeypatch):
    """They would go on with another batch."""
    with checkpoints(tmp_path, lambda: {"data": 1}) as folder:
        (folder / "checkpoint-2").mkdir()
    monkeypatch.setattr(processes, "count", lambda: 2)
    with (
        pytest.raises(CheckpointError, match="checkpoints of another recovery: processes differ"),
        checkpoints(tmp_path, lambda: {"data": 1}),
    ):
        pass


def test_a_checkpoint_without_the_random_state_of_every_process_is_not_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in ("trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"):
            (folder / name).write_text("{}")
    assert latest(tmp_path) == tmp_path / "checkpoint-6"
    (tmp_path / "checkpoint-6" / "rng_state_1.pth").unlink()
    (tmp_path / "checkpoint-4" / "rng_state_1.pth").write_text("")
    assert latest(tmp_path) == tmp_path / "checkpoint-2"


def test_a_best_step_that_is_gone_at_the_end(tmp_path, monkeypatch):
    """A Trainer would go on with the last one, and the report with the best."""
    evaluate = RecoveryTrainer.evaluate

    def losing(self, *args, **kwargs):
        if self.state.global_step == 8:
            shutil.rmtree(tmp_path / "folder" / f"checkpoint-{self.state.best_global_step}")
            metrics = {"eval_loss": 99.0}  # the last is not the best
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "evaluate", losing)
    model = pruned()
    before = everything(model)
    with pytest.raises(CheckpointError, match=r"checkpoint-6 has no adapter_model\.safetensors any more"):
        recover(model, config(**LONG), directory=tmp_path / "folder")
    assert_untouched(model, before)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"config": 1}'])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(content, tmp_path):
    (tmp_path / IDENTITY).write_text(content)
    assert recover(pruned(), config(), directory=tmp_path).steps == 4
    (tmp_path / IDENTITY).write_text(content)  # now there is something to lose
    with pytest.raises(CheckpointError, match=r"recovery\.json of .* (cannot be read|holds no JSON object)|differ"):
        recover(pruned(), config(), directory=tmp_path)


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error"), RuntimeError("basic_ios: iostream error")],
)
def test_a_disk_that_is_full(error, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr(RecoveryTrainer, "_save_checkpoint", full)
    model = pruned()
    before = everything(model)
    with pytest.raises(CheckpointError, match=f"cannot be written or read: .*{error.args[-1]}"):
        recover(model, config(), directory=tmp_path / "folder")
    assert_untouched(model, before)


@pytest.mark.parametrize("content", [None, b"half"])
def test_a_best_step_that_is_damaged(content, unbroken, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(unbroken[2], folder)
    for path in folder.glob("checkpoint-*/adapter_model.safetensors"):
        path.unlink() if content is None else path.write_bytes(content)
    model = pruned()
    before = everything(model)
    with pytest.raises(CheckpointError, match=r"has no adapter_model|cannot be written or read"):
        recover(model, config(**LONG), directory=folder)
    assert_untouched(model, before)


# Refusals


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"loss": "kl"}, {}, "loss='kl' asks the dense model, and it cannot be loaded again. Name it"),
        ({"merge": "none"}, {}, "adapter= names where an adapter is written that is not merged"),
        ({}, {"adapter": "folder"}, "adapter= names where an adapter is written that is not merged"),
        ({"trainer_options": {"max_steps": 3}}, {}, "trainer_options cannot set max_steps"),
        ({"target_modules": ["q_prj"]}, {}, "q_prj"),
        (
            {"loss": "kl"},
            {"dense": lambda: llama(vocab_size=90)},
            "of 90 tokens, cannot teach a LlamaForCausalLM of 96",
        ),
        (
            {"loss": "kl"},
            {"dense": t5},
            "A T5.*cannot teach|The dense model, a T5ForConditionalGeneration of 96 tokens",
        ),
    ],
)
def test_mistakes_are_refused_before_the_work(options, arguments, message, monkeypatch):
    monkeypatch.setattr(module, "train", lambda *_: pytest.fail("it was trained"))
    model = pruned()
    before = everything(model)
    with pytest.raises(InvalidConfig, match=message):
        recover(model, config(**options), **arguments)
    assert_untouched(model, before)


def test_a_config_of_another_kind():
    with pytest.raises(InvalidConfig, match=r"^config must be a RecoveryConfig, got a dict\.$"):
        recover(pruned(), {"max_steps": 3})


def test_sources_are_tried_before_weights_are_there():
    with torch.device("meta"):
        skeleton = llama()
    check_recovery(skeleton, config())
    with pytest.raises(CalibrationError, match="no/such"):
        check_recovery(skeleton, config(dataset="./no/such.txt"))
