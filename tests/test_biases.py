"""Biases that no class builds: measured, written, read again, and what later cuts make of them."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from optimum_prune.biases import add_, extra, has_bias, only_for_now, remove_, switches
from optimum_prune.binding import bind, named_linears
from optimum_prune.configs import block, block_method, stack_config
from optimum_prune.errors import CheckpointError
from optimum_prune.sizes import build_skeleton, describe_, measure, resize_, why_not_stock
from tests.biased import SWITCHED, biased
from tests.models import VARIANTS, llama, mistral, opt, qwen2, qwen3
from tests.pruned import unevenly
from tests.shallow import drop, skip
from tests.zeroed import bits


def again(model: PreTrainedModel, folder) -> PreTrainedModel:
    """Build the skeleton that the written config describes."""
    model.config.save_pretrained(folder)
    skeleton = build_skeleton(type(model), AutoConfig.from_pretrained(folder))
    if block_method(skeleton.config) is not None:
        for _ in range(2):
            resize_(skeleton)
    return skeleton


def shapes(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def listed(model) -> dict[int, list[str]]:
    """Return what the config lists of the only stack of a decoder."""
    layers = block(model.config).get("per_layer", {}).get("model.layers", {})
    return {int(layer): own["extra_biases"] for layer, own in layers.items() if "extra_biases" in own}


class TestDeclarations:
    @pytest.mark.parametrize("name", VARIANTS)
    def test_the_class_builds_what_is_declared(self, name):
        """Without a switch: exactly the linears that are named. With one: all of them or none."""
        model = VARIANTS[name]()
        for value in (False, True):
            config = type(model.config).from_dict(model.config.to_dict())
            for own, switch in switches(model):
                setattr(getattr(config, own) if own else config, switch, value)
            for group in bind(build_skeleton(type(model), config)):
                paths, declared = group.group.writers + group.group.readers, group.group.biases
                if isinstance(declared, str):
                    assert hasattr(stack_config(config, group.declared), declared)
                    declared = paths if value else ()
                assert {path for path, linear in zip(paths, group.linears, strict=True) if has_bias(linear)} == {
                    *declared
                }

    def test_a_switch_that_the_config_lacks_is_none(self):
        model = mistral()
        for group in bind(model):
            object.__setattr__(group.group, "biases", "attention_bias")
        try:
            assert switches(model) == {}
            add_(model.model.layers[0].mlp.up_proj)
            assert [extra(group, {}) for group in bind(model)][1] == ["mlp.up_proj"]
        finally:
            for group in bind(model):
                object.__setattr__(group.group, "biases", ())


class TestConfig:
    @pytest.mark.parametrize("share", [1.0, 0.4])
    @pytest.mark.parametrize("name", VARIANTS)
    def test_comes_back(self, name, share, tmp_path):
        model = biased(VARIANTS[name](), share)
        skeleton = again(model, tmp_path)
        assert shapes(skeleton) == shapes(model) and measure(skeleton) == measure(model)
        before = skeleton.config.to_dict()
        describe_(skeleton)
        assert skeleton.config.to_dict() == before

    @pytest.mark.parametrize(("name", "said"), SWITCHED.items())
    def test_where_a_switch_says_it_no_plugin_is_needed(self, name, said, tmp_path):
        model = VARIANTS[name](enable_bias=False) if name == "opt" else VARIANTS[name]()
        biased(model)
        assert why_not_stock(model) is None and block_method(model.config) is None
        config = model.config.text_config if name == "llava" else model.config
        assert {switch: getattr(config, switch) for switch in said} == said
        assert shapes(again(model, tmp_path)) == shapes(model)

    def test_of_a_kind_all_have_one_or_none(self):
        """One bias in one layer: zeros for the others of its kind, nothing for the other kind."""
        model = llama()
        plain = bits(model)
        add_(model.model.layers[1].mlp.up_proj)
        biased(model, share=0)
        assert (model.config.mlp_bias, model.config.attention_bias) == (True, False)
        new = {name: tensor for name, tensor in model.state_dict().items() if name not in plain}
        assert {name.split(".", 3)[3] for name in new} == {f"mlp.{kind}_proj.bias" for kind in ("gate", "up", "down")}
        assert len(new) == 9 and not any(tensor.any() for tensor in new.values())

    def test_what_is_written_by_layer(self):
        model = qwen2()
        layers = model.model.layers
        for linear in (layers[0].self_attn.o_proj, layers[2].mlp.down_proj, layers[2].self_attn.o_proj):
            add_(linear)
        assert describe_(model) == "compact"
        assert listed(model) == {0: ["self_attn.o_proj"], 2: ["self_attn.o_proj", "mlp.down_proj"]}
        assert why_not_stock(model) == (
            "no config gives model.layers.0.self_attn.o_proj a bias (3 linears have one of their own)"
        )

    def test_a_class_with_a_switch_for_a_part(self):
        model = qwen3()
        add_(model.model.layers[0].self_attn.q_proj)
        add_(model.model.layers[0].mlp.up_proj)
        biased(model, share=0)
        assert model.config.attention_bias is True and listed(model) == {0: ["mlp.up_proj"]}

    def test_without_them_it_is_stock_again(self):
        model, plain = biased(mistral()), mistral()
        for linear in named_linears(model).values():
            remove_(linear)
        assert describe_(model) == "stock" and shapes(model) == shapes(plain)
        assert not listed(model) and block_method(model.config) is None

    @pytest.mark.parametrize(
        ("told", "message"),
        [
            (["mlp.no_proj"], r"gives model\.layers\.1\.mlp\.no_proj a bias, but there is no linear of that name"),
            (["input_layernorm"], r"gives model\.layers\.1\.input_layernorm a bias, but there is no linear"),
            ("mlp.up_proj", r"gives model\.layers\.1 extra_biases='mlp\.up_proj'; it must be a list of names"),
        ],
    )
    def test_refuses_what_was_edited(self, told, message):
        model = biased(mistral())
        config = model.config
        config.quantization_config["per_layer"]["model.layers"] = {"1": {"extra_biases": told}}
        with pytest.raises(CheckpointError, match=message):
            resize_(build_skeleton(type(model), config))


class TestLaterCuts:
    @pytest.mark.parametrize("share", [1.0, 0.4])
    @pytest.mark.parametrize("name", ["llama-gqa", "mistral", "qwen2", "qwen3", "t5-gated", "opt", "llava"])
    def test_units(self, name, share, tmp_path):
        model = unevenly(biased(VARIANTS[name](), share))
        for linear in named_linears(model).values():
            assert not has_bias(linear) or len(linear.bias) == len(linear.weight) == linear.out_features
        assert shapes(again(model, tmp_path)) == shapes(model)

    @pytest.mark.parametrize("name", ["mistral", "qwen3"])
    def test_blocks_take_theirs_along(self, name, tmp_path):
        model = biased(VARIANTS[name](), share=0.6, seed=1)
        lists = {layer: own.get("extra_biases") for layer, own in measure(model)["model.layers"].items()}
        assert len(set(map(str, lists.values()))) == 3
        drop(model, [1, 2])
        assert [own.get("extra_biases") for own in measure(model)["model.layers"].values()] == [lists[1], lists[2]]
        assert shapes(again(model, tmp_path)) == shapes(model)

    def test_a_block_that_alone_has_some_takes_them_away(self):
        model = mistral()
        add_(model.model.layers[1].mlp.up_proj)
        assert describe_(model) == "compact"
        assert describe_(drop(model, [0, 2])) == "stock"

    def test_a_sublayer_takes_them_away(self, tmp_path):
        model = skip(biased(mistral(), share=1.0), "mlp", 1)
        assert not any("mlp" in path for path in listed(model)[1]) and "self_attn.o_proj" in listed(model)[1]
        assert shapes(again(model, tmp_path)) == shapes(model)


class TestCreation:
    def test_zeros_of_the_dtype_that_learn_as_the_weight_does(self):
        model = opt(enable_bias=False).half()
        fc1, fc2 = model.model.decoder.layers[0].fc1, model.model.decoder.layers[0].fc2
        fc2.weight.requires_grad_(False)
        for linear in (fc1, fc2):
            add_(linear)
        assert fc1.bias.dtype == torch.float16 and fc1.bias.shape == (48,) and not fc1.bias.any()
        assert (fc1.bias.requires_grad, fc2.bias.requires_grad) == (True, False)
        fc1.bias.data.fill_(1)
        add_(fc1)
        assert fc1.bias.all()

    def test_for_now(self):
        model = qwen2()
        before = bits(model)
        with pytest.raises(KeyboardInterrupt), only_for_now(model):
            for linear in named_linears(model).values():
                add_(linear)
            raise KeyboardInterrupt
        assert bits(model) == before
