"""Pattern "layers" from a config to a model that loads again: what goes, what is refused, what is told."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import DynamicCache, EncoderDecoderCache

from optimum_prune import CalibrationConfig, InvalidConfig, PruningConfig, UnsupportedModel, depth, pipeline
from optimum_prune.binding import adapter_for, bind, stacks
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.influence import mean_influence
from optimum_prune.integrations.card import model_card
from optimum_prune.integrations.layouts import save_checkpoint
from optimum_prune.integrations.loading import same_record
from optimum_prune.pipeline import prune
from optimum_prune.report import PruningReport
from optimum_prune.scorers.block_influence import influence
from optimum_prune.sizes import measure
from tests.models import VARIANTS, gemma2, inputs, llama, llava, opt, source, t5, tokens
from tests.outputs import load, outputs
from tests.processes import answer
from tests.pruned import unevenly
from tests.shallow import STACKS, SUBLAYERS, build, drop, skip, stack_of, zero

LENGTHS = (12, 5, 9, 12, 2, 7)
NOTHING_STAYS = {"keep_first": 0, "keep_last": 0}
SAMPLES = [tokens(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]


def config(sparsity=0.25, **options) -> PruningConfig:
    calibration = options.pop("calibration", CalibrationConfig(SAMPLES, num_samples=len(SAMPLES)))
    return PruningConfig(pattern="layers", sparsity=sparsity, calibration=calibration, **options)


def deep(layers=8, **changes):
    return llama(num_hidden_layers=layers, **changes)


def gone(report):
    return [group.name for group in report.groups if not group.after]


def measured(model):
    data = CalibrationData([torch.tensor(sample) for sample in SAMPLES], 12, "test")
    return mean_influence(model, stacks(model, adapter_for(model)), list(data.batches(4, 0)), influence)


def lowest(scores, names, count):
    return sorted(sorted(names, key=scores.__getitem__)[:count])


class TestWhatCannotGo:
    """What can go goes, and a warning names what stays."""

    def test_of_a_short_stack(self):
        model = t5(num_layers=5, num_decoder_layers=2)
        report = prune(model, config(0.2, scorer="random", calibration=CalibrationConfig(source(model))))
        assert len(model.encoder.block) == 4 and len(model.decoder.block) == 2
        assert report.warnings == [
            "layer of decoder.block: asked 20.0%, achieved 0.0%: a sparsity of 0.2 removes none (reachable: none)."
        ]

    def test_of_a_kind_of_sublayer(self):
        """The first attention of each of the two kinds has to stay, and here there are no others."""
        model = gemma2(num_hidden_layers=2)
        report = prune(model, config(0.5, units=["attention", "mlp"], **NOTHING_STAYS))
        assert len(gone(report)) == 1 and gone(report)[0].endswith("mlp")
        (said,) = report.warnings
        assert said.startswith("attention of model.layers: asked 50.0%, achieved 0.0%: 1 would have to go (0.5), but")


class TestWhatGoes:
    @pytest.mark.parametrize(
        ("sparsity", "count"), [(0, 0), (0.07, 1), (0.1, 1), (0.25, 2), (0.31, 2), (0.3125, 3), (0.75, 6)]
    )
    def test_the_nearest_number_of_the_lowest(self, sparsity, count):
        scores, model = measured(deep()), deep()
        names = [f"model.layers.{layer}" for layer in range(1, 7)]
        report = prune(model, config(sparsity))
        assert gone(report) == lowest(scores, names, count)
        assert (len(model.model.layers), model.config.num_hidden_layers) == (8 - count, 8 - count)
        assert report.achieved == pytest.approx(count / 8)

    @pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 1), (1, 4), (5, 2)])
    def test_the_first_and_the_last_stay(self, first, last):
        names = [f"model.layers.{layer}" for layer in range(first, 8 - last)]
        report = prune(deep(), config(1 / 8, keep_first=first, keep_last=last))
        assert gone(report) == lowest(measured(deep()), names, 1)
        assert len(report.groups) == 8  # those that stay are targeted all the same

    def test_ties_go_by_position(self):
        model = deep()
        zero(model, *(f"model.layers.{layer}" for layer in (2, 4, 5)))
        assert gone(prune(model, config(0.25))) == ["model.layers.2", "model.layers.4"]

    @pytest.mark.parametrize("kind", ["attention", "mlp"])
    def test_sublayers(self, kind):
        model, site = deep(), {"attention": "self_attn", "mlp": "mlp"}[kind]
        names = [f"model.layers.{layer}.{site}" for layer in range(1, 7)]
        report = prune(model, config(0.4, units=[kind]))
        assert gone(report) == lowest(measured(deep()), names, 3)
        kinds = [layer.get("skip", []) for layer in measure(model)["model.layers"].values()]
        assert [f"model.layers.{i}.{site}" for i, skips in enumerate(kinds) if skips == [kind]] == gone(report)
        assert model.config.num_hidden_layers == 8

    def test_each_kind_of_sublayer_has_its_own_budget(self):
        report = prune(deep(), config(0.25, units=["attention", "mlp"]))
        assert report.asked_per_stack == {"model.layers": {"attention": 0.25, "mlp": 0.25}}
        assert [sum(name.endswith(site) for name in gone(report)) for site in ("self_attn", "mlp")] == [2, 2]

    @pytest.mark.parametrize("first", [0, 1])
    def test_the_attention_of_the_first_block_always_stays(self, first):
        model = deep(4)
        zero(model, "model.layers.0.self_attn")
        report = prune(model, config(0.75, units=["attention"], keep_first=first, keep_last=0))
        assert gone(report) == [f"model.layers.{layer}.self_attn" for layer in (1, 2, 3)]

    def test_the_attention_of_the_first_block_of_every_kind_stays(self):
        report = prune(build("qwen2-mixed-windows"), config(1 / 3, units=["attention"], keep_first=0, keep_last=0))
        assert gone(report) == ["model.layers.2.self_attn"]

    def test_patterns(self):
        options = {"include": ["model.layers.[2-7]"], "exclude": ["model.layers.3", "*.4"]}
        report = prune(deep(), config(0.5, **options))
        assert [group.layer for group in report.groups] == [2, 5, 6, 7]
        assert gone(report) == lowest(measured(deep()), [f"model.layers.{layer}" for layer in (2, 5, 6)], 2)
        report = prune(deep(), config(0.5, units=["mlp"], include=["model.layers.2", "model.layers.3.mlp"]))
        assert [group.name for group in report.groups] == ["model.layers.2.mlp", "model.layers.3.mlp"]

    def test_all_stacks_lose_the_same_fraction(self):
        model = t5(num_layers=8, num_decoder_layers=4)
        report = prune(model, config(calibration=CalibrationConfig(source(model))))
        assert report.asked_per_stack == {"encoder.block": {"layer": 0.25}, "decoder.block": {"layer": 0.25}}
        assert (model.config.num_layers, model.config.num_decoder_layers) == (6, 3)
        assert len(model.encoder.block) == 6 and len(model.decoder.block) == 3

    @pytest.mark.parametrize(("stack", "left"), [("encoder", (3, 4)), ("decoder", (4, 3))])
    def test_one_stack(self, stack, left):
        model = t5(num_layers=4)
        prune(model, config(stacks=[stack], calibration=CalibrationConfig(source(model))))
        assert (len(model.encoder.block), len(model.decoder.block)) == left

    @pytest.mark.parametrize(("name", "path"), STACKS)
    def test_every_architecture(self, name, path):
        model = build(name)
        stack = stack_of(model, path).stack.name
        report = prune(model, config(0.3, stacks=[stack], calibration=CalibrationConfig(source(model))))
        assert [group.stack for group in report.groups if not group.after] == [path]
        with torch.no_grad():
            assert torch.isfinite(model(**inputs(model)).logits).all()

    def test_a_random_baseline(self):
        drawn = [gone(prune(deep(), config(0.5, scorer="random", seed=seed))) for seed in (0, 0, 1, 2)]
        assert drawn[0] == drawn[1] and len({str(names) for names in drawn}) == 3
        report = prune(deep(), config(0.5, scorer="random", calibration=CalibrationConfig("no/such-dataset")))
        assert gone(report) == drawn[0] and report.calibration is None

    @pytest.mark.parametrize("batch_size", [1, 4, 6])
    def test_any_batch_size_gives_the_same_blocks(self, batch_size):
        calibration = CalibrationConfig(SAMPLES, num_samples=len(SAMPLES), batch_size=batch_size)
        assert gone(prune(deep(), config(0.5, calibration=calibration))) == gone(prune(deep(), config(0.5)))


class TestRefusals:
    @pytest.mark.parametrize(
        ("build", "options", "message"),
        [
            (
                llama,
                {"sparsity": 0.1},
                r"layer: 3 targeted in .*, of which a sparsity of 0.1 removes none \(reachable: 0.333\)",
            ),
            (
                llama,
                {"sparsity": 0.5},
                r"2 would have to go \(0.5\), but at most 1 can: the first 1 and the last 1 blocks st",
            ),
            (llama, {"sparsity": 0.9} | NOTHING_STAYS, r"3 would have to go \(0.9\), but at most 2 can"),
            (llama, {"sparsity": 0.9, "units": "mlp"} | NOTHING_STAYS, r"mlp: .* at most 2 can: .* one of each stack"),
            (
                llama,
                {"sparsity": 0.9, "units": "attention"} | NOTHING_STAYS,
                r"attention: .* at most 2 can: .* the attention of the first block of every kind, off which generation",
            ),
            (
                llama,
                {"keep_first": 2},
                r"3 targeted in model\.layers, of which 1 would have to go .*, but at most 0 can",
            ),
            (llama, {"sparsity": 0.6, "include": ["model.layers.0"]}, r"1 targeted .*, of which 1 .*, but at most 0"),
            (llama, {"include": ["model.layer.1"]}, r"Unknown module pattern .* Did you mean 'model.layers.1'"),
            (llama, {"exclude": ["*.self_attn"]}, r"Unknown module pattern '\*\.self_attn'"),
            (llama, {"exclude": ["model.layers"]}, r"Nothing is left to prune: .* leave none of 3 layers"),
            (llama, {"stacks": ["encoder"]}, r"Unknown stack 'encoder'; supported: 'decoder'"),
            (llava, {"stacks": ["vision"]}, r"Stack 'vision' cannot lose blocks: the model takes the output of a cert"),
            (
                opt,
                {"units": ["attention"]},
                r"OPTForCausalLM has no attention in model\.decoder\.layers that can be sk",
            ),
            (t5, {"units": ["mlp"]}, r"T5ForConditionalGeneration has no mlp in encoder\.block that can be skipped"),
            (llama, {"scorer": "ntk"}, r"'ntk' ranks for .* 'structured' and cannot .*: 'block_influence', 'random'"),
            (llama, {"scorer": "magnitude"}, r"scorer 'magnitude' ranks for pattern 'structured'"),
        ],
    )
    def test_before_anything_is_read(self, build, options, message, monkeypatch):
        monkeypatch.setattr(pipeline, "load_samples", lambda *args, **kwargs: pytest.fail("data was read"))
        model = build()
        before, values = model.config.to_dict(), {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(InvalidConfig, match=message):
            prune(model, config(**{"sparsity": 0.3} | options))
        assert model.config.to_dict() == before and {*model.state_dict()} == {*values}
        assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())

    def test_block_influence_cannot_choose_units(self):
        with pytest.raises(
            InvalidConfig, match=r"'block_influence' ranks for pattern 'layers' and cannot .*'structured'"
        ):
            prune(llama(), PruningConfig(sparsity=0.3, scorer="block_influence"))

    @pytest.mark.parametrize("scorer", ["block_influence", "random"])
    def test_a_weight_that_is_no_number(self, scorer):
        """CASES.md 9."""
        model = deep()
        model.model.layers[3].mlp.up_proj.weight.data[0, 0] = torch.nan
        with pytest.raises(UnsupportedModel, match=r"model\.layers\.3\.mlp\.up_proj\.weight holds NaN"):
            prune(model, config(scorer=scorer))
        assert len(model.model.layers) == 8

    def test_a_model_that_overflows(self):
        model = deep()
        model.model.layers[3].input_layernorm.weight.data.fill_(torch.inf)
        with pytest.raises(UnsupportedModel, match=r"hidden states of model\.layers\.3 are not finite"):
            prune(model, config())
        assert len(model.model.layers) == 8

    def test_a_model_that_is_not_loaded(self):
        with torch.device("meta"):
            model = type(llama())(llama().config)
        with pytest.raises(UnsupportedModel, match="is not in memory"):
            prune(model, config(0.3))


class TestReport:
    @pytest.mark.parametrize("name", ["llama-gqa", "opt", "t5", "llama-tied-biased"])
    def test_says_what_a_recount_says(self, name):
        model = build(name)
        dense = copy.deepcopy(model)
        report = prune(model, config(0.3, calibration=CalibrationConfig(source(model))))
        for group in report.groups:
            block = dense.get_submodule(group.name)
            weights = sum(p.numel() for n, p in block.named_parameters() if p.dim() == 2 and "bias" not in n)
            assert (group.name, group.unit) == (f"{group.stack}.{group.layer}", "layer")
            assert (group.before, group.kept) == (1, [0] * group.after)
            assert (group.weights_before, group.weights_after) == (weights, weights * group.after)
        assert (report.parameters_before, report.parameters_after) == (dense.num_parameters(), model.num_parameters())
        assert (report.allocation, report.gamma) == ("global", None)

    def test_a_sublayer_is_named_by_its_module(self):
        report = prune(deep(), config(units=["attention"]))
        assert [group.name for group in report.groups] == [f"model.layers.{layer}.self_attn" for layer in range(8)]
        assert {(group.unit, group.weights_before) for group in report.groups} == {("attention", 3072)}

    def test_the_record_names_what_went(self):
        model = deep()
        report = prune(model, config())
        dropped = [group.layer for group in report.groups if not group.after]
        record = model.config.pruning_config
        assert record == report.record() and record["dropped_layers"] == {"model.layers": dropped}
        assert "skipped" not in record and record["recipe"]["scorer"] == "block_influence"
        again = prune(model, config(1 / 3, units=["attention", "mlp"]))
        record = model.config.pruning_config
        assert "dropped_layers" not in record and record["previous"] == [report.record()]
        for kind, site in (("attention", "self_attn"), ("mlp", "mlp")):
            skipped = record["skipped"]["model.layers"][kind]
            assert [f"model.layers.{layer}.{site}" for layer in skipped] == [n for n in gone(again) if n.endswith(site)]

    def test_survives_json(self):
        model = deep()
        report = prune(model, config(units=["mlp"]))
        read = PruningReport.from_dict(json.loads(json.dumps(report.to_dict())))
        assert read == report and same_record(read, model.config.pruning_config)

    def test_a_structured_record_says_nothing_of_layers(self):
        model = llama()
        prune(model, PruningConfig(sparsity=0.3, scorer="magnitude"))
        assert not {"dropped_layers", "skipped"} & {*model.config.pruning_config}

    def test_the_table(self):
        report = prune(deep(4), config(scorer="random"))
        lines = str(report).splitlines()
        assert lines[0] == "layers, random, global: asked 25.0%, achieved 25.0% of the targeted weights"
        words = [[str(g.layer), "kept" if g.after else "dropped"] for g in report.groups]
        assert [line.split() for line in lines[3:7]] == words and sum("dropped" in word for word in words) == 1
        assert lines[7].split() == ["all", "3/4", "#######..."]
        assert "skipped" in str(prune(deep(4), config(scorer="random", units=["mlp"])))

    def test_what_was_asked_and_what_was_reachable(self):
        (warning,) = prune(deep(), config(0.3)).warnings
        assert warning.startswith("layer of model.layers: asked 30.0%, achieved 25.0%: only whole layers go")

    def test_the_card(self):
        report = prune(deep(), config())
        card = str(model_card(report, evaluations={}, layout="stock"))
        assert "kv_group` is" not in card and "| `layer` | 25.0% | 25.0% | 6 of 8 |" in card
        units = prune(deep(), PruningConfig(sparsity=0.3, scorer="magnitude"))
        assert "A `kv_group` is a key/value head" in str(model_card(units, evaluations={}, layout="stock"))


class TestEncoderShorterThanDecoder:
    """CASES.md 13, FORMAT.md 4: transformers cannot generate with a cache of its own then."""

    def shortened(self):
        model = t5()
        return model, prune(model, config(0.3, stacks=["encoder"], scorer="random"))

    def test_warns(self):
        _, report = self.shortened()
        assert any("The encoder has 2 blocks and the decoder 3, but" in warning for warning in report.warnings)
        assert "use_cache=False" in report.warnings[-1]

    @pytest.mark.parametrize("stack", [["decoder"], None])
    def test_and_not_without_reason(self, stack):
        warnings = prune(t5(), config(0.3, stacks=stack, scorer="random")).warnings
        assert not any("The encoder has" in warning for warning in warnings)
        assert depth.generation_warnings(llama()) == []

    def test_the_warning_is_true_and_so_are_the_ways_around(self):
        model, _ = self.shortened()
        ids, options = inputs(model)["input_ids"], {"do_sample": False, "max_new_tokens": 5}
        with pytest.raises(IndexError):
            model.generate(ids, **options)
        plain = model.generate(ids, use_cache=False, **options)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), plain)
        drop(model, [0, 1], "decoder.block")
        expected = model.generate(ids, use_cache=False, **options)
        assert torch.equal(model.generate(ids, **options), expected)


class TestFurtherRuns:
    def test_units_of_what_is_left(self):
        model = skip(llama(), "attention", 1)
        report = prune(model, PruningConfig(sparsity=0.3, scorer="magnitude", round_to=1, allocation="uniform"))
        assert "model.layers.1.self_attn" not in [group.name for group in report.groups]
        for layer, sizes in measure(model)["model.layers"].items():
            assert (sizes.get("skip"), sizes["intermediate_size"]) == (["attention"] if layer == 1 else None, 34)
        got = outputs(model)
        assert torch.equal(got["chunked"], got["uncached"]) and torch.equal(got["static"], got["dynamic"])

    def test_gradients_flow_past_what_is_skipped(self):
        model = skip(skip(llama(), "attention", 1), "mlp", 2)
        report = prune(model, PruningConfig(sparsity=0.3, calibration=CalibrationConfig(SAMPLES)))
        assert len(report.groups) == len(bind(llama())) - 2

    def test_a_second_skip(self):
        model = deep()
        first = prune(model, config(0.25, units=["mlp"]))
        second = prune(model, config(1 / 6, units=["mlp"]))
        assert len(second.groups) == 6 and not {*gone(first)} & {*gone(second)}
        assert sum("skip" in sizes for sizes in measure(model)["model.layers"].values()) == 3

    def test_blocks_of_a_model_with_skipped_attention(self):
        model = skip(deep(4), "attention", 2)
        report = prune(model, config(0.25, keep_first=0, keep_last=0, scorer="random", seed=3))
        assert gone(report) != ["model.layers.0"]
        for seed in range(6):
            model = skip(deep(4), "attention", 1, 2)
            prune(model, config(0.75, keep_first=0, keep_last=0, scorer="random", seed=seed))
            assert measure(model)["model.layers"][0].keys() >= {"num_attention_heads"}

    def test_the_first_block_stays_for_those_without_attention(self):
        model = skip(deep(4), "attention", 2, 3)
        with pytest.raises(
            InvalidConfig, match=r"3 would .* at most 2 can: .* so do the first blocks, as long as others"
        ):
            prune(model, config(0.75, keep_first=0))

    @pytest.mark.parametrize("path", ["encoder.block", "decoder.block"])
    def test_units_of_a_t5_whose_position_bias_has_moved(self, path):
        model = drop(t5(), [1, 2], path)
        prune(model, PruningConfig(sparsity=0.3, scorer="magnitude"))
        table = model.get_submodule(f"{path}.0.layer.0.SelfAttention.relative_attention_bias")
        assert table.weight.shape == (8, measure(model)[path][0]["num_heads"]) and table.weight.shape[1] < 8
        with torch.no_grad():
            assert torch.isfinite(model(**inputs(model)).logits).all()

    def test_uneven_widths_stay(self):
        model = unevenly(llama())
        sizes = measure(model)["model.layers"]
        (dropped,) = (group.layer for group in prune(model, config(0.3)).groups if not group.after)
        assert [*measure(model)["model.layers"].values()] == [s for layer, s in sizes.items() if layer != dropped]


# Save, start a new process, load, compare to the bit

RELOAD = """
import json, sys
from pathlib import Path
{plugin}
import transformers
from safetensors.torch import save_file
from tests.outputs import load, outputs

