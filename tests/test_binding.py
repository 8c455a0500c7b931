"""From declarations to live modules, and everything that is refused on the way."""
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
)

from optimum_prune.binding import adapter_for, bind, check_prunable, select
from optimum_prune.config import PruningConfig
from optimum_prune.errors import InvalidConfig, UnsupportedArchitecture, UnsupportedModel
from optimum_prune.pipeline import prune as prune_model
from optimum_prune.surgery import slice_
from tests.models import llama, t5


@pytest.fixture
def model():
    return llama()


def names(groups):
    return [group.name for group in groups]


class TestBind:
    def test_finds_every_group_in_the_order_of_the_blocks(self, model):
        groups = bind(model)
        sites = ("self_attn", "mlp")
        assert names(groups) == [f"model.layers.{layer}.{site}" for layer in range(3) for site in sites]
        assert [group.unit for group in groups] == ["kv_group", "mlp_channel"] * 3
        assert [group.layer for group in groups] == [0, 0, 1, 1, 2, 2]
        assert {group.stack for group in groups} == {"model.layers"}

    def test_measures_the_live_modules(self, model):
        attention, mlp = bind(model)[:2]
        assert (attention.num_units, attention.unit_size, attention.weights) == (
            4,
            4,
            2 * 32 * 32 + 2 * 16 * 32,
        )
        assert (mlp.num_units, mlp.unit_size, mlp.weights) == (48, 1, 3 * 48 * 32)
        assert attention.counts() == {"num_key_value_heads": 4, "num_attention_heads": 8}
        assert attention.linears == attention.writers + attention.readers
        assert attention.linear_names == [f"model.layers.0.self_attn.{p}_proj" for p in "kvqo"]
        assert [model.get_submodule(name) for name in mlp.linear_names] == mlp.linears

    def test_headless_base_model(self, model):
        groups = bind(LlamaModel(model.config))
        assert names(groups) == [name.removeprefix("model.") for name in names(bind(model))]

    def test_other_heads(self, model):
        classifier = AutoModelForSequenceClassification.from_config(model.config)
        assert names(bind(classifier)) == names(bind(model))
        extractive = names(bind(AutoModelForQuestionAnswering.from_config(model.config)))
        assert extractive == [name.replace("model.", "transformer.", 1) for name in names(bind(model))]

    def test_unknown_architecture_lists_the_known_ones(self):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
        with pytest.raises(
            UnsupportedArchitecture,
            match=r"Unknown architecture 'gpt2'; supported: 'gemma2', .*'llama', 'llava', 'mistral'",
        ):
            bind(gpt2)

    def test_a_model_that_is_none_of_transformers(self):
        with pytest.raises(UnsupportedArchitecture, match=r"Linear has no config\.model_type.*AutoModelForCausalLM"):
            adapter_for(nn.Linear(2, 2))

    def test_a_known_type_with_other_modules(self, model):
        del model.model.layers[1].mlp.up_proj
        with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj is missing"):
            bind(model)
        del model.model.layers
        with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM has no model\.layers.*, so this class cannot"):
            bind(model)

    def test_rows_that_do_not_fall_into_units(self, model):
        model.model.layers[2].self_attn.v_proj = nn.Linear(32, 14, bias=False)
        with pytest.raises(UnsupportedModel, match=r"layers\.2\.self_attn\.v_proj carries 14 rows.*4 equal units"):
            bind(model)


class OtherTensor(torch.Tensor):
    """A stand-in for the tensor subclasses that hold quantised or distributed weights."""


