"""Sizes: measured on the modules, written into the config, read from it, applied to a skeleton."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import subprocess
import sys

import pytest
from transformers import AutoConfig, LlamaModel

from optimum_prune.binding import bind
from optimum_prune.configs import COMPACT, block_method, forget_quantizer_
from optimum_prune.errors import CheckpointError
from optimum_prune.sizes import build_skeleton, describe_, measure, resize_, why_not_stock
from optimum_prune.surgery import slice_
from tests.models import VARIANTS, llama, mistral
from tests.pruned import unevenly, uniformly
from tests.shallow import STACKS, SUBLAYERS, drop, skip


@pytest.fixture(params=VARIANTS)
def model(request):
    return VARIANTS[request.param]()


def keep_(model, **counts):
    """Keep the first so many units in every layer, or as many as the list says for each layer."""
    for group in bind(model):
        count = counts.get(group.unit, group.num_units)
        slice_(group, range(count[group.layer] if isinstance(count, list) else count))
    return model


def through_json(config, folder):
    """Write a config and read it as a loader does."""
    config.save_pretrained(folder)
    return AutoConfig.from_pretrained(folder)


def shapes(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


class TestDescribe:
    def test_a_dense_model_is_stock_and_its_config_stays(self, model):
        expected = model.config.to_dict()
        for group in bind(model):
            # A class that leaves head_dim out derives it wrongly once heads are gone, so it is always written.
            if key := group.group.unit_size_key:
                own = expected[group.declared.config] if group.declared.config else expected
                own[key] = group.unit_size
        assert why_not_stock(model) is None
        assert describe_(model) == "stock"
        assert model.config.to_dict() == expected

    def test_uneven_sizes_come_back(self, model, tmp_path):
        unevenly(model)
        assert describe_(model) == "compact"
        config = through_json(model.config, tmp_path)
        assert block_method(config) == "optimum_prune"
        skeleton = build_skeleton(type(model), config)
        assert shapes(skeleton) != shapes(model)
        resize_(skeleton)
        assert shapes(skeleton) == shapes(model)
        assert measure(skeleton) == measure(model)
        sizes = shapes(skeleton)
        resize_(skeleton)  # again
        assert shapes(skeleton) == sizes

    def test_uneven_sizes_of_a_headless_model(self, tmp_path):
        model = unevenly(LlamaModel(llama().config))
        assert describe_(model) == "compact"
        skeleton = build_skeleton(LlamaModel, through_json(model.config, tmp_path))
        resize_(skeleton)
        assert shapes(skeleton) == shapes(model)

    @pytest.mark.parametrize("build", [llama, mistral])
    def test_uniform_sizes_need_no_plugin(self, build, tmp_path):
        model = uniformly(build())
        assert describe_(model) == "stock"
        config = through_json(model.config, tmp_path)
        assert block_method(config) is None
        assert shapes(build_skeleton(type(model), config)) == shapes(model)
        written = config.to_dict()
        assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (
            4,
            2,
            4,
        )
        assert written["intermediate_size"] == 40
        assert not written.keys() & {
            "per_layer_config",
            "quantization_config",
            "allow_global_per_layer_attribute_access",
        }

    def test_heads_that_do_not_divide_the_hidden_size(self, tmp_path):
        model = keep_(llama(), kv_group=3)
        # fit for the middle of a sentence: without the exception's name and the full stop
        assert why_not_stock(model) == "The hidden size (32) is not a multiple of the number of attention heads (6)"
        assert describe_(model) == "compact"
        config = through_json(model.config, tmp_path)
        assert config.to_dict()["num_attention_heads"] == 8  # what the class accepts; the truth is per layer
        skeleton = build_skeleton(type(model), config)
        resize_(skeleton)
        assert shapes(skeleton) == shapes(model)
        assert why_not_stock(keep_(mistral(), kv_group=3)) is None  # Mistral's config accepts any count

    def test_the_reason_names_what_differs(self):
        assert why_not_stock(keep_(llama(), mlp_channel=[8, 8, 16])) == "layers differ in intermediate_size"
        both = why_not_stock(keep_(llama(), kv_group=[1, 2, 2], mlp_channel=[8, 8, 16]))
        assert both == "layers differ in num_key_value_heads, num_attention_heads, intermediate_size"

    def test_asking_changes_nothing(self, model):
        for prepared in (model, unevenly(model)):
            before = prepared.config.to_dict()
            why_not_stock(prepared)
            assert prepared.config.to_dict() == before

    def test_what_is_written_for_compact(self):
        model = keep_(llama(), kv_group=[4, 2, 1], mlp_channel=[40, 24, 40])
        describe_(model)
        written = model.config.to_dict()
        assert written["quantization_config"] == COMPACT
        assert written["intermediate_size"] == 40  # the widest layer's
        assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (
            8,
            4,
            4,
        )
        assert written["allow_global_per_layer_attribute_access"] is True
        assert written["per_layer_config"] == {
            "1": {"num_key_value_heads": 2, "num_attention_heads": 4, "intermediate_size": 24},
            "2": {"num_key_value_heads": 1, "num_attention_heads": 2},
        }

    def test_a_second_cut_of_a_compact_model(self, tmp_path):
        model = unevenly(unevenly(llama()), seed=1)
        assert measure(model)["model.layers"] == {
            0: {"num_key_value_heads": 4, "num_attention_heads": 8, "intermediate_size": 38},
            1: {"num_key_value_heads": 2, "num_attention_heads": 4, "intermediate_size": 30},
            2: {"num_key_value_heads": 1, "num_attention_heads": 2, "intermediate_size": 8},
        }
        config = through_json(model.config, tmp_path)
        skeleton = build_skeleton(type(model), config)
        resize_(skeleton)
        assert shapes(skeleton) == shapes(model)

    def test_a_compact_model_becomes_stock_again(self, tmp_path):
        model = unevenly(llama())
        keep_(model, kv_group=2, mlp_channel=24)
        assert describe_(model) == "stock"
        config = through_json(model.config, tmp_path)
        assert block_method(config) is None
        assert shapes(build_skeleton(type(model), config)) == shapes(model)

    @pytest.mark.parametrize(("cut", "layout"), [(uniformly, "stock"), (unevenly, "compact")])
    def test_the_size_of_heads_is_always_written(self, cut, layout):
        model = llama()
        del model.config.head_dim  # as in the configs of classes that derive it
        cut(model)
        assert describe_(model) == layout
        assert model.config.to_dict()["head_dim"] == 4

    def test_block_of_another_quantizer_goes_where_the_weights_are_plain(self):
        model = llama()
        model.config.quantization_config = {"quant_method": "other"}
        assert describe_(model) == "stock"
        assert block_method(model.config) is None


class TestSkipped:
    def test_what_is_written(self):
        model = skip(skip(unevenly(llama()), "attention", 2), "mlp", 1, 2)
        assert measure(model)["model.layers"] == {
            0: {"num_key_value_heads": 4, "num_attention_heads": 8, "intermediate_size": 43},
            1: {"skip": ["mlp"], "num_key_value_heads": 3, "num_attention_heads": 6},
            2: {"skip": ["attention", "mlp"]},
        }
        written = model.config.to_dict()
        assert written["quantization_config"] == COMPACT
        assert (written["num_attention_heads"], written["intermediate_size"], written["head_dim"]) == (8, 43, 4)
        assert written["per_layer_config"] == {
            "1": {"num_key_value_heads": 3, "num_attention_heads": 6, "skip": ["mlp"]},
            "2": {"skip": ["attention", "mlp"]},
        }

    @pytest.mark.parametrize(("name", "path", "kind"), SUBLAYERS)
    @pytest.mark.parametrize("prepare", [lambda model: model, unevenly], ids=["even", "uneven"])
    def test_comes_back(self, name, path, kind, prepare, tmp_path):
        model = skip(prepare(VARIANTS[name]()), kind, 2, path=path)
        config = through_json(model.config, tmp_path)
        skeleton = build_skeleton(type(model), config)
        assert {*shapes(skeleton)} > {*shapes(model)}
        for _ in range(2):
            resize_(skeleton)
            assert shapes(skeleton) == shapes(model) and measure(skeleton) == measure(model)
        before = config.to_dict()
        assert describe_(skeleton) == "compact"
        assert config.to_dict() == before

    def test_is_the_reason_for_compact(self):
        assert why_not_stock(skip(llama(), "attention", 1)) == "the attention of model.layers.1 is skipped"
        reason = why_not_stock(skip(keep_(llama(), mlp_channel=[8, 8, 16]), "mlp", 0))
        assert reason == "layers differ in intermediate_size; the mlp of model.layers.0 is skipped"

    def test_the_widest_layer_is_one_that_is_there(self):
        model = skip(keep_(llama(), mlp_channel=[8, 48, 16]), "mlp", 1)
        assert model.config.to_dict()["intermediate_size"] == 16

    def test_blocks_may_go_afterwards(self, tmp_path):
        model = drop(skip(unevenly(llama(num_hidden_layers=4)), "mlp", 2), [0, 2, 3])
        assert model.config.to_dict()["per_layer_config"] == {
            "1": {"num_key_value_heads": 2, "num_attention_heads": 4, "skip": ["mlp"]},
            "2": {"num_key_value_heads": 1, "num_attention_heads": 2},
        }
        skeleton = build_skeleton(type(model), through_json(model.config, tmp_path))
        resize_(skeleton)
        assert shapes(skeleton) == shapes(model) and measure(skeleton) == measure(model)

    def test_dropping_what_was_skipped_leaves_a_stock_model(self):
        model = drop(skip(llama(), "mlp", 1), [0, 2])
        assert why_not_stock(model) is None and block_method(model.config) is None
        assert not {"per_layer_config", "allow_global_per_layer_attribute_access"} & {*model.config.to_dict()}

    @pytest.mark.parametrize(
        ("layer", "kind", "reason"),
        [(0, "attention", "it is the first layer with attention"), (1, "norm", "blocks of model.layers have no sub-")],
    )
    def test_refuses_what_has_to_stay(self, layer, kind, reason):
        config = skip(llama(), "mlp", 1).config
        config.per_layer_config = {layer: {"skip": [kind]}}
        skeleton = build_skeleton(type(llama()), config)
        with pytest.raises(CheckpointError, match=rf"skips the {kind} of model\.layers\.{layer}, which .*: {reason}"):
            resize_(skeleton)

    def test_a_skipped_sublayer_binds_no_group(self):
        groups = [group.name for group in bind(skip(llama(), "attention", 1, 2))]
        assert groups == ["model.layers.0.self_attn", *(f"model.layers.{layer}.mlp" for layer in range(3))]


class TestDropped:
    @pytest.mark.parametrize(("name", "path"), STACKS)
    def test_needs_no_plugin(self, name, path, tmp_path):
        model = drop(VARIANTS[name](), [1, 2], path)
        assert why_not_stock(model) is None
        config = through_json(model.config, tmp_path)
        assert block_method(config) is None
        assert shapes(build_skeleton(type(model), config)) == shapes(model)

    @pytest.mark.parametrize(("name", "path"), STACKS)
    def test_a_compact_model_stays_compact(self, name, path, tmp_path):
        model = drop(unevenly(VARIANTS[name]()), [1, 2], path)
        skeleton = build_skeleton(type(model), through_json(model.config, tmp_path))
        resize_(skeleton)
        assert shapes(skeleton) == shapes(model)

    def test_overrides_get_the_new_numbers(self):
        model = drop(keep_(llama(), kv_group=[4, 2, 1], mlp_channel=[40, 24, 40]), [0, 2])
        assert model.config.to_dict()["per_layer_config"] == {"1": {"num_key_value_heads": 1, "num_attention_heads": 2}}

    def test_a_compact_model_may_become_stock(self):
        assert describe_(drop(keep_(llama(), mlp_channel=[24, 40, 24]), [0, 2])) == "stock"

    @pytest.mark.parametrize(("kept", "kinds"), [([0, 2], "fs"), ([1, 2], "ss"), ([0], "f")], ids=str)
    def test_windows_are_read_from_the_list_and_not_counted_again(self, kept, kinds, tmp_path):
        """Qwen2 derives the list from max_window_layers where it is missing."""
        model = drop(VARIANTS["qwen2-mixed-windows"](), kept)
        config = through_json(model.config, tmp_path)
        assert (
            "".join(kind[0] for kind in config.layer_types) == kinds == "".join(k[0] for k in model.config.layer_types)
        )
        assert (config.use_sliding_window, config.sliding_window) == (True, 8)
        assert config.max_window_layers == kinds.count("f")


class TestResize:
    @pytest.mark.parametrize(
        ("layer", "changes"),
        [
            (1, {"intermediate_size": 49}),  # wider than the class builds it
            (1, {"intermediate_size": 0}),
            (1, {"intermediate_size": -8}),
            (0, {"num_key_value_heads": 8}),
            (2, {"num_attention_heads": 8}),  # query heads that do not go with the KV heads
            (2, {"num_key_value_heads": 3}),
        ],
        ids=str,
    )
    def test_refuses_what_slicing_cannot_give(self, layer, changes):
        model = keep_(llama(), kv_group=[4, 2, 1], mlp_channel=[48, 24, 40])
        describe_(model)
        config = type(model.config).from_dict(model.config.to_dict())
        written = config.to_dict()["per_layer_config"]
        edited = {int(key): dict(sizes) for key, sizes in written.items()}
        edited.setdefault(layer, {}).update(changes)
        config.per_layer_config = edited
        skeleton = build_skeleton(type(model), config)
        with pytest.raises(CheckpointError, match=rf"gives model\.layers\.{layer}\.\S+ .*was edited"):
            resize_(skeleton)

    def test_needs_no_memory(self):
        model = unevenly(llama())
        skeleton = build_skeleton(type(model), model.config)
        resize_(skeleton)
        assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_block_method_reads_dicts_and_objects():
    config = llama().config
    assert block_method(config) is None
    config.quantization_config = {"quant_method": "gguf"}
    assert block_method(config) == "gguf"
    config.quantization_config = type("Block", (), {"quant_method": "other"})()
    assert block_method(config) == "other"


def test_forgetting_the_quantizer():
    model = unevenly(llama())
    model.hf_quantizer, model.quantization_method, model.is_quantized = object(), "optimum_prune", True
    model.config._is_quantized = True
    forget_quantizer_(model)
    assert not hasattr(model, "hf_quantizer") and not hasattr(model, "quantization_method")
    assert model.is_quantized is False and "_is_quantized" not in vars(model.config)
    assert block_method(model.config) == "optimum_prune"
    forget_quantizer_(model)  # again, with nothing left to forget


def test_the_plugin_is_registered_whatever_is_imported_first():
    # Importing transformers' models registers the plugin, which must not need a file that is half imported.
    script = """
import sys
import optimum_prune.sizes
assert "transformers.modeling_utils" not in sys.modules
import optimum_prune.integrations.quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
assert "optimum_prune" in AUTO_QUANTIZER_MAPPING
"""
    subprocess.run([sys.executable, "-c", script], check=True)
