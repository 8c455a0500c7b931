"""`load_skeleton`: what `load_model` would load, without the weights, of which no file is read."""

import json

import pytest
import torch

from optimum_prune import CheckpointError, PruningConfig, UnsupportedArchitecture, UnsupportedModel, prune
from optimum_prune.evaluation import weight_bytes
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.integrations.loading import load_model, load_skeleton
from optimum_prune.planning.planner import make_plan
from tests.models import VARIANTS, llama, t5
from tests.pruned import unevenly


def described(model):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}


def without_weights(folder):
    """Delete all but the config."""
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return folder


@pytest.mark.parametrize("dtype", [None, "auto", "float16", torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_skeleton_is_what_loading_gives(name, dtype, tmp_path):
    VARIANTS[name]().bfloat16().save_pretrained(tmp_path)
    options = {} if dtype is None else {"dtype": dtype}
    model = load_model(tmp_path, **options)
    skeleton = load_skeleton(without_weights(tmp_path), **options)
    assert described(skeleton) == described(model) and skeleton.device.type == "meta"
    assert (skeleton.num_parameters(), weight_bytes(skeleton)) == (model.num_parameters(), weight_bytes(model))


@pytest.mark.parametrize("name", ["llama-gqa", "opt", "t5-gated", "llava"])
def test_compact_checkpoint(name, tmp_path):
    save_checkpoint(unevenly(VARIANTS[name]()), tmp_path)
    model = load_model(tmp_path)
    skeleton = load_skeleton(without_weights(tmp_path))
    assert described(skeleton) == described(model)
    assert not hasattr(skeleton, "hf_quantizer") and not skeleton.is_quantized
    config = PruningConfig(scorer="magnitude", sparsity=0.3)
    plans = make_plan(skeleton, config, skeleton=True), make_plan(model, config)
    assert plans[0] == plans[1]
    prune(model, config)
    assert model.num_parameters() in plans[0].after["parameters"]


def test_compact_checkpoint_of_another_version(tmp_path):
    save_checkpoint(unevenly(llama()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config))
    messages = []
    for load in (load_model, load_skeleton):
        with pytest.raises(CheckpointError, match="version 99") as raised:
            load(tmp_path)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_t5_keeps_float32_in_float16_alone(tmp_path):
    t5().save_pretrained(tmp_path)
    sizes = {dtype: described(load_skeleton(tmp_path, dtype=dtype)) for dtype in ("float16", "bfloat16")}
    wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    assert [sizes[dtype][wo][1] for dtype in sizes] == [torch.float32, torch.bfloat16]


def test_a_hub_id_needs_its_config_alone(tmp_path):
    """As the cache looks when nothing but `config.json` was ever fetched."""
    repository = tmp_path / "models--someone--small"
    snapshot = repository / "snapshots" / ("0" * 40)
    llama().config.save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    skeleton = load_skeleton("someone/small", cache_dir=tmp_path, local_files_only=True)
    assert described(skeleton) == described(llama())


def test_other_quantisations_are_refused_by_name(tmp_path):
    config = llama().config
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"is quantised \(gptq\)\. Prune the plain model"):
        load_skeleton(tmp_path)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ('{"model_type": "gpt2"}', UnsupportedArchitecture, "Unknown architecture 'gpt2'"),
        ("{", CheckpointError, "not a valid JSON file"),
        (None, CheckpointError, "cannot be loaded"),
        ('{"model_type": "llama", "num_attention_heads": 7}', CheckpointError, "not a multiple of the number"),
    ],
)
def test_errors_are_those_of_loading(content, error, message, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    messages = []
    for load in (load_model, load_skeleton):
        with pytest.raises(error, match=message) as raised:
            load(tmp_path)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
