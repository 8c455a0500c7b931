"""Inputs go where the model can use them, whatever of it is offloaded."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset

from optimum_prune import CalibrationConfig, Pruner, PruningConfig
from optimum_prune.calibration.devices import input_device, moved
from tests.calibration.conftest import build_processor, picture
from tests.models import llama, llava, source

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS = Dataset.from_dict({"image": [picture(0), picture(50)], "text": ["w3 w4", "w5 w6"]})


def without(model, *modules):
    """Offload some modules; their weights are on no device between two calls."""
    for name in modules:
        cpu_offload(model.get_submodule(name), execution_device=CPU)
    return model


def test_the_first_weight_in_memory_decides():
    model = llava()
    model.model.vision_tower.to("meta")
    assert (model.device, input_device(model)) == (META, CPU)
    model = llama().to("meta")
    model.model.norm.to_empty(device=CPU)
    assert (model.device, input_device(model)) == (META, CPU)


def test_a_model_without_a_weight_in_memory_gets_its_inputs_on_the_cpu():
    model = without(llama(), "")
    assert {weight.device for weight in model.parameters()} == {META}
    batch = moved({"input_ids": torch.ones(1, 3, dtype=torch.int64)}, model)
    assert batch["input_ids"].device == CPU
    assert model(**batch).logits.shape == (1, 3, 96)


@pytest.mark.parametrize(("build", "first"), [(llava, "model.vision_tower"), (llama, "model.embed_tokens")])
@pytest.mark.parametrize("options", [{"round_to": 1}, {"pattern": "layers"}])
def test_a_run_with_the_first_weight_offloaded_is_that_of_the_whole_model(build, first, options):
    reports, evaluations = [], []
    for model in (build(), without(build(), first)):
        assert model.device == (META if reports else CPU)
        data = ROWS if build is llava else source(model)
        pruner = Pruner(model, processor=build_processor() if build is llava else None)
        config = PruningConfig(sparsity=0.34, calibration=CalibrationConfig(data, batch_size=2), **options)
        reports.append(pruner.prune(config))
        evaluations.append(pruner.evaluate(data, latency=False))
    kept = [{group.name: group.kept for group in report.groups} for report in reports]
    assert kept[0] == kept[1]
    assert evaluations[0].perplexity == evaluations[1].perplexity
    assert [evaluation.device for evaluation in evaluations] == ["cpu", "cpu"]


def test_a_model_with_offloaded_embeddings_writes_its_own_samples():
    config = PruningConfig(sparsity=0.3, calibration=CalibrationConfig("self", num_samples=2, seq_len=8))
    whole, part = (Pruner(model).prune(config) for model in (llama(), without(llama(), "model.embed_tokens")))
    assert [group.kept for group in whole.groups] == [group.kept for group in part.groups]