for folder in map(Path, sys.argv[1:]):
    auto = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, complaints = load(folder, auto)
    assert complaints == {{}}, complaints
    save_file(outputs(model), folder.with_suffix(".safetensors"))
assert ("optimum_prune" in sys.modules) == {loaded}
print(json.dumps("loaded"))
"""
DROPPED = {
    name: dict.fromkeys(path for variant, path in STACKS if variant == name)
    for name in VARIANTS
    if name != "t5-gated"  # its stacks differ in length; t5 stands for it
}
SKIPPED = dict.fromkeys(name for name, _, _ in SUBLAYERS)


def saved(root, models, layout):
    expected = {}
    for name, model in models.items():
        assert save_checkpoint(model, root / name) == layout
        expected[name] = outputs(model)
    return expected


def without_a_block(name):
    model = build(name)
    for path in DROPPED[name]:
        drop(model, [1, 2] if name == "t5" else [0, 2], path)
    return model


def with_skips(name):
    model = build(name)
    (path,) = dict.fromkeys(path for variant, path, _ in SUBLAYERS if variant == name)
    return skip(skip(unevenly(model) if name == "qwen3" else model, "attention", 2, path=path), "mlp", 0, 2, path=path)


@pytest.fixture(scope="module")
def dropped(tmp_path_factory):
    root = tmp_path_factory.mktemp("dropped")
    expected = saved(root, {name: without_a_block(name) for name in DROPPED}, "stock")
    answer(RELOAD.format(plugin="", loaded=False), *(root / name for name in expected))
    return root, expected


@pytest.fixture(scope="module")
def skips(tmp_path_factory):
    root = tmp_path_factory.mktemp("skipped")
    expected = saved(root, {name: with_skips(name) for name in SKIPPED}, "compact")
    answer(RELOAD.format(plugin="import optimum_prune", loaded=True), *(root / name for name in expected))
    return root, expected


def differing(root: Path, expected, name):
    found = load_file(root / f"{name}.safetensors")
    assert found.keys() == expected[name].keys()
    return [key for key in found if not torch.equal(found[key], expected[name][key])]


@pytest.mark.parametrize("name", DROPPED)
def test_plain_transformers_loads_a_model_without_a_block(dropped, name):
    root, expected = dropped
    assert differing(root, expected, name) == []


@pytest.mark.parametrize("name", SKIPPED)
def test_a_fresh_process_loads_skipped_sublayers(skips, name):
    root, expected = skips
    assert differing(root, expected, name) == []


@pytest.mark.parametrize("name", SKIPPED)
def test_saving_again_writes_the_same(skips, name, tmp_path):
    root, _ = skips
    config = json.loads((root / name / "config.json").read_text())
    for again in ("second", "third"):
        auto = getattr(transformers, config["architectures"][0])
        model, complaints = load(root / name, auto)
        assert complaints == {}
        model.save_pretrained(tmp_path / again)
        root, name = tmp_path, again
    written = [(tmp_path / again / "config.json").read_bytes() for again in ("second", "third")]
    assert written[0] == written[1]
    own = config.get("text_config", config)
    found = json.loads(written[0])
    assert found.get("text_config", found)["per_layer_config"] == own["per_layer_config"]
    assert found["quantization_config"] == config["quantization_config"]