class OtherLinear(nn.Module):
    """A stand-in for the layers that quantizers put in the place of a linear one."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().to(torch.int8))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def as_int8_parameter(linear):
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)


def as_float8_parameter(linear):
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


def as_tensor_subclass(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(OtherTensor), requires_grad=False)


def as_masked_by_torch(linear):
    prune.l1_unstructured(linear, "weight", 0.5)


def as_parametrized(linear):
    parametrize.register_parametrization(linear, "weight", Doubled())


class TestNotPlain:
    @pytest.mark.parametrize(
        ("spoil", "what"),
        [
            (as_int8_parameter, r"Linear \(weight: Parameter, torch\.int8\)"),
            (as_float8_parameter, r"Linear \(weight: Parameter, torch\.float8_e4m3fn\)"),
            (as_tensor_subclass, r"Linear \(weight: OtherTensor, torch\.float32\)"),
            (as_masked_by_torch, r"Linear \(weight: Tensor, torch\.float32\)"),
            (as_parametrized, r"ParametrizedLinear \(weight: Tensor, torch\.float32\)"),
        ],
    )
    def test_weights(self, model, spoil, what):
        spoil(model.model.layers[1].mlp.down_proj)
        with pytest.raises(
            UnsupportedModel, match=rf"^model\.layers\.1\.mlp\.down_proj is a \S*{what}, not a plain linear"
        ):
            bind(model)

    def test_layers(self, model):
        attention = model.model.layers[0].self_attn
        attention.q_proj = OtherLinear(attention.q_proj)
        with pytest.raises(
            UnsupportedModel, match=r"self_attn\.q_proj is a \S*OtherLinear .*int8.*without a quantizer"
        ):
            bind(model)

    def test_peft(self, model):
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(UnsupportedModel, match=r"PeftModel is a wrapper around LlamaForC.*without wrappers"):
            bind(wrapped)
        with pytest.raises(UnsupportedModel, match=r"self_attn\.q_proj is a peft\.\S*Linear.*merge or unload adapters"):
            bind(model)  # peft has replaced its layers in place
        assert len(bind(wrapped.unload())) == 6


class TestSelect:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, ["0.self_attn", "0.mlp", "1.self_attn", "1.mlp", "2.self_attn", "2.mlp"]),
            ({"units": ["mlp_channel"]}, ["0.mlp", "1.mlp", "2.mlp"]),
            ({"units": ["kv_group", "mlp_channel"], "include": ["model.layers.1"]}, ["1.self_attn", "1.mlp"]),
            ({"include": ["*"], "exclude": ["model.layers.[02]"]}, ["1.self_attn", "1.mlp"]),
            ({"include": ["model.layers.*.mlp"]}, ["0.mlp", "1.mlp", "2.mlp"]),
            ({"include": ["*.0.mlp", "*.2.self_attn"]}, ["0.mlp", "2.self_attn"]),
            (
                {"include": ["*.down_proj"], "exclude": ["*.0.*"]},
                ["1.mlp", "2.mlp"],
            ),  # one linear decides for its group
            ({"exclude": ["model.layers.1.self_attn.k_proj", "*.mlp"]}, ["0.self_attn", "2.self_attn"]),
            ({"exclude": ["model.layers.?.self_attn", "*2*"]}, ["0.mlp", "1.mlp"]),
        ],
    )
    def test_keeps(self, model, options, expected):
        assert names(select(bind(model), **options)) == [f"model.layers.{name}" for name in expected]

    def test_a_pattern_is_no_prefix(self):
        chosen = select(bind(llama(num_hidden_layers=12)), include=["model.layers.1"])
        assert {group.layer for group in chosen} == {1}

    @pytest.mark.parametrize("side", ["include", "exclude"])
    def test_a_pattern_that_matches_nothing(self, model, side):
        with pytest.raises(
            InvalidConfig, match=r"'no_such_layer'; supported: 'model\.layers\.\*\.self_attn', "
        ) as raised:
            select(bind(model), **{side: ["*.mlp", "no_such_layer"]})
        assert "'model.layers.*.mlp.down_proj'" in str(raised.value)

    def test_the_nearest_name_is_suggested(self, model):
        with pytest.raises(InvalidConfig, match=r"Did you mean 'model\.layers\.\*\.mlp\.gate_proj'\?"):
            select(bind(model), include=["model.layers.*.mlp.gate_porj"])

    def test_embedding_and_head_are_no_targets(self, model):
        for name in ("lm_head", "model.embed_tokens", "model.norm"):
            with pytest.raises(InvalidConfig, match=name):
                select(bind(model), exclude=[name])

    def test_a_unit_that_the_model_lacks(self, model):
        channels = [group for group in bind(model) if group.unit == "mlp_channel"]
        with pytest.raises(InvalidConfig, match=r"Unknown unit 'kv_group'; supported: 'mlp_channel'\."):
            select(channels, units=["kv_group"])

    def test_nothing_left(self, model):
        with pytest.raises(InvalidConfig, match=r"Nothing is left to prune: .*exclude=\['\*'\].* 6 groups"):
            select(bind(model), exclude=["*"])
        with pytest.raises(InvalidConfig, match="Nothing is left to prune"):
            select(bind(model), units=["kv_group"], include=["*.mlp"])


class TestCheckPrunable:
    def test_plain_models_pass(self, model):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            check_prunable(model.to(dtype), bind(model))
        tied = llama(tie_word_embeddings=True, attention_bias=True)
        check_prunable(tied, bind(tied))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_non_finite_weights_are_named(self, model, value):
        model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
        with pytest.raises(UnsupportedModel, match=r"^model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinite"):
            check_prunable(model, bind(model))
        check_prunable(model, select(bind(model), exclude=["model.layers.1.mlp"]))  # it stays as it is

    def test_non_finite_biases_are_named(self):
        model = llama(mlp_bias=True)
        model.model.layers[2].mlp.down_proj.bias.data[0] = torch.nan
        with pytest.raises(UnsupportedModel, match=r"^model\.layers\.2\.mlp\.down_proj\.bias holds NaN"):
            check_prunable(model, bind(model))

    def test_meta_weights_are_named(self, model):
        model.model.layers[2].self_attn.to("meta")
        with pytest.raises(
            UnsupportedModel,
            match=r"^model\.layers\.2\.self_attn\.k_proj\.weight is not in memory.*device_map",
        ):
            check_prunable(model, bind(model))

    def test_shared_weights_are_named(self, model):
        first, _, last = model.model.layers
        last.mlp.gate_proj.weight = first.mlp.gate_proj.weight
        with pytest.raises(
            UnsupportedModel, match=r"layers\.0\.mlp\.gate_proj\.weight is shared between .*layers\.2\.mlp"
        ):
            check_prunable(model, bind(model))
        last.mlp.gate_proj = first.mlp.gate_proj  # the module itself
        with pytest.raises(UnsupportedModel, match="is shared between"):
            check_prunable(model, bind(model))


@pytest.mark.parametrize("scorer", ["magnitude", "random"])
def test_nan_in_a_table_that_is_cut_is_refused(scorer):
    model = t5()
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    with torch.no_grad():
        table.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedModel, match=r"encoder\.block\.0\..*relative_attention_bias\.weight holds NaN"):
        prune_model(model, PruningConfig(scorer=scorer, sparsity=0.3))


def test_heads_that_no_config_can_count_are_refused_before_the_cut():
    """CASES.md 13: heads that differ between the layers of a stack."""
    model = t5()
    for group in bind(model):
        if group.name == "encoder.block.1.layer.0.SelfAttention":
            slice_(group, range(5))
    before = {name: tensor.shape for name, tensor in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match=r"encoder\.block\.1\..* has 5 kv_groups, but block 0 has 8"):
        prune_model(model, PruningConfig(scorer="magnitude", sparsity=0.3))
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == before
