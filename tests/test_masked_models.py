"""Every kind of model, with zeros: exactly as many as asked, nothing else changed, and loaded again."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

import copy
import json

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from optimum_prune import (
    CalibrationConfig,
    CalibrationError,
    Pruner,
    UnsupportedModel,
    registry,
)
from optimum_prune.calibration.samples import CalibrationData
from optimum_prune.configs import block_method
from optimum_prune.masking import find_mask_targets
from optimum_prune.masks import removed_of
from optimum_prune.pipeline import prune
from tests.calibration.conftest import picture, processor  # noqa: F401 - a fixture
from tests.models import IMAGE_TOKEN, VARIANTS, inputs, llama, llava, t5, tokens
from tests.outputs import outputs
from tests.processes import answer
from tests.zeroed import (
    CALIBRATED,
    LENGTHS,
    SCORERS,
    assert_only_these_changed,
    bits,
    config,
    dead_inputs,
    excluded,
    for_model,
    linears_of,
    removed,
    state,
    targeted,
    zeros,
)


class TestEveryModel:
    @pytest.mark.parametrize("name", VARIANTS)
    @pytest.mark.parametrize("scorer", ["wanda", "admm", "magnitude"])
    def test_two_of_four(self, name, scorer):
        model = VARIANTS[name]()
        before, config_before = state(model), copy.deepcopy(model.config.to_dict())
        report = prune(model, config(scorer=scorer, exclude=excluded(model, 4), calibration=for_model(model)))
        names = [name for name, linear in targeted(model).items() if linear.in_features % 4 == 0]
        assert [group.name for group in report.groups] == names and len(names) > 12
        for name in names:
            gone = (linears_of(model)[name].weight.unflatten(1, (-1, 4)) == 0).sum(dim=2)
            # ADMM makes zeros of all that reads nothing, which a ReLU may do.
            assert (gone >= 2).all() if dead_inputs(report, name) else (gone == 2).all(), name
        assert_only_these_changed(model, before, names)
        assert (report.asked, report.allocation) == (0.5, "row")
        assert report.achieved == 0.5 or report.warnings
        assert model.config.to_dict() == config_before | {"pruning_config": report.record()}

    @pytest.mark.parametrize("name", VARIANTS)
    @pytest.mark.parametrize("scorer", ["sparsegpt", "wanda", "magnitude"])
    def test_unstructured(self, name, scorer):
        model = VARIANTS[name]()
        before = state(model)
        report = prune(model, zeros(scorer=scorer, sparsity=0.3, calibration=for_model(model, samples=8)))
        for linear_name, linear in targeted(model).items():
            if scorer == "wanda":
                assert ((linear.weight == 0).sum(dim=1) == removed_of(linear.in_features, 0.3)).all()
            elif not dead_inputs(report, linear_name):
                assert removed(linear) == removed_of(linear.weight.numel(), 0.3), linear_name
        assert_only_these_changed(model, before, targeted(model))
        assert report.achieved == pytest.approx(0.3, abs=0.02)

    @pytest.mark.parametrize("name", ["t5", "llava", "opt"])
    @pytest.mark.parametrize("scorer", SCORERS)
    def test_groups_that_divide_no_block(self, name, scorer):
        width, reader = {"t5": ("d_ff", "wo"), "opt": ("ffn_dim", "fc2"), "llava": (None, "down_proj")}[name]
        model = VARIANTS[name](**{width: 165} if width else {})
        options = {"include": [f"*.{reader}"], "calibration": for_model(model, samples=16)}
        report = prune(model, config("1:3", scorer=scorer, **options))
        assert len(report.groups) in (3, 6)
        for group in report.groups:
            weight = linears_of(model)[group.name].weight
            least = 1 if not dead_inputs(report, group.name) else 2
            assert ((weight.unflatten(1, (-1, 3)) == 0).sum(dim=2) >= 1).all()
            assert (group.weights_before - group.weights_after == weight.numel() // 3) or least == 2

    def test_both_stacks_of_t5_by_default(self):
        model = t5()
        report = prune(model, config(calibration=for_model(model)))
        assert set(report.per_stack) == {"encoder.block", "decoder.block"}
        assert any("EncDecAttention" in group.name for group in report.groups)

    def test_one_stack_alone(self):
        model = t5()
        before = state(model)
        report = prune(model, zeros(stacks=["decoder"], calibration=for_model(model, samples=8)))
        names = [name for name in targeted(model) if name.startswith("decoder")]
        assert [group.name for group in report.groups] == names
        assert_only_these_changed(model, before, names)

    @pytest.mark.parametrize("scorer", SCORERS)
    def test_a_tower_with_pictures(self, scorer, processor):  # noqa: F811
        model = llava()
        before = state(model)
        table = Dataset.from_dict(
            {"text": ["w3 w4 w5 w6 w7", "w8 w9 w10", "w11 w12 w13"] * 2, "image": [picture(40 * i) for i in range(6)]}
        )
        options = config(
            scorer=scorer, stacks=["vision", "language"], calibration=CalibrationConfig(table, num_samples=6)
        )
        report = prune(model, options, processor=processor)
        names = linears_of(model)
        assert any("vision" in name for name in names) and any("language" in name for name in names)
        for linear in names.values():
            assert ((linear.weight.unflatten(1, (-1, 4)) == 0).sum(dim=2) == 2).all()
        assert_only_these_changed(model, before, names)
        assert set(report.per_stack) == {"model.vision_tower.encoder.layers", "model.language_model.layers"}

    @pytest.mark.parametrize("pattern", [{}, {"pattern": "unstructured", "sparsity": 0.5}])
    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_a_tower_without_pictures(self, pattern, scorer):
        model = llava()
        before = bits(model)
        with pytest.raises(
            CalibrationError,
            match=r"Stack 'vision' of LlavaForConditionalGeneration reads nothing but images.*image_column",
        ):
            prune(model, config(**pattern, scorer=scorer, stacks=["vision", "language"], calibration=for_model(model)))
        assert bits(model) == before
        prune(model, config(scorer="magnitude", stacks=["vision", "language"]))

    def test_a_tied_head_stays(self):
        """CASES.md 12."""
        model = VARIANTS["llama-tied-biased"]()
        embedding, before = model.get_input_embeddings().weight, state(model)
        for pattern in (config(include=["*"]), zeros(include=["*"])):
            prune(model, pattern)
            assert model.get_input_embeddings().weight is embedding is model.get_output_embeddings().weight
            assert torch.equal(embedding, before["model.embed_tokens.weight"])
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if "bias" in name)


def test_images_of_one_sample_may_be_several():
    """Samples of one and of two pictures go in batches of their own, and both count."""
    model = llava()
    given = inputs(model, batch=3)
    patches = torch.full((4,), IMAGE_TOKEN)
    samples = [*given["input_ids"][:2], torch.cat([patches, given["input_ids"][2]])]
    images = [*given["pixel_values"][:2, None], given["pixel_values"][[2, 0]]]
    data = CalibrationData(samples, 12, "test", images=images, image_token=IMAGE_TOKEN)
    scorer, options = registry.load("scorers", "wanda"), config(scorer="wanda", stacks=["vision"])
    targets = find_mask_targets(model, options, scorer)
    groups = targets.prune_(model, scorer, data, options)
    assert {group.weights_after / group.weights_before for group in groups} == {0.5}


# What plain transformers loads again

LOADED = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tests.outputs import load, outputs
found = {}
for folder in sys.argv[1:]:
    model, complaints = load(folder)
    save_file(outputs(model), Path(folder) / "outputs.safetensors")
    found[Path(folder).name] = [len(complaints), getattr(model.config, "quantization_config", None) is None]
assert "optimum_prune" not in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root, expected = tmp_path_factory.mktemp("masked"), {}
    for i, (name, build) in enumerate(VARIANTS.items()):
        pruner = Pruner(build())
        options = {"exclude": excluded(pruner.model, 4), "calibration": for_model(pruner.model)}
        pruner.prune(
            config(scorer=SCORERS[i % 5], **options)
            if i % 2
            else zeros(scorer=SCORERS[i % 5], calibration=for_model(pruner.model))
        )
        assert pruner.save_pretrained(root / name) == "stock"
        expected[name] = (outputs(pruner.model), state(pruner.model), pruner.report)
    return root, expected, answer(LOADED, *(root / name for name in expected))


@pytest.mark.parametrize("name", VARIANTS)
def test_plain_transformers_computes_the_same(saved, name):
    root, expected, found = saved
    assert found[name] == [0, True]
    got = load_file(root / name / "outputs.safetensors")
    assert got.keys() == expected[name][0].keys()
    assert all(torch.equal(tensor, expected[name][0][kind]) for kind, tensor in got.items())


def test_what_lies_beside_the_weights(saved):
    root, expected, _ = saved
    for name, (_, _, report) in expected.items():
        written = json.loads((root / name / "config.json").read_text())["pruning_config"]
        assert written == json.loads(json.dumps(report.record())) | {"layout": "stock"}
        assert not {"skipped", "dropped_layers"} & written.keys()
        assert written["recipe"]["pattern"] in ("2:4", "unstructured")
        assert written["achieved"]["parameters_before"] == written["achieved"]["parameters_after"]
        assert json.loads((root / name / "pruning_report.json").read_text())["achieved"] == report.achieved


# Dtypes, modes, devices


class TestOtherModels:
    """CASES.md 15."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("scorer", SCORERS)
    def test_dtypes_and_modes(self, dtype, scorer):
        model = llama().to(dtype).train()
        model.lm_head.requires_grad_(False)
        parameters = list(map(id, model.parameters()))
        with torch.no_grad():
            prune(model, config(scorer=scorer))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert list(map(id, model.parameters())) == parameters
        assert all(module.training for module in model.modules())
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
        for linear in linears_of(model).values():
            gone = linear.weight.detach()[linear.weight == 0]
            assert len(gone) == linear.weight.numel() // 2 and not torch.signbit(gone).any()

    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_a_bfloat16_t5_with_a_float32_wo(self, scorer):
        model = t5().bfloat16()
        for name, linear in linears_of(model).items():
            if name.endswith(".wo"):
                linear.float()
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        report = prune(model, config(scorer=scorer, calibration=for_model(model, samples=8)))
        assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
        assert set(dtypes.values()) == {torch.bfloat16, torch.float32} and report.achieved >= 0.5

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    @pytest.mark.parametrize("scorer", CALIBRATED)
    def test_whatever_the_callers_grad_mode(self, mode, scorer):
        models = [llama() for _ in range(2)]
        prune(models[0], config(scorer=scorer))
        with mode():
            expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            prune(models[1], config(scorer=scorer))
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == expected
        assert bits(models[0]) == bits(models[1])
        models[1](tokens()).logits.sum().backward()  # and it can be trained
        assert all(parameter.grad is not None for parameter in models[1].parameters())

    def test_the_block_of_a_quantized_file_goes(self):
        """CASES.md 20."""
        model = llama()
        model.config.quantization_config = {"quant_method": "gguf"}
        model.hf_quantizer = object()
        prune(model, config(scorer="wanda"))
        assert block_method(model.config) is None and not hasattr(model, "hf_quantizer")

    def test_offloaded_weights(self, tmp_path):
        from accelerate import disk_offload

        for scorer in SCORERS:
            model = llama()
            disk_offload(model.model.layers[1], tmp_path / scorer, execution_device="cpu")
            with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.k_proj\.weight is not in memory"):
                prune(model, config(scorer=scorer))
            # Where it is left alone, it runs from the disk.
            before = state(model)
            prune(model, config(scorer=scorer, exclude=["model.layers.1"]))
            assert any(not torch.equal(t, before[n]) for n, t in model.state_dict().items() if not t.is_meta)

    def test_a_long_context_is_not_taken_literally(self):
        """CASES.md 10."""
        model = llama(max_position_embeddings=131_072)
        report = prune(model, config())
        assert report.calibration["tokens"] == sum(LENGTHS) and "57 tokens" in str(report)
