"""Slicing one group (what holds for every architecture is in adapters/test_contracts.py), dropping and skipping."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import pytest
import torch
from transformers import LlamaModel, T5EncoderModel

from optimum_prune.binding import adapter_for, bind, stacks
from optimum_prune.configs import stack_configs
from optimum_prune.errors import InvalidConfig
from optimum_prune.sizes import describe_
from optimum_prune.skipping import Skipped
from optimum_prune.surgery import drop_, skip_, slice_
from tests.models import inputs, llama, llava, opt, qwen2, t5
from tests.outputs import outputs
from tests.pruned import unevenly
from tests.shallow import POST_NORM, STACKS, SUBLAYERS, build, drop, skip, stack_of, zero


@pytest.fixture
def model():
    return llama(attention_bias=True, mlp_bias=True)


def group_of(model, unit, layer=1):
    return next(group for group in bind(model) if group.unit == unit and group.layer == layer)


def test_mlp_channels(model):
    mlp = model.model.layers[1].mlp
    before = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    slice_(group_of(model, "mlp_channel"), [0, 5, 47])
    rows = torch.tensor([0, 5, 47])
    for name in ("gate_proj", "up_proj"):
        assert torch.equal(mlp.state_dict()[f"{name}.weight"], before[f"{name}.weight"][rows])
        assert torch.equal(mlp.state_dict()[f"{name}.bias"], before[f"{name}.bias"][rows])
    assert torch.equal(mlp.down_proj.weight, before["down_proj.weight"][:, rows])
    assert torch.equal(mlp.down_proj.bias, before["down_proj.bias"])
    assert (mlp.intermediate_size, mlp.gate_proj.out_features, mlp.down_proj.in_features) == (3, 3, 3)


def test_kv_groups_take_their_query_heads_along(model):
    attention = model.model.layers[1].self_attn
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    slice_(group_of(model, "kv_group"), torch.tensor([1, 3]))
    kv = torch.tensor([*range(4, 8), *range(12, 16)])  # heads of 4 rows
    queries = torch.tensor([*range(8, 16), *range(24, 32)])  # two query heads to a group
    for name, rows in (("k_proj", kv), ("v_proj", kv), ("q_proj", queries)):
        assert torch.equal(attention.state_dict()[f"{name}.weight"], before[f"{name}.weight"][rows])
        assert torch.equal(attention.state_dict()[f"{name}.bias"], before[f"{name}.bias"][rows])
    assert torch.equal(attention.o_proj.weight, before["o_proj.weight"][:, queries])
    assert torch.equal(attention.o_proj.bias, before["o_proj.bias"])
    assert (attention.num_key_value_groups, attention.head_dim) == (2, 4)


def test_other_groups_are_left_alone(model):
    before = dict(model.named_parameters())
    slice_(group_of(model, "kv_group"), [0])
    changed = {name for name, parameter in model.named_parameters() if parameter is not before[name]}
    kinds = {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"}
    assert changed == {f"model.layers.1.self_attn.{kind}" for kind in kinds | {"o_proj.weight"}}


def test_cuts_compose(model):
    twice, once = (
        group_of(model, "mlp_channel", 0),
        group_of(llama(attention_bias=True, mlp_bias=True), "mlp_channel", 0),
    )
    slice_(twice, [1, 2, 3, 10, 20])
    slice_(twice, [0, 3])
    slice_(once, [1, 10])
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(twice.linears, once.linears, strict=True))


def test_the_old_storage_is_let_go(model):
    group = group_of(model, "mlp_channel")
    slice_(group, [0, 1])
    for linear in group.linears:
        assert linear.weight.untyped_storage().nbytes() == linear.weight.numel() * 4


def test_old_gradients_are_dropped(model):
    group = group_of(model, "mlp_channel")
    for linear in group.linears:
        linear.weight.grad = torch.ones_like(linear.weight)
    slice_(group, [0, 1])
    assert all(linear.weight.grad is None and linear.weight.is_leaf for linear in group.linears)


@pytest.mark.parametrize("kept", [[], [-1, 0], [4], [2, 1], [1, 1]], ids=str)
def test_refuses_other_than_sorted_units(model, kept):
    before = dict(model.named_parameters())
    with pytest.raises(InvalidConfig, match=r"model\.layers\.1\.self_attn has units 0 to 3; kept must be sorted"):
        slice_(group_of(model, "kv_group"), kept)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def logits(model):
    with torch.no_grad():
        return model(**inputs(model)).logits


def cuts(model, path):
    """Return kept blocks: without each one of them, and without all but one in the middle."""
    count = len(model.get_submodule(path))
    return [[i for i in range(count) if i != gone] for gone in range(count)] + [[1]]


class TestDrop:
    @pytest.mark.parametrize(("name", "path"), [pair for pair in STACKS if pair[0] not in POST_NORM])
    def test_equals_the_block_without_output_projections(self, name, path):
        """CASES.md 7 and 13; FORMAT.md 4: a difference of 0.0."""
        for kept in cuts(build(name), path):
            gone = {*range(len(build(name).get_submodule(path)))} - {*kept}
            expected = logits(zero(build(name), *(f"{path}.{layer}" for layer in gone)))
            model = drop(build(name), kept, path)
            assert torch.equal(logits(model), expected), kept
            assert not torch.equal(expected, logits(build(name)))  # else the blocks did nothing

    @pytest.mark.parametrize("name", sorted(POST_NORM))
    def test_equals_the_block_passed_by(self, name):
        (path,) = (path for variant, path in STACKS if variant == name)
        dense = build(name)
        dense.get_submodule(f"{path}.1").register_forward_hook(lambda block, args, output: args[0])
        assert torch.equal(logits(drop(build(name), [0, 2], path)), logits(dense))

    @pytest.mark.parametrize(("name", "path"), [pair for pair in STACKS if pair[1] != "encoder.block"])
    def test_generates_alike_with_every_cache_alone_and_padded(self, name, path):
        model = drop(build(name), [0, 2], path)
        got = outputs(model)
        for cache in got.keys() & {"dynamic", "static", "chunked", "alone"}:
            assert torch.equal(got[cache], got["uncached"]), cache
        if name not in POST_NORM:
            expected = outputs(zero(build(name), f"{path}.1"))
            assert [key for key in got if not torch.equal(got[key], expected[key])] == []

    @pytest.mark.parametrize("kept", [[0, 2], [1, 2], [1]], ids=str)
    def test_after_uneven_widths(self, kept):
        gone = {0, 1, 2} - {*kept}
        expected = outputs(zero(unevenly(llama()), *(f"model.layers.{layer}" for layer in gone)))
        got = outputs(drop(unevenly(llama()), kept))
        assert [key for key in got if not torch.equal(got[key], expected[key])] == []

    @pytest.mark.parametrize(("name", "path"), STACKS)
    def test_every_number_follows(self, name, path):
        model = build(name)
        kept = [0, *range(2, len(model.get_submodule(path)))]
        drop(model, kept, path)
        for layer, block in enumerate(model.get_submodule(path)):
            numbers = {module.layer_idx for module in block.modules() if hasattr(module, "layer_idx")}
            assert numbers in ({layer}, set())  # none in an old-style encoder
        fresh = type(model)(model.config)
        assert {n: t.shape for n, t in fresh.state_dict().items()} == {
            n: t.shape for n, t in model.state_dict().items()
        }
        found = stack_of(model, path)
        for ours, its in zip(stack_configs(model, found.stack), stack_configs(fresh, found.stack), strict=True):
            assert (ours.num_hidden_layers, ours.to_dict()[found.stack.depth]) == (
                its.num_hidden_layers,
                its.to_dict()[found.stack.depth],
            )

    @pytest.mark.parametrize(("name", "path"), STACKS)
    def test_nothing_else_changes(self, name, path):
        model = build(name).train()
        model.get_submodule(path)[0].eval()
        blocks = model.get_submodule(path)
        kept = [0, *range(2, len(blocks))]
        expected = {module: module.training for module in model.modules()}
        for module in blocks[1].modules():
            expected.pop(module, None)
        parameters = [p for n, p in model.named_parameters() if not n.startswith(f"{path}.1.")]
        drop(model, kept, path)
        assert {module: module.training for module in model.modules()} == expected
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))

    def test_keeping_all_changes_nothing(self):
        model = llama()
        describe_(model)
        before = model.config.to_dict()
        drop(model, [0, 1, 2])
        assert model.config.to_dict() == before and len(model.model.layers) == 3

    def test_a_headless_model(self):
        whole, model = llama(), LlamaModel(llama().config).eval()
        model.load_state_dict(whole.model.state_dict())
        drop(model, [0, 2])
        expected = zero(whole, "model.layers.1").model(**inputs(whole)).last_hidden_state
        assert torch.equal(model(**inputs(whole)).last_hidden_state, expected)

    @pytest.mark.parametrize("kept", [[], [0, 3], [-1], [2, 1], [1, 1]], ids=str)
    def test_refuses_other_than_sorted_blocks(self, kept):
        model = llama()
        before = model.config.to_dict()
        with pytest.raises(
            InvalidConfig, match=r"model\.layers has blocks 0 to 2; kept must be sorted, unique and not em"
        ):
            drop_(model, stack_of(model), kept)
        assert len(model.model.layers) == 3 and model.config.to_dict() == before

    def test_refuses_a_tower(self):
        model = llava()
        tower = stacks(model, adapter_for(model))[0]
        with pytest.raises(InvalidConfig, match=r"Blocks of model\.vision_tower\.\S+ cannot be dropped"):
            drop_(model, tower, [0])

    def test_refuses_to_make_a_block_without_attention_the_first(self):
        model = skip(llama(), "attention", 1)
        with pytest.raises(
            InvalidConfig, match=r"layers\.1 would become the first block with attention, .* Keep an earl"
        ):
            drop_(model, stack_of(model), [1, 2])
        drop(model, [0, 2])
        windows = skip(build("qwen2-mixed-windows"), "attention", 2)
        with pytest.raises(InvalidConfig, match=r"layers\.2 would become the first block with sliding_attention"):
            drop_(windows, stack_of(windows), [0, 2])
        assert len(windows.model.layers) == 3


class TestListsByLayer:
    """CASES.md 6."""

    KINDS = ("full_attention", "sliding_attention", "full_attention", "sliding_attention")

    def mixed(self):
        return qwen2(num_hidden_layers=4, layer_types=[*self.KINDS], use_sliding_window=True, sliding_window=8)

    @pytest.mark.parametrize("kept", [[0, 1, 3], [0, 2, 3], [1, 2], [2]], ids=str)
    def test_kinds_of_attention(self, kept):
        model, gone = drop(self.mixed(), kept), {0, 1, 2, 3} - {*kept}
        assert model.config.layer_types == [self.KINDS[layer] for layer in kept]
        expected = outputs(zero(self.mixed(), *(f"model.layers.{layer}" for layer in gone)))
        got = outputs(model)
        assert [key for key in got if not torch.equal(got[key], expected[key])] == []

    def test_lists_of_other_models(self):
        lists = {"mlp_layer_types": ["dense", "sparse", "dense"], "no_rope_layers": [1, 0, 1]}
        model = llama()
        model.config.eos_token_id = [2, 3, 4]  # as long as the model is deep, and no list by layer
        for name, entries in lists.items():
            setattr(model.config, name, entries)
        drop(model, [0, 1])
        assert model.config.mlp_layer_types == ["dense", "sparse"] and model.config.no_rope_layers == [1, 0]
        assert model.config.eos_token_id == [2, 3, 4]


class TestFirstBlock:
    """CASES.md 13."""

    @pytest.mark.parametrize("path", ["encoder.block", "decoder.block"])
    @pytest.mark.parametrize("kept", [[1, 2], [2]], ids=str)
    def test_the_position_bias_moves(self, path, kept):
        model = t5()
        table = model.get_submodule(f"{path}.0.layer.0.SelfAttention.relative_attention_bias")
        values = table.weight.clone()
        drop(model, kept, path)
        attention = [block.layer[0].SelfAttention for block in model.get_submodule(path)]
        assert attention[0].relative_attention_bias is table and torch.equal(table.weight, values)
        assert [a.has_relative_attention_bias for a in attention] == [True] + [False] * (len(kept) - 1)
        assert sum("relative_attention_bias" in name for name in model.state_dict()) == 2

    def test_of_both_stacks_and_generation(self):
        expected = zero(t5(), "encoder.block.0", "decoder.block.0")
        model = drop(drop(t5(), [1, 2], "encoder.block"), [1, 2], "decoder.block")
        got, wanted = outputs(model), outputs(expected)
        assert [key for key in got if not torch.equal(got[key], wanted[key])] == []

    def test_an_encoder_alone(self):
        whole = t5()
        model = T5EncoderModel(whole.config).eval()
        model.load_state_dict(whole.state_dict(), strict=False)
        drop(model, [1, 2])
        ids = inputs(whole)["input_ids"]
        expected = zero(whole, "encoder.block.0").encoder(ids).last_hidden_state
        assert torch.equal(model(ids).last_hidden_state, expected)
        assert model.config.num_layers == 2 and model.config.num_decoder_layers == 3


class TestSkip:
    @pytest.mark.parametrize(("name", "path", "kind"), SUBLAYERS)
    def test_equals_the_sublayer_without_output_projection(self, name, path, kind):
        """And generates alike with every cache, alone and padded; FORMAT.md 4."""
        site = stack_of(build(name), path).stack.sublayers[kind]
        expected = outputs(zero(build(name), f"{path}.2.{site}"))
        model = skip(build(name), kind, 2, path=path)
        got = outputs(model)
        assert [key for key in got if not torch.equal(got[key], expected[key])] == []
        for cache in got.keys() & {"dynamic", "static", "chunked", "alone"}:
            assert torch.equal(got[cache], got["uncached"]), cache
        assert not torch.equal(got["logits"], logits(build(name)))

    def test_both_of_one_block_are_the_block(self):
        expected = outputs(drop(llama(), [0, 2]))
        got = outputs(skip(skip(llama(), "attention", 1), "mlp", 1))
        assert [key for key in got if not torch.equal(got[key], expected[key])] == []

    def test_the_weights_are_gone_and_the_norms_stay(self):
        model = skip(llama(), "attention", 1)
        gone = {name for name in llama().state_dict() if ".1.self_attn." in name}
        assert {*llama().state_dict()} - {*model.state_dict()} == gone and len(gone) == 4

    def test_the_mode_is_kept(self):
        model = llama().train()
        skip(model, "mlp", 1)
        assert model.model.layers[1].mlp.training

    def test_trains(self):
        model = skip(skip(llama(), "attention", 1), "mlp", 2).train()
        model.gradient_checkpointing_enable()
        given = inputs(model)
        model(**given, labels=given["input_ids"]).loss.backward()
        idle = {"model.layers.1.input_layernorm.weight", "model.layers.2.post_attention_layernorm.weight"}
        assert {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()} == idle

    def test_skipping_again_changes_nothing(self):
        model = skip(llama(), "mlp", 1)
        before = model.config.to_dict()
        skip(model, "mlp", 1)
        assert model.config.to_dict() == before

    @pytest.mark.parametrize(
        ("model", "kind", "layer", "reason"),
        [
            (
                llama(),
                "attention",
                0,
                "it is the first layer with attention, and generation reads the number of cached",
            ),
            (build("qwen2-mixed-windows"), "attention", 1, "it is the first layer with sliding_attention, and gen"),
            (build("gemma3"), "attention", 1, "it is the first layer with full_attention, and generation reads"),
            (opt(), "attention", 1, "blocks of model.decoder.layers have no sub-layer of that kind to skip"),
            (llama(), "norm", 1, "blocks of model.layers have no sub-layer of that kind to skip"),
        ],
        ids=["first", "first-sliding", "first-full", "opt", "norm"],
    )
    def test_refuses(self, model, kind, layer, reason):
        with pytest.raises(InvalidConfig, match=rf"The {kind} of \S+\.{layer} cannot be skipped: {reason}"):
            skip_(model, stack_of(model), layer, kind)
        assert not any(isinstance(module, Skipped) for module in model.modules())

    def test_what_is_refused_would_be_wrong(self):
        """The reason for the rule: without it, tokens come out wrong, or not at all."""
        model = llama()
        model.model.layers[0].self_attn = type(skip(llama(), "attention", 1).model.layers[1].self_attn)()
        got = outputs(model)
        assert not torch.equal(got["dynamic"], got["uncached"])
