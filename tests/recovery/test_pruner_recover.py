"""Recovery by a Pruner: what is measured, recorded and saved of it."""

import json
import logging

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from optimum_prune.config import PruningConfig
from optimum_prune.errors import CheckpointError, InvalidConfig
from optimum_prune.pruner import Pruner
from optimum_prune.recovery import recover as module
from optimum_prune.recovery.report import RecoveryReport
from optimum_prune.recovery.training import RecoveryTrainer, Trained
from tests.defaults import other_defaults
from tests.models import llama, tokens
from tests.pruned import holes
from tests.recovery.runs import IDS, config, everything
from tests.zeroed import bits

SAMPLES = tokens(batch=2, length=12, seed=1).tolist()
CUT = PruningConfig(scorer="magnitude", sparsity=0.4, allocation="global", round_to=1)
ZEROS = PruningConfig(pattern="unstructured", scorer="magnitude", sparsity=0.5)


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def measure(pruner, dataset=IDS):
    return pruner.evaluate(dataset, seq_len=16, latency=False)


@pytest.fixture(scope="module")
def merged(dense):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    pruned = measure(pruner)
    report = pruner.recover(config(), control=True)
    return pruner, report, pruned, measure(pruner)


def test_stages_stand_side_by_side(merged):
    pruner, _, pruned, recovered = merged
    assert list(pruner.evaluations) == ["dense", "pruned", "recovered", "control"]
    assert pruner.evaluations["pruned"] == pruned
    assert recovered.perplexity < pruned.perplexity
    assert pruner.evaluations["control"].perplexity < pruner.evaluations["dense"].perplexity
    assert pruner.evaluations["control"].kl > 0
    heading, *_ = pruner.comparison().splitlines()
    assert heading.split() == ["dense", "pruned", "recovered", "control", "recovered", "/", "dense"]


def test_the_control_is_the_dense_model_trained_alike(merged):
    _, report, *_ = merged
    control = report.control
    assert control.kept and control.merged is None
    assert control.data == report.data
    assert control.config == report.config | {"merge": "none"}
    assert (report.zeros_before, control.trained_parameters > report.trained_parameters) == (0, True)


def test_reports_and_records_survive_saving(merged, tmp_path):
    pruner, report, *_ = merged
    pruner.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["pruning_config"]
    assert record["recovery"] == [json.loads(json.dumps(report.record()))]
    again = Pruner.from_pretrained(tmp_path)
    assert again.report is not None
    assert again.report.recovery == [RecoveryReport.from_dict(json.loads(json.dumps(report.to_dict())))]
    assert again.evaluations == pruner.evaluations
    assert torch.equal(logits(again.model), logits(pruner.model))
    assert "recovery: LoRA rank 4" in str(again.report)
    assert not (tmp_path / "adapter").exists()
    assert measure(again).perplexity == pruner.evaluations["recovered"].perplexity
    assert list(again.evaluations) == list(pruner.evaluations)


def test_pruned_again(dense):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    pruner.recover(config(max_steps=2))
    measure(pruner)
    again = pruner.prune(ZEROS)
    assert again.recovery == [] and "recovery" not in pruner.model.config.pruning_config
    assert pruner.model.config.pruning_config["previous"][0]["recovery"]
    assert list(pruner.evaluations) == ["dense"]
    measure(pruner)
    report = pruner.recover(config(max_steps=2))
    assert report.zeros_after == report.zeros_before > 0
    assert measure(pruner) == pruner.evaluations["recovered"]


def test_recovered_twice(merged):
    pruner, report, *_ = merged
    twice = Pruner(pruner.model, pruner.tokenizer)
    twice.report, twice._stages.load_dense = pruner.report, pruner._stages.load_dense
    before = len(twice.report.recovery)
    second = twice.recover(config(seed=3, max_steps=2))
    assert second.before.lm < report.before.lm
    assert len(twice.report.recovery) == len(twice.model.config.pruning_config["recovery"]) == before + 1


@pytest.fixture(scope="module")
def apart(dense):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    before = bits(pruner.model)
    measure(pruner)
    report = pruner.recover(config(merge="none"))
    assert report.kept and bits(pruner.model) == before
    return pruner


def test_an_adapter_is_measured_with(apart):
    state = everything(apart.model)
    recovered, pruned = measure(apart), apart.evaluations["pruned"]
    assert recovered == apart.evaluations["recovered"]
    assert recovered.perplexity < pruned.perplexity
    assert everything(apart.model) == state
    assert "recovery" not in apart.model.config.pruning_config


