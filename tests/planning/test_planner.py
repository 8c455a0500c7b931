"""The planner: what it says is what the run does, exactly or within bounds; and it refuses what the run refuses."""
# pyright: reportArgumentType=false

import json
from time import perf_counter

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, T5ForConditionalGeneration

from optimum_prune import CalibrationConfig, InvalidConfig, Pruner, PruningConfig, PruningError, prune
from optimum_prune.bounds import Range
from optimum_prune.evaluation import weight_bytes
from optimum_prune.planning.planner import make_plan
from optimum_prune.planning.table import compressed
from optimum_prune.sizes import why_not_stock
from tests.models import VARIANTS, inputs, llama, source, t5, tokens
from tests.pruned import unevenly

# What can be counted on a model

SHORT = 5  # tokens: fewer than the sliding windows of the small models, beyond which nothing is kept


def measured(model: PreTrainedModel) -> dict[str, int]:
    """Count on a live model what a plan predicts; keys and values in the caches of a forward."""
    given = inputs(model, batch=1, length=12)
    if "pixel_values" not in given:
        given = inputs(model, batch=1, length=SHORT + 3 * model.config.is_encoder_decoder)
    with torch.no_grad():
        cache = model(**given, use_cache=True).past_key_values
    found = {"parameters": model.num_parameters(), "weight_bytes": weight_bytes(model)}
    if model.config.is_encoder_decoder:
        return found | {
            "cache_bytes_per_output_token": per_token(cache.self_attention_cache, given["decoder_input_ids"]),
            "cache_bytes_per_input_token": per_token(cache.cross_attention_cache, given["input_ids"]),
        }
    return found | {"cache_bytes_per_token": per_token(cache, given["input_ids"])}


def per_token(cache, ids: torch.Tensor) -> int:
    layers = [layer for layer in cache.layers if layer.keys is not None]  # skipped attention puts nothing in
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert held % ids.numel() == 0
    return held // ids.numel()


# The plan and the run

