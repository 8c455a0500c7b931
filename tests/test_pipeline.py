"""The whole way from a config to a cut model: repeatable, truthful, and harmless where it refuses."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaModel

from optimum_prune import (
    CalibrationConfig,
    CalibrationError,
    InductionConfig,
    InvalidConfig,
    PruningConfig,
    PruningError,
    UnsupportedArchitecture,
    UnsupportedModel,
    pipeline,
    refit,
    registry,
    structured,
)
from optimum_prune.binding import bind, select
from optimum_prune.configs import block_method
from optimum_prune.pipeline import prune
from optimum_prune.planning.planner import make_plan
from optimum_prune.scorers.base import Scorer
from optimum_prune.sizes import measure
from tests.damage import nan_norm, nan_weight, plain, quantised, renamed, shared
from tests.defaults import other_defaults
from tests.models import VARIANTS, llama, mistral, source, tokens
from tests.outputs import outputs

LENGTHS = (12, 5, 9, 12, 2, 7, 12, 4)
SAMPLES = [tokens(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]


def config(sparsity=0.3, **options) -> PruningConfig:
    calibration = options.pop("calibration", CalibrationConfig(SAMPLES, num_samples=len(SAMPLES)))
    return PruningConfig(sparsity=sparsity, calibration=calibration, **options)


def kept(report):
    return {group.name: group.kept for group in report.groups}


def state(model):
    """Everything that a refused run must leave alone, down to the bits of a NaN."""
    return {
        "values": {name: tensor.view(torch.uint8).tolist() for name, tensor in model.state_dict().items()},
        "config": model.config.to_dict(),
        "parameters": [id(parameter) for parameter in model.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grad": [parameter.grad for parameter in model.parameters()],
        "modules": [(id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "widths": [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)],
    }


EVERY = [
    (scorer, "2:4" if kind == "n:m" else kind)
    for scorer in registry.available("scorers")
    for kind in registry.load("scorers", scorer).patterns
]
"""Every scorer with each of its patterns."""


class TestTorchDefaults:
    """CASES.md 41."""

    @pytest.mark.parametrize(("scorer", "pattern"), EVERY)
    def test_no_result_depends_on_them(self, scorer, pattern):
        sparsity = None if pattern == "2:4" else 0.4
        calibration = CalibrationConfig(SAMPLES[:4], num_samples=4, seq_len=12)
        options = config(sparsity, pattern=pattern, scorer=scorer, calibration=calibration)
        plain = llama()
        report = prune(plain, options)
        model = llama()
        with other_defaults(torch.float64):
            planned = make_plan(model, options)
            again = prune(model, options)
        assert state(model)["values"] == state(plain)["values"]
        assert kept(again) == kept(report) and planned.asked == again.asked

    @pytest.mark.parametrize(
        "options",
        [
            {"pattern": "2:4", "scorer": "wanda", "induction": InductionConfig(epochs=1, allow_bias=True)},
            {"scorer": "taylor", "sparsity": 0.4, "steps": 2, "compensation": "sequential"},
            {"scorer": "wanda", "sparsity": 0.4, "calibration": CalibrationConfig("self", num_samples=4, seq_len=12)},
        ],
        ids=["induction", "steps", "self"],
    )
    def test_neither_what_else_a_run_does(self, options):
        plain, model = llama(), llama()
        prune(plain, PruningConfig(**{"calibration": CalibrationConfig(SAMPLES)} | options))
        with other_defaults(torch.float64):
            prune(model, PruningConfig(**{"calibration": CalibrationConfig(SAMPLES)} | options))
        assert state(model)["values"] == state(plain)["values"]


class TestRepeatable:
    """CASES.md 11."""

    @pytest.mark.parametrize("scorer", registry.available("scorers"))
    @pytest.mark.parametrize("source", [SAMPLES, "self"], ids=["tokens", "self"])
    def test_the_same_seed_twice(self, scorer, source):
        calibration = CalibrationConfig(source, num_samples=4, seq_len=16)
        pattern = registry.load("scorers", scorer).patterns[0]
        comparable = registry.load("scorers", scorer).comparable == "model"
        allocation = "global" if pattern in ("structured", "layers") and comparable else "auto"
        options = config(pattern=pattern, scorer=scorer, allocation=allocation, calibration=calibration)
        models = [llama() for _ in range(2)]
        first, again = (prune(model, options) for model in models)
        assert kept(first) == kept(again)
        assert state(models[0])["values"] == state(models[1])["values"]
        assert first.fingerprint == again.fingerprint

    def test_the_bits_of_the_models_too(self):
        models = [llama() for _ in range(2)]
        for model in models:
            prune(model, config())
        assert state(models[0])["values"] == state(models[1])["values"]

    def test_another_seed_draws_otherwise(self):
        by_score = [prune(llama(), config(scorer="random", seed=seed)) for seed in (0, 1)]
        assert kept(by_score[0]) != kept(by_score[1])
        calibrations = [CalibrationConfig("self", num_samples=4, seq_len=16, seed=seed) for seed in (0, 1)]
        by_data = [prune(llama(), config(calibration=calibration)) for calibration in calibrations]
        assert kept(by_data[0]) != kept(by_data[1])
        assert by_data[0].fingerprint != by_data[1].fingerprint

    def test_any_batch_size_gives_the_same_units(self):
        reports = [
            prune(llama(), config(calibration=CalibrationConfig(SAMPLES, num_samples=8, batch_size=size)))
            for size in (1, 3, 4, 8)
        ]
        assert all(kept(report) == kept(reports[0]) for report in reports)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_of_a_dataset_on_either_side(self, side):
        from datasets import Dataset

        blanks = [[0] * (12 - length) for length in LENGTHS]
        rows = {"input_ids": [], "attention_mask": []}
        for sample, blank in zip(SAMPLES, blanks, strict=True):
            ones = [1] * len(sample)
            rows["input_ids"].append(blank + sample if side == "left" else sample + blank)
            rows["attention_mask"].append(blank + ones if side == "left" else ones + blank)
        padded = config(calibration=CalibrationConfig(Dataset.from_dict(rows), num_samples=8))
        assert kept(prune(llama(), padded)) == kept(prune(llama(), config()))

    def test_whatever_the_config_calls_padding(self):
        models = [llama(pad_token_id=pad) for pad in (0, None, -1)]
        assert len({str(kept(prune(model, config()))) for model in models}) == 1

    def test_nothing_is_drawn_from_the_global_generator(self):
        model, before = llama(), torch.random.get_rng_state()
        prune(model, config(calibration=CalibrationConfig("self", num_samples=2, seq_len=8)))
        prune(model, config(scorer="random"))
        assert torch.equal(torch.random.get_rng_state(), before)


class TestReport:
    @pytest.mark.parametrize("name", [name for name in VARIANTS if name != "llama-mqa"])
    @pytest.mark.parametrize("allocation", ["uniform", "global", "gamma"])
    def test_says_what_a_recount_says(self, name, allocation):
        model = VARIANTS[name]()
        dense = copy.deepcopy(model)
        options = {"calibration": CalibrationConfig(source(model), num_samples=4, seq_len=12)}
        report = prune(model, config(0.4, allocation=allocation, round_to=4, **options))
        before, after = (select(bind(m)) for m in (dense, model))
        assert [group.name for group in report.groups] == [group.name for group in before]
        for group, old, new in zip(report.groups, before, after, strict=True):
            assert (group.before, group.after) == (old.num_units, new.num_units) and len(group.kept) == group.after
            assert group.weights_before == sum(linear.weight.numel() for linear in old.linears)
            assert group.weights_after == sum(linear.weight.numel() for linear in new.linears)
            width = old.writers[0].weight.unflatten(0, (old.num_units, -1))
            assert torch.equal(new.writers[0].weight, width[group.kept].flatten(0, 1))
        assert set(report.per_stack) == {group.stack for group in before}
        for stack, units in report.per_stack.items():
            for unit, figures in units.items():
                pairs = [p for p in zip(before, after, strict=True) if (p[0].stack, p[0].unit) == (stack, unit)]
                assert figures["before"] == sum(old.num_units for old, _ in pairs)
                assert figures["after"] == sum(new.num_units for _, new in pairs)
                gone = 1 - sum(new.weights for _, new in pairs) / sum(old.weights for old, _ in pairs)
                assert figures["achieved"] == pytest.approx(gone)
        gone = 1 - sum(group.weights for group in after) / sum(group.weights for group in before)
        assert report.achieved == pytest.approx(gone) and 0 < report.achieved <= 0.4 + 0.1
        assert (report.parameters_before, report.parameters_after) == (
            dense.num_parameters(),
            model.num_parameters(),
        )
        assert report.asked == 0.4 and report.allocation == allocation and report.model_type == model.config.model_type
        assert model.config.pruning_config == report.record()

    def test_gamma_counts_by_hand(self):
        # P_A = 2 (2+1) 4 4 = 96 and P_M = 3 48 = 144 per hidden dimension, g = 2: gamma = 1.5.
        # r_A = 0.3 240 / (96 + 1.5 144) = 0.2308 of 12 groups, r_M = 0.3462 of 144 channels.
        report = prune(llama(), config(0.3, round_to=1))
        assert (report.allocation, report.gamma) == ("gamma", {"model.layers": 1.5})
        figures = report.per_stack["model.layers"]
        assert figures["kv_group"]["before"] - figures["kv_group"]["after"] == 2
        assert figures["mlp_channel"]["before"] - figures["mlp_channel"]["after"] == 49
        assert figures["kv_group"]["asked"] == pytest.approx(72 / 312)
        assert figures["mlp_channel"]["asked"] == pytest.approx(1.5 * 72 / 312)

    def test_a_gamma_of_ones_own(self):
        report = prune(llama(), config(0.3, scorer="magnitude", gamma=3.0, round_to=1))
        assert (report.allocation, report.gamma) == ("gamma", {"model.layers": 3.0})
        asked = report.per_stack["model.layers"]
        assert asked["mlp_channel"]["asked"] == pytest.approx(3 * asked["kv_group"]["asked"])

    def test_what_was_asked_and_what_was_reachable(self):
        """CASES.md 4."""
        model = llama(num_attention_heads=16, num_key_value_heads=2, head_dim=4)
        report = prune(model, config(0.3, units=["kv_group"], allocation="uniform"))
        assert (report.asked, report.achieved) == (0.3, 0.5)
        assert report.per_stack["model.layers"]["kv_group"] == {"asked": 0.3, "achieved": 0.5, "before": 6, "after": 3}
        assert any("kv_group of model.layers: asked 30.0%, achieved 50.0%" in warning for warning in report.warnings)
        exact = prune(llama(), config(0.5, scorer="magnitude", allocation="uniform", round_to=1))
        assert exact.achieved == 0.5 and not exact.warnings

    def test_calibration_is_described(self):
        report = prune(llama(max_position_embeddings=131_072), config())  # CASES.md 10
        assert report.calibration is not None and report.calibration["tokens"] == sum(LENGTHS)
        assert (report.calibration["samples"], report.calibration["seq_len"]) == (8, 512)
        assert prune(llama(), config(scorer="magnitude")).calibration is None


class TestTargets:
    @pytest.mark.parametrize("allocation", ["uniform", "global"])
    def test_excluded_layers_keep_every_bit(self, allocation):
        model = llama()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        report = prune(model, config(0.4, allocation=allocation, exclude=["model.layers.1", "*.2.self_attn"]))
        assert list(kept(report)) == ["model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.2.mlp"]
        changed = {name for name, tensor in model.state_dict().items() if tensor.shape != before[name].shape}
        cut = {group.name for group in report.groups if group.after < group.before}
        assert cut and changed == {f"{name}.weight" for g in bind(model) if g.name in cut for name in g.linear_names}
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items() if name not in changed)

    @pytest.mark.parametrize("unit", ["kv_group", "mlp_channel"])
    @pytest.mark.parametrize("options", [{}, {"allocation": "gamma"}, {"allocation": "uniform"}], ids=str)
    def test_one_kind_of_unit(self, unit, options):
        model = llama()
        report = prune(model, config(0.5, units=[unit], round_to=1, **options))
        assert {group.unit for group in report.groups} == {unit} and report.gamma is None
        assert report.achieved == pytest.approx(0.5, abs=0.06)

    @pytest.mark.parametrize("unit", ["kv_group", "mlp_channel"])
    def test_gamma_with_one_kind_of_unit_is_refused(self, unit):
        with pytest.raises(InvalidConfig, match=r"gamma=2.0 couples MLP and attention, but only one of them is"):
            prune(llama(), config(0.5, units=[unit], gamma=2.0))

    def test_a_second_pruning_remembers_the_first(self):
        model = llama()
        model.config.name_or_path = "org/base"
        first = prune(model, config(0.3)).record()
        second = prune(model, config(0.3))
        third = prune(model, config(0.3))
        assert second.previous == [first]
        assert third.previous == [first, {k: v for k, v in second.record().items() if k != "previous"}]
        assert third.base_model == "org/base"
        assert model.config.pruning_config == third.record()
        assert first["achieved"]["parameters_after"] == second.parameters_before

    @pytest.mark.parametrize("wrong", [None, {"sparsity": 0.5}])
    def test_what_is_no_config_is_refused(self, wrong):
        with pytest.raises(InvalidConfig, match="config must be a PruningConfig, got a "):
            prune(llama(), wrong)

    def test_tied_embeddings_are_not_touched(self):
        """CASES.md 12."""
        model = llama(tie_word_embeddings=True)
        embedding = model.get_input_embeddings().weight
        before = embedding.detach().clone()
        prune(model, config(0.4, include=["*"]))
        assert model.get_input_embeddings().weight is embedding is model.get_output_embeddings().weight
        assert torch.equal(embedding, before) and embedding.grad is None

    @pytest.mark.parametrize("build", [llama, mistral])
    def test_uniform_gives_every_layer_the_same_sizes(self, build):
        model = build()
        prune(model, config(0.5, allocation="uniform"))
        assert set(map(str, measure(model)["model.layers"].values())) == {
            str({"num_key_value_heads": 2, "num_attention_heads": 4, "intermediate_size": 24})
        }
        assert block_method(model.config) is None and model.config.intermediate_size == 24

    @pytest.mark.parametrize("allocation", ["uniform", "global", "gamma"])
    def test_sparsity_zero_removes_nothing(self, allocation):
        model = llama(intermediate_size=37)
        before = state(model)
        report = prune(model, config(0.0, allocation=allocation))
        assert (report.asked, report.achieved) == (0.0, 0.0)
        assert report.parameters_before == report.parameters_after
        after = state(model)
        assert after.pop("config") == before.pop("config") | {"pruning_config": report.record()}
        assert after == before

    def test_a_pruned_model_can_be_pruned_again(self):
        model = llama()
        first = prune(model, config(0.2))
        second = prune(model, config(0.3))
        for once, twice in zip(first.groups, second.groups, strict=True):
            assert twice.before == once.after and twice.weights_before == once.weights_after
        assert second.parameters_before == first.parameters_after > second.parameters_after
        assert model.config.pruning_config == second.record()
        got = outputs(model)
        assert torch.equal(got["static"], got["uncached"]) and torch.equal(got["alone"], got["uncached"])

    def test_headless_models_and_classifiers(self):
        for model in (
            LlamaModel(llama().config),
            AutoModelForSequenceClassification.from_config(llama().config),
        ):
            before = model.num_parameters()
            report = prune(model, config(0.3, scorer="magnitude"))
            assert report.parameters_after == model.num_parameters() < before

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_other_dtypes_and_modes(self, dtype):
        """CASES.md 15."""
        model = llama().to(dtype).train()
        model.lm_head.requires_grad_(False)
        with torch.no_grad():
            prune(model, config(0.3))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert all(module.training for module in model.modules())
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["lm_head.weight"]

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_whatever_the_callers_grad_mode(self, mode):
        model = llama()
        with mode():
            report = prune(model, config())
        assert kept(report) == kept(prune(llama(), config()))
        model(tokens()).logits.sum().backward()  # and it can be trained
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_the_block_of_a_quantized_file_goes(self):
        """CASES.md 20: weights that were dequantised on loading are plain, whatever the config still says."""
        model = llama()
        model.config.quantization_config = {"quant_method": "gguf"}
        model.hf_quantizer = object()
        prune(model, config(0.5, allocation="uniform"))
        assert block_method(model.config) is None and not hasattr(model, "hf_quantizer")


def nan_head(model):
    model.lm_head.weight.data[0, 0] = torch.nan


def overflow(model):
    model.half().model.layers[2].mlp.down_proj.weight.data.fill_(6e4)


TOO_SHORT = CalibrationConfig([[]], num_samples=1)
OUTSIDE = CalibrationConfig([[1, 2, 96]], num_samples=1)
TEXT = CalibrationConfig(["some text"], num_samples=1)
REFUSED = [
    # CASES.md 14
    (plain, {"sparsity": 1.5}, InvalidConfig, r"sparsity must be in \[0, 1\), got 1\.5"),
    (plain, {"sparsity": float("nan")}, InvalidConfig, r"sparsity must be in \[0, 1\), got nan"),
    (plain, {"scorer": "magnitud"}, InvalidConfig, r"Unknown scorer 'magnitud'.*Did you mean 'magnitude'\?"),
    (plain, {"pattern": "2:4", "sparsity": 0.9}, InvalidConfig, "conflicts with pattern '2:4'"),
    (
        plain,
        {"exclude": ["no_such_layer"]},
        InvalidConfig,
        r"'no_such_layer'; supported: 'model\.layers\.\*\.self_attn'",
    ),
    (plain, {"include": ["lm_head"]}, InvalidConfig, "Unknown module pattern 'lm_head'"),
    (plain, {"exclude": ["*"]}, InvalidConfig, "Nothing is left to prune"),
    # what the allocation cannot give
    (plain, {"sparsity": 0.01}, InvalidConfig, r"kv_group: .*removes none"),
    (plain, {"sparsity": 0.97}, InvalidConfig, r"at most 9 can\. Lower the sparsity"),
    (
        plain,
        {"sparsity": 0.2, "round_to": 48, "units": ["mlp_channel"]},
        InvalidConfig,
        r"mlp_channel: .*rounding every kept count up to a multiple of 48 .*lower round_to",
    ),
    (
        plain,
        {"sparsity": 0.3, "allocation": "uniform", "round_to": 48, "units": ["mlp_channel"]},
        InvalidConfig,
        r"mlp_channel: .*removes none",
    ),
    # calibration
    (plain, {"calibration": TEXT}, CalibrationError, "need a tokenizer"),
    (plain, {"calibration": TOO_SHORT}, CalibrationError, "no usable tokens"),
    (plain, {"calibration": OUTSIDE}, CalibrationError, r"token id 96; .* 0 to 95"),
    (
        plain,
        {"calibration": CalibrationConfig(SAMPLES, seq_len=65)},
        CalibrationError,
        "max_position_embeddings 64, got 65",
    ),
    # CASES.md 9 and 15
    (nan_weight, {}, UnsupportedModel, r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"),
    (nan_norm, {}, UnsupportedModel, "output of model.layers.1 is not finite"),
    (nan_head, {}, UnsupportedModel, "output of the head is not finite"),
    (overflow, {}, UnsupportedModel, "output of model.layers.2 is not finite"),
    (shared, {}, UnsupportedModel, "is shared between"),
    (quantised, {}, UnsupportedModel, r"up_proj is a .*int8.*not a plain linear"),
    (renamed, {}, UnsupportedArchitecture, "Unknown architecture 'gpt_neox'"),
]


class TestRefusedRunsLeaveTheModelAlone:
    @pytest.mark.parametrize(
        ("spoil", "options", "error", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", None)
    )
    def test_by_name(self, spoil, options, error, message):
        model = llama().train()
        spoil(model)
        before = state(model)
        with pytest.raises(error, match=message):
            prune(model, config(**options))
        assert state(model) == before

    def test_one_kv_head(self):
        """CASES.md 5."""
        model = VARIANTS["llama-mqa"]()
        before = state(model)
        for options in ({"units": ["kv_group"]}, {"include": ["*.self_attn"]}, {"exclude": ["*.mlp.up_proj"]}):
            with pytest.raises(
                InvalidConfig, match=r"kv_group: 3 groups of 1 .*none of 1 can go.*units=\['mlp_channel'\]"
            ):
                prune(model, config(0.5, **options))
        assert state(model) == before
        assert prune(model, config(0.5, units=["mlp_channel"], round_to=1)).achieved == pytest.approx(0.5)

    def test_meta_weights(self):
        model = llama()
        model.model.layers[1].to("meta")
        shapes = [parameter.shape for parameter in model.parameters()]
        with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.k_proj\.weight is not in memory"):
            prune(model, config())
        assert [parameter.shape for parameter in model.parameters()] == shapes

    def test_peft(self):
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
        before = state(wrapped)
        with pytest.raises(UnsupportedModel, match="without wrappers"):
            prune(wrapped, config())
        assert state(wrapped) == before

    def test_a_model_without_logits(self):
        model = LlamaModel(llama().config)
        before = state(model)
        with pytest.raises(UnsupportedModel, match="LlamaModel gives no logits"):
            prune(model, config())
        assert state(model) == before

    def test_a_ranking_that_means_nothing(self, monkeypatch):
        scorer = Scorer("rowwise", lambda weight, statistics: weight.abs(), "", comparable="row")
        monkeypatch.setattr(
            registry,
            "load",
            lambda kind, name, load=registry.load: scorer if kind == "scorers" else load(kind, name),
        )
        model = llama()
        before = state(model)
        for allocation in ("global", "gamma"):
            with pytest.raises(
                InvalidConfig,
                match=rf"allocation='{allocation}'.* rowwise .*one layer.*Use allocation='uniform'",
            ):
                prune(model, config(allocation=allocation))
        assert state(model) == before
        assert prune(model, config(allocation="auto")).allocation == "uniform"

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
    def test_interrupted_while_scoring(self, error):
        model, calls = llama().train(), []

        def hook(*_):
            calls.append(1)
            if len(calls) == 4:  # in the backward: a batch of 8 samples is two forwards
                raise error

        model.model.layers[2].register_forward_hook(hook)
        before = state(model)
        with pytest.raises(error):
            prune(model, config())
        assert state(model) == before

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no more")])
    @pytest.mark.parametrize(("owner", "name"), [(refit.Refit, "write_"), (pipeline, "PruningReport")])
    def test_interrupted_while_writing_says_so(self, monkeypatch, owner, name, error):
        original = getattr(owner, name)

        def failing(*given, **options):
            original(*given, **options)
            raise error

        monkeypatch.setattr(owner, name, failing)
        with pytest.raises(PruningError, match=r"interrupted .*the model is partly pruned\. Load it again") as raised:
            prune(llama(), config())
        assert raised.value.__cause__ is error

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no more")])
    def test_interrupted_between_cuts_says_so(self, monkeypatch, error):
        cuts = []

        def failing(group, keep, slice_=structured.slice_):
            if len(cuts) == 3:
                raise error
            cut = slice_(group, keep)
            if not group.linears[0].weight.is_meta:  # not in the skeleton that is cut on trial
                cuts.append(cut)

        monkeypatch.setattr(structured, "slice_", failing)
        with pytest.raises(PruningError, match=r"interrupted .*the model is partly pruned\. Load it again") as raised:
            prune(llama(), config())
        assert raised.value.__cause__ is error