@pytest.mark.parametrize("options", [{}, {"storage": "packed"}], ids=["compact", "packed"])
def test_an_adapter_is_saved_beside_its_base(options, apart, tmp_path):
    measure(apart)
    apart.save_pretrained(tmp_path, **options)
    # The model was loaded from the dense one, which is not the adapter's base.
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == files
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(base), logits(apart.model))
    tuned = PeftModel.from_pretrained(base, str(tmp_path), subfolder="adapter")
    expected = PeftModel.from_pretrained(Pruner.from_pretrained(tmp_path).model, apart._stages.adapter.name)
    assert torch.equal(logits(tuned), logits(expected))
    assert not torch.equal(logits(tuned), logits(apart.model))
    assert (
        'from_pretrained(model, "path/or/id/of/this/model", subfolder="adapter")'
        in (tmp_path / "README.md").read_text()
    )


def test_an_adapter_is_loaded_along(apart, tmp_path):
    recovered = measure(apart)
    apart.save_pretrained(tmp_path)
    again = Pruner.from_pretrained(tmp_path)
    assert again.report is not None and again.report.recovery == apart.report.recovery
    measured = measure(again)
    assert measured.perplexity == recovered.perplexity
    again.save_pretrained(tmp_path)  # over what it was loaded from
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_an_old_adapter_goes_and_a_folder_of_ones_own_stays(apart, dense, tmp_path):
    apart.save_pretrained(tmp_path)
    other = Pruner.from_pretrained(dense)
    other.save_pretrained(tmp_path)
    assert not (tmp_path / "adapter").exists()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "notes.txt").write_text("mine")
    other.save_pretrained(tmp_path)
    assert (tmp_path / "adapter" / "notes.txt").exists()


def test_padding_and_an_adapter_do_not_go_together(apart, tmp_path):
    with pytest.raises(InvalidConfig, match=r"^The adapter of the recovery fits the model without padding"):
        apart.save_pretrained(tmp_path / "padded", layout="padded")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_of_other_weights_is_dropped_with_a_warning(dense, caplog):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    pruner.recover(config(merge="none", max_steps=2))
    caplog.set_level(logging.WARNING, "optimum_prune")
    pruner.prune(ZEROS)
    assert "The adapter of the last recovery was never merged" in caplog.text
    assert pruner._stages.now == "pruned"


def test_padded_weights_keep_their_padding(dense, tmp_path):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    pruner.save_pretrained(tmp_path, layout="padded")
    padded = Pruner.from_pretrained(tmp_path)
    for merge in ("plain", "none"):
        with pytest.raises(InvalidConfig, match=f"^merge='{merge}' would fill the padding of the model"):
            padded.recover(config(merge=merge))
    assert padded.recover(config()).kept
    assert padded.model.config.pruning_config["layout"] == "padded"
    recovered = logits(padded.model)
    padded.unpad()
    assert padded.model.num_parameters() == pruner.model.num_parameters()
    assert torch.allclose(logits(padded.model), recovered, atol=1e-5)


def test_a_model_pruned_by_others(dense, tmp_path):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(ZEROS)
    delattr(pruner.model.config, "pruning_config")
    pruner.model.save_pretrained(tmp_path)
    foreign = Pruner.from_pretrained(tmp_path)
    pruned = measure(foreign)
    assert not foreign.is_pruned
    for asked, control in ((config(loss="kl"), False), (config(), True)):
        with pytest.raises(InvalidConfig, match=r"cannot be loaded again\. Name it"):
            foreign.recover(asked, control=control)
    report = foreign.recover(config(loss="kl", max_steps=2), dense=dense)
    assert report.kept and report.zeros_after == report.zeros_before > 0
    recovered = measure(foreign)
    assert list(foreign.evaluations) == ["pruned", "dense", "recovered"]
    assert foreign.evaluations["pruned"] == pruned
    assert recovered.kl is not None and foreign.evaluations["dense"].perplexity != pruned.perplexity
    foreign.save_pretrained(tmp_path)
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path).config, "pruning_config")


def test_what_was_taken_for_dense_is_no_reference_any_more():
    """A live model that others pruned: what was measured before its recovery is not the dense model."""
    pruner = Pruner(holes(llama()))
    assert measure(pruner).kl is None
    assert pruner.recover(config(max_steps=2)).kept
    assert measure(pruner).kl is None
    assert list(pruner.evaluations) == ["pruned", "recovered"]