CONFIGS = {
    "uniform-0.25": {"sparsity": 0.25, "allocation": "uniform"},
    "uniform-0.5-odd": {"sparsity": 0.5, "allocation": "uniform", "round_to": 1},
    "global": {"sparsity": 0.5, "allocation": "global"},
    "global-odd": {"sparsity": 0.37, "allocation": "global", "round_to": 1},
    "gamma": {"sparsity": 0.4, "allocation": "gamma", "round_to": 4},
    "gamma-2": {"sparsity": 0.4, "allocation": "gamma", "gamma": 2.0, "round_to": 6},
    "heads": {"sparsity": 0.5, "allocation": "global", "units": ["kv_group"]},
    "channels": {"sparsity": 0.3, "allocation": "global", "units": ["mlp_channel"], "round_to": 16},
    "include": {"sparsity": 0.5, "allocation": "global", "units": ["mlp_channel"], "include": ["*.1.*"]},
    "exclude": {"sparsity": 0.4, "allocation": "global", "units": ["mlp_channel"], "exclude": ["*.2.*"]},
}
DEPTH = {
    "blocks": {},
    "any-block": {"keep_first": 0, "keep_last": 0, "sparsity": 0.6},
    "sublayers": {"units": ["attention", "mlp"]},
    "attention": {"units": ["attention"], "keep_last": 0, "sparsity": 0.5},
}
ZEROS = {
    "2:4": {"pattern": "2:4"},
    "3:8": {"pattern": "3:8", "exclude": ["*.1.*"]},
    "auto": {"sparsity": 0.55},
    "row": {"sparsity": 0.3, "allocation": "row"},
    "matrix": {"sparsity": 0.37, "allocation": "matrix"},
    "global": {"sparsity": 0.4, "allocation": "global"},
    "shares": {"sparsity": {"*.0.*": 0.0, "*.1.*": 0.37, "*.2.*": 0.8}},
}
SEVERAL = {
    "encoder": {"sparsity": 0.3, "stacks": ["encoder"], "allocation": "uniform"},
    "decoder": {"sparsity": 0.4, "stacks": ["decoder"], "allocation": "gamma"},
    "vision": {"sparsity": 0.3, "stacks": ["vision"], "allocation": "uniform", "round_to": 4},
    "both": {"sparsity": 0.3, "stacks": ["vision", "language"], "allocation": "global"},
    "decoder-blocks": {"pattern": "layers", "sparsity": 0.3, "stacks": ["decoder"]},
    "encoder-blocks": {"pattern": "layers", "sparsity": 0.6, "stacks": ["encoder"], "keep_first": 0},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("config", CONFIGS)
def test_plan_is_what_the_run_does(name, config):
    compare(VARIANTS[name], CONFIGS[config], "magnitude", "random")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("config", DEPTH)
def test_plan_of_depth_is_what_the_run_does(name, config):
    compare(VARIANTS[name], {"pattern": "layers", "sparsity": 0.34} | DEPTH[config], "random")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("config", ZEROS)
def test_plan_of_zeros_is_what_the_run_does(name, config):
    compare(VARIANTS[name], {"pattern": "unstructured"} | ZEROS[config], "magnitude", "random", "wanda")


@pytest.mark.parametrize("name", ["t5", "t5-gated", "llava"])
@pytest.mark.parametrize("config", SEVERAL)
def test_plan_of_some_stacks(name, config):
    compare(VARIANTS[name], SEVERAL[config], "random")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("config", [CONFIGS["gamma"], {"pattern": "layers", "keep_first": 0, "keep_last": 0}])
@pytest.mark.parametrize("name", ["llama-gqa", "t5", "llava"])
def test_plan_of_a_pruned_model(name, config, seed):
    """Layers differ in size here, so what goes with those that are chosen depends on the scores."""
    compare(lambda: unevenly(VARIANTS[name]()), {"sparsity": 0.3, "seed": seed} | config, "random")


def test_bounds_of_layers_are_reached():
    config = {"pattern": "layers", "scorer": "random", "sparsity": 0.3, "keep_first": 0, "keep_last": 0}
    plan = make_plan(unevenly(llama()), PruningConfig(**config))
    seen = set()
    for seed in range(8):
        model = unevenly(llama())
        seen.add(prune(model, PruningConfig(seed=seed, **config)).parameters_after)
    assert plan.after["parameters"] == Range(min(seen), max(seen)) and not plan.exact
    assert plan.layout.layout == "undecided"


@pytest.mark.parametrize("name", VARIANTS)
def test_equal_blocks_make_an_exact_plan(name):
    """The first block of T5 has a table more, but that moves to the next."""
    config = {"pattern": "layers", "scorer": "random", "sparsity": 0.3, "keep_first": 0, "keep_last": 0}
    assert make_plan(VARIANTS[name](), PruningConfig(**config)).exact


def compare(build, config, *scorers):
    """Plan runs and do them."""
    for scorer in scorers:
        model = build()
        given = PruningConfig(scorer=scorer, calibration=CalibrationConfig(source(model)), **config)
        try:
            plan = make_plan(model, given)
        except PruningError as refusal:
            with pytest.raises(type(refusal)) as raised:
                prune(model, given)
            assert str(raised.value) == str(refusal)
            continue
        assert plan.before == measured(model)
        try:
            report = prune(model, given)
        except InvalidConfig as refusal:  # what only the scores can tell; the plan warns of it
            assert "spares what" in str(refusal)
            assert any("may spare all" in warning for warning in plan.warnings)
            continue
        agree(plan, report, model)


def agree(plan, report, model):
    """Compare a plan with the report of the run, and with the pruned model."""
    after = measured(model)
    assert {name: after[name] in plan.after[name] for name in after} == dict.fromkeys(plan.after, True)
    for planned, group in zip(sorted(plan.groups, key=by_name), sorted(report.groups, key=by_name), strict=True):
        assert (planned.name, planned.unit, planned.now) == (group.name, group.unit, group.before)
        assert group.after in planned.kept
        assert planned.reachable is None or group.after in planned.reachable
    for total in plan.totals:
        found = report.per_stack[total.stack][total.unit]
        assert found["before"] - found["after"] in total.removed and found["asked"] == total.asked
        assert total.achieved[0] - 1e-12 <= found["achieved"] <= total.achieved[1] + 1e-12
    if plan.exact:
        assert plan.after == {name: Range(count, count) for name, count in after.items()}
        assert certain(plan.warnings) == certain(report.warnings)
    layout = "stock" if why_not_stock(model) is None else "compact"
    assert plan.layout.layout in (layout, "undecided")


def certain(warnings):
    """Leave out what data or scores decide."""
    depends = ("zero on all calibration tokens", "follow the rule of the model's class")
    return [warning for warning in warnings if not any(words in warning for words in depends)]


def by_name(group):
    return group.name


# Cases


def test_few_kv_heads():
    """CASES.md 4: what can be reached is listed before anything is touched."""
    model = llama(num_attention_heads=16, num_key_value_heads=2)
    plan = Pruner(model).plan(PruningConfig(scorer="magnitude", sparsity=0.3, allocation="uniform"))
    heads = [group for group in plan.groups if group.unit == "kv_group"]
    assert [(group.now, group.reachable, group.kept) for group in heads] == [(2, [1, 2], Range(1, 1))] * 3
    assert plan.totals[0].achieved == (0.5, 0.5)
    assert plan.warnings[0].startswith("kv_group of model.layers: asked 30.0%, achieved 50.0%: only whole units go")
    assert "0..2    kv_group (self_attn)  2    1          1, 2" in str(plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_mixed_dtype(dtype, tmp_path):
    t5().save_pretrained(tmp_path)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    config = PruningConfig(scorer="magnitude", sparsity=0.25, allocation="uniform")
    plan = make_plan(model, config)
    assert plan.before["weight_bytes"] == weight_bytes(model)
    prune(model, config)
    assert plan.after["weight_bytes"] == Range(weight_bytes(model), weight_bytes(model))


def test_a_budget_that_rounding_may_spare():
    plan = make_plan(llama(), PruningConfig(scorer="magnitude", sparsity=0.1, allocation="global", round_to=12))
    assert plan.totals[1].removed == Range(0, 12)
    assert any("may spare all that is condemned, and a run that removes nothing" in said for said in plan.warnings)


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_short_encoder_is_told_of_where_only_units_go_too(allocation):
    model = t5(num_layers=2, num_decoder_layers=3)
    config = PruningConfig(scorer="magnitude", sparsity=0.25, allocation=allocation)
    planned = make_plan(model, config).warnings
    told = [warning for warning in prune(model, config).warnings if "EncoderDecoderCache" in warning]
    assert len(told) == 1 and planned.count(told[0]) == 1


def test_the_model_is_left_as_it_was():
    model = t5().train()
    before = {name: (id(weight), weight._version, weight.shape) for name, weight in model.named_parameters()}
    config = model.config.to_dict()
    for options in ({"allocation": "uniform"}, {"allocation": "gamma"}, {"pattern": "layers"}):
        make_plan(model, PruningConfig(scorer="random", sparsity=0.3, **options))
    assert {name: (id(weight), weight._version, weight.shape) for name, weight in model.named_parameters()} == before
    assert model.config.to_dict() == config and model.training


# Several devices


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_reachable_counts_can_be_divided(devices):
    plan = make_plan(llama(), PruningConfig(scorer="magnitude", sparsity=0.5, allocation="uniform"), devices)
    heads, channels = plan.groups[0], plan.groups[3]
    assert heads.reachable == [count for count in (1, 2, 3, 4) if count % devices == 0]
    assert channels.reachable == [8, 16, 24, 32, 40, 48]
    assert plan.warnings == [
        f"kv_group of model.layers: tensor_parallel={devices} does not divide the 2 that are kept."
    ] * (devices == 4)


def test_a_ranking_may_keep_what_devices_cannot_divide():
    plan = make_plan(llama(), PruningConfig(scorer="magnitude", sparsity=0.5, allocation="global", round_to=3), 4)
    assert [warning.partition("not sure")[2] for warning in plan.warnings] == [
        " that tensor_parallel=4 divides it. Use allocation='uniform'.",
        " that tensor_parallel=4 divides it. Use round_to=12.",
    ]
    sure = PruningConfig(scorer="magnitude", sparsity=0.5, allocation="global", round_to=12, units=["mlp_channel"])
    assert make_plan(llama(), sure, 4).warnings == []


@pytest.mark.parametrize("options", [{"units": ["mlp_channel"]}, {"pattern": "layers", "scorer": "random"}])
def test_what_is_not_cut_has_to_be_divided_too(options):
    plan = make_plan(llama(), PruningConfig(**{"scorer": "magnitude", "sparsity": 1 / 3} | options), 3)
    assert "kv_group of model.layers: tensor_parallel=3 does not divide the 4 of a layer that is not cut." in (
        plan.warnings
    )


# In words


@pytest.mark.parametrize("name", ["llama-gqa", "t5", "llava"])
@pytest.mark.parametrize("options", [{}, {"allocation": "uniform"}, {"pattern": "layers"}])
def test_table_and_json(name, options):
    plan = make_plan(VARIANTS[name](), PruningConfig(scorer="random", sparsity=0.3, **options), 2)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 100
    for words in (f"{plan.before['parameters']:,}", str(plan.after["weight_bytes"]), plan.totals[0].unit):
        assert words in str(plan)
    assert sum(line.startswith("layout: ") for line in lines) == 1
    assert json.loads(json.dumps(plan.to_dict()))["after"]["parameters"]["lowest"] == plan.after["parameters"].lowest


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], "none"),
        ([3], "3"),
        ([1, 2], "1, 2"),
        ([1, 2, 3], "1..3"),
        (list(range(8, 1537, 8)), "8..1536 by 8"),
        ([8, 16, 24, 32, 37], "8..32 by 8, 37"),
        ([0, 1, 2, 4, 6, 8], "0..2, 4..8 by 2"),
        ([0, 3, 4, 5], "0, 3..5"),
    ],
)
def test_numbers_in_short(numbers, words):
    assert compressed(numbers) == words


