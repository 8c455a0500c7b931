"""A plan of something impossible raises what the run would raise: the same error, before the same model changes."""
# pyright: reportArgumentType=false

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import LlamaModel

from optimum_prune import (
    CalibrationConfig,
    CalibrationError,
    CheckpointError,
    Pruner,
    PruningConfig,
    PruningError,
    UnsupportedModel,
)
from optimum_prune.integrations.loading import load_skeleton
from optimum_prune.planning.planner import make_plan
from tests.calibration.conftest import build_processor
from tests.damage import nan_weight, on_meta, quantised, renamed, shared
from tests.models import VARIANTS, llama, llava, qwen2, t5
from tests.words import tokenizer


def wrapped(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def adapted(model):
    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def startless(model):
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None


def data(source=None, **options):
    return {"scorer": "ntk", "calibration": CalibrationConfig(source or [[1, 2, 3]], **options)}


VISION = {"stacks": ["vision"], "round_to": 1}
IMAGES = Dataset.from_dict({"image": [Image.new("RGB", (16, 16))] * 2, "text": ["w3 w4", "w5"]})


def zeros(pattern="unstructured", **options):
    sparsity = {"sparsity": None} if ":" in pattern else {}
    return {"pattern": pattern} | sparsity | options


REFUSED = [
    # what shapes cannot give
    (llama, None, {"sparsity": 0.01, "allocation": "uniform"}),
    (llama, None, {"sparsity": 0.97, "allocation": "global"}),
    (llama, None, {"sparsity": 0.01, "units": ["mlp_channel"], "round_to": 48}),
    (llama, None, {"round_to": 48, "allocation": "global", "units": ["mlp_channel"]}),
    (llama, None, {"exclude": ["no_such_layer"]}),
    (llama, None, {"include": ["lm_head"]}),
    (llama, None, {"exclude": ["*"]}),
    (llama, None, {"stacks": ["vision"]}),
    (llama, None, {"gamma": 2.0, "units": ["mlp_channel"]}),
    (VARIANTS["llama-mqa"], None, {"units": ["kv_group"]}),
    (t5, None, {"include": ["encoder.block.1"]}),
    (llama, None, {"pattern": "layers", "sparsity": 0.9}),
    (llama, None, {"pattern": "layers", "scorer": "magnitude"}),
    (t5, None, {"pattern": "layers", "units": ["attention"]}),
    (llama, None, zeros("2:7")),
    (llama, None, zeros("3:64", include=["*.1.mlp"])),
    (llama, None, zeros(sparsity=0.01, allocation="row")),
    (llama, None, zeros(sparsity=1e-4)),
    (llama, None, zeros(exclude=["no_such_layer"])),
    (llama, None, zeros(include=["lm_head"])),
    (llama, None, zeros(exclude=["*"])),
    (llama, None, zeros(stacks=["vision"])),
    (llama, None, zeros(sparsity={"no_such_layer": 0.5})),
    (llama, None, zeros(sparsity={"*.mlp": 0.5}, allocation="global")),
    (llama, None, zeros(sparsity={"*.mlp": 0.5, "*.1.*": 0.2})),
    (llama, None, zeros(scorer="ntk")),
    (llama, None, zeros(scorer="wanda", allocation="global")),
    (llama, None, zeros(scorer="admm", allocation="matrix")),
    # what the weights or modules are
    (llama, nan_weight, {}),
    (llama, on_meta, {}),
    (llama, shared, {}),
    (llama, quantised, {}),
    (llama, renamed, {}),
    (llama, wrapped, {}),
    (llama, adapted, {}),
    (llama, nan_weight, zeros("2:4")),
    (llama, on_meta, zeros()),
    (llama, shared, zeros()),
    (llama, quantised, zeros("2:4")),
    (llama, wrapped, zeros()),
    # calibration
    (llama, None, data(seq_len=65)),
    (llama, None, data("no.txt")),
    (llama, None, data("text")),  # no such data set, and no network
    (llama, None, data(["w3 w4"])),  # no tokenizer
    (llama, None, data(["w3 w4"], target_column="answer")),
    (qwen2, None, data(["w3 w4"], image_column="image")),
    (llama, None, data(seq_len=65) | zeros("2:4", scorer="wanda")),
    (llama, None, data("no.txt") | zeros(scorer="sparsegpt")),
    (llama, None, data(["w3 w4"]) | zeros(scorer="admm")),
    (t5, None, data("self") | zeros(scorer="wanda")),
    (t5, None, data("self")),
    (t5, None, data(["w3 w4"])),
    (t5, None, data([[4, 5, 6]])),  # no sentinels for span corruption
    (t5, startless, data(["w3 w4"])),
    (llava, None, data([[4, 5, 6]]) | VISION),
    (llava, None, data("self") | VISION),
    (llava, None, data(IMAGES.rename_column("image", "photo")) | VISION),
    (llava, None, data(IMAGES)),  # no processor
    (llava, None, data(IMAGES) | VISION),
    (lambda: LlamaModel(llama().config), None, data("self")),
]


@pytest.mark.parametrize(("build", "spoil", "options"), REFUSED)
def test_plan_refuses_what_the_run_refuses(build, spoil, options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = build()
    model = (spoil and spoil(model)) or model
    scorer = "random" if options.get("pattern") == "layers" else "magnitude"
    config = PruningConfig(**{"scorer": scorer, "sparsity": 0.3} | options)
    before = {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()}
    refusals = []
    for attempt in (Pruner.plan, Pruner.prune):
        with pytest.raises(PruningError) as raised:
            attempt(Pruner(model), config)  # a wrapped model is refused by the Pruner itself
        refusals.append((type(raised.value), str(raised.value)))
        assert {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters()} == before
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize("config", [None, {"sparsity": 0.2}])
def test_another_config(config):
    for attempt in (Pruner(llama()).plan, Pruner(llama()).prune):
        with pytest.raises(PruningError, match="config must be a PruningConfig, got a "):
            attempt(config)


def test_text_with_a_tokenizer_is_not_read():
    config = PruningConfig(sparsity=0.3, **data(["this is not of its vocabulary"] * 9))
    plan = Pruner(llama(), tokenizer()).plan(config)
    assert plan.config == config.to_dict()


def test_images_with_a_processor_are_not_read():
    plan = Pruner(llava(), processor=build_processor()).plan(PruningConfig(sparsity=0.3, **data(IMAGES) | VISION))
    assert {group.stack for group in plan.groups} == {"model.vision_tower.encoder.layers"}


def test_a_skeleton_is_refused_for_a_tower_without_images_but_not_for_want_of_a_processor(tmp_path):
    llava().config.save_pretrained(tmp_path)
    skeleton = load_skeleton(tmp_path)
    make_plan(skeleton, PruningConfig(sparsity=0.3, **data(IMAGES) | VISION), skeleton=True)
    with pytest.raises(CalibrationError, match="Stack 'vision' of LlavaForConditionalGeneration reads nothing but"):
        make_plan(skeleton, PruningConfig(sparsity=0.3, **data("self") | VISION), skeleton=True)


def test_a_skeleton_is_not_refused_for_what_it_cannot_have(tmp_path):
    t5(decoder_start_token_id=None).config.save_pretrained(tmp_path)
    skeleton = load_skeleton(tmp_path)
    make_plan(skeleton, PruningConfig(sparsity=0.3, **data(["w3 w4"])), skeleton=True)
    with pytest.raises(UnsupportedModel, match="is not in memory"):
        Pruner(skeleton).plan(PruningConfig(sparsity=0.3, scorer="magnitude"))


@pytest.mark.parametrize("devices", [0, -1, 1.5, True, "2"])
def test_devices(devices):
    with pytest.raises(PruningError, match="tensor_parallel must be an integer >= 1, got "):
        Pruner(llama()).plan(PruningConfig(sparsity=0.3, scorer="magnitude"), tensor_parallel=devices)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_skeleton(tmp_path / "nowhere")