def test_a_dense_model_that_is_not_there(merged, dense, tmp_path):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        pruner.recover(config(), dense=tmp_path / "nowhere")
    assert pruner._stages.load_dense is not None


def test_an_interrupted_control_leaves_the_recovery_recorded(dense, monkeypatch):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    loss, trainers = RecoveryTrainer.compute_loss, []

    def second(self, *args, **kwargs):
        trainers.extend([] if any(self is seen for seen in trainers) else [self])
        if len(trainers) == 2:
            raise KeyboardInterrupt
        return loss(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", second)
    with pytest.raises(KeyboardInterrupt):
        pruner.recover(config(max_steps=2), control=True)
    assert pruner.report is not None and len(pruner.report.recovery) == 1
    assert pruner._stages.now == "recovered" and pruner._stages.control is None
    assert pruner.model.config.pruning_config["recovery"]


def test_nothing_better_is_no_stage_of_its_own(dense, monkeypatch):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    monkeypatch.setattr(module, "train", lambda *_: Trained(1, 0, None, []))
    report = pruner.recover(config(), control=True)
    assert report.control is not None and not report.kept and not report.control.kept
    assert pruner._stages.now == "pruned" and pruner._stages.control is None
    assert "recovery" not in pruner.model.config.pruning_config
    measure(pruner)
    assert list(pruner.evaluations) == ["dense", "pruned"]


def test_checkpoints_of_both(dense, tmp_path, monkeypatch):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    first = pruner.recover(config(max_steps=2), control=True, directory=tmp_path / "steps")
    assert (tmp_path / "steps" / "control" / "recovery.json").exists()
    again = Pruner.from_pretrained(dense)
    again.prune(CUT)
    monkeypatch.setattr(RecoveryTrainer, "compute_loss", lambda *_: pytest.fail("it was trained again"))
    second = again.recover(config(max_steps=2), control=True, directory=tmp_path / "steps")
    assert first.control is not None and second.control is not None
    assert second.after == first.after and second.control.after == first.control.after


def test_control_that_could_learn_nothing(dense):
    pruner = Pruner.from_pretrained(dense)
    pruner.prune(CUT)
    with pytest.raises(InvalidConfig, match="would train the dense model to be what it is"):
        pruner.recover(config(loss="kl"), control=True)


def test_a_second_recovery_takes_the_place_of_an_adapter(dense, caplog):
    pruner = Pruner.from_pretrained(dense)
    report = pruner.prune(CUT)
    assert pruner.recover(config(merge="none")).is_apart
    assert pruner.recover(config()).kept
    assert "The adapter of the recovery before is dropped" in caplog.text
    assert [found.is_apart for found in report.recovery] == [False]


def test_a_dict_is_no_config(dense):
    with pytest.raises(InvalidConfig, match="config must be a RecoveryConfig, got a dict"):
        Pruner.from_pretrained(dense).recover({"max_steps": 1})  # pyright: ignore[reportArgumentType]


# Defaults of torch


def whole_way(pruner, folder):
    """Prune, evaluate, recover and save in every layout; return what must not depend on torch's defaults."""
    pruner.prune(CUT)
    pruned = pruner.evaluate(IDS, seq_len=16, num_samples=8)
    report = pruner.recover(config(max_steps=2, evaluations=1))
    recovered = pruner.evaluate(IDS, seq_len=16, num_samples=8, latency=False)
    layouts = [pruner.save_pretrained(folder / layout, layout) for layout in ("compact", "padded")]
    pruner.save_pretrained(folder / "packed", storage="packed")
    losses = (report.before, report.after, report.merged)
    return bits(pruner.model), pruned.perplexity, losses, recovered.perplexity, layouts


def test_no_result_depends_on_the_defaults_of_torch(tmp_path):
    first, second = (Pruner(holes(llama())) for _ in range(2))
    plain = whole_way(first, tmp_path / "plain")
    with other_defaults(torch.float64):
        other = whole_way(second, tmp_path / "other")
    assert other == plain
    with other_defaults(torch.float64, device=None):  # transformers itself loads nothing to the meta device
        loaded = [Pruner.from_pretrained(tmp_path / "other" / name) for name in ("compact", "padded", "packed")]
        loaded[1].unpad()
    for pruner in loaded:
        assert bits(pruner.model) == plain[0]