def test_plan_of_an_8b_model_takes_seconds():
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    start = perf_counter()
    plan = make_plan(skeleton, PruningConfig(scorer="ntk", sparsity=0.2), skeleton=True)
    assert perf_counter() - start < 10  # 0.3 s on a quiet core
    assert plan.before == {
        "parameters": 8030261248,
        "weight_bytes": 16060522496,
        "cache_bytes_per_token": 2 * 8 * 128 * 32 * 2,
    }
    assert plan.totals[0].removed == Range(17, 17)  # METHODS.md 2
    assert plan.gamma == {"model.layers": pytest.approx(3.36)}


@pytest.mark.parametrize("compensation", ["auto", "sequential", "none"])
@pytest.mark.parametrize(("samples", "enough"), [(4, False), (26, True)])
def test_too_few_tokens_for_least_squares(compensation, samples, enough):
    calibration = CalibrationConfig(tokens(40, 10).tolist(), num_samples=samples, seq_len=10)
    config = PruningConfig(scorer="wanda", sparsity=0.4, compensation=compensation, calibration=calibration)
    words = "calibration tokens for readers of 64 inputs"  # the wider ones of the variant
    model = llama(intermediate_size=64)
    planned, done = make_plan(model, config).warnings, prune(model, config).warnings
    assert any(words in warning for warning in planned) == (compensation != "none" and not enough)
    assert [w for w in planned if words in w] == [w for w in done if words in w]


def test_the_default_calibration_of_wide_models():
    """32 x 512 tokens: no warning up to 4,096 inputs; beyond, the number of samples that would do."""
    config = PruningConfig(scorer="taylor", sparsity=0.4, calibration=CalibrationConfig([[5, 6]]))

    def warnings(width):
        model = llama(intermediate_size=width, num_hidden_layers=1, max_position_embeddings=2048)
        return [warning for warning in make_plan(model, config).warnings if "calibration tokens" in warning]

    assert warnings(4096) == []
    (warning,) = warnings(4864)
    assert warning.startswith("16,384 calibration tokens for readers of 4,864 inputs: ")
    assert warning.endswith("10 tokens for each input are 95 samples of this length (num_samples=95).")
