"""Compensation on live models, against slow versions that run the whole model from the start for every reader."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from optimum_prune.binding import bind, select
from optimum_prune.calibration.samples import CalibrationData
from optimum_prune.errors import CalibrationError, InvalidConfig, PruningError, UnsupportedModel
from optimum_prune.refit import check_compensation, compensate_, few_tokens
from optimum_prune.surgery import slice_
from tests.models import VARIANTS, inputs, llama, llava, opt, qwen2, t5, tokens
from tests.test_compensation import stacked
from tests.zeroed import bits, state

METHODS = ["least_squares", "sequential", "bias"]
SOLVED = METHODS[:2]
NORMS = {  # reader -> the norm that is given the residual stream in front of the reader's sub-layer
    "self_attn.o_proj": "input_layernorm",
    "mlp.down_proj": "post_attention_layernorm",
    "fc2": "final_layer_norm",
    "self_attn.out_proj": "self_attn_layer_norm",
    "layer.0.SelfAttention.o": "layer.0.layer_norm",
    "layer.1.EncDecAttention.o": "layer.1.layer_norm",
    "layer.1.DenseReluDense.wo": "layer.1.layer_norm",
    "layer.2.DenseReluDense.wo": "layer.2.layer_norm",
}
TOWER_NORMS = {"self_attn.out_proj": "layer_norm1", "mlp.fc2": "layer_norm2"}


def readers_of(group) -> dict[str, nn.Linear]:
    return dict(zip(group.linear_names[len(group.writers) :], group.readers, strict=True))


def batches_of(model):
    return [inputs(model, batch=i + 1, length=20 + i, seed=i) for i in range(3)]


def drawn(groups, seed=0) -> dict[str, Tensor]:
    """Keep about half of the units of every group, and all of those of one; ties are kept."""
    generator, tied = torch.Generator().manual_seed(seed), {}
    kept = {}
    for group in groups:
        chosen = torch.randperm(group.num_units, generator=generator)[: -(-group.num_units // 2)].sort().values
        kept[group.name] = tied.setdefault(group.stack, chosen) if group.group.tied == "units" else chosen
    spared = next(group for group in groups if group.layer == 1 and group.unit == "mlp_channel")
    kept[spared.name] = torch.arange(spared.num_units)
    return kept


def columns_of(group, kept, linear) -> Tensor:
    """Kept columns: units are equal contiguous blocks."""
    block = linear.in_features // group.num_units
    return torch.tensor([unit * block + i for unit in kept[group.name].tolist() for i in range(block)])


def cut(groups, kept) -> dict[str, tuple[nn.Linear, Tensor]]:
    """Readers that lose columns, and which they keep."""
    return {
        name: (linear, columns_of(group, kept, linear))
        for group in groups
        for name, linear in readers_of(group).items()
        if len(kept[group.name]) < group.num_units
    }


def compensated(model, method, groups=None, batches=None, seed=0):
    groups = bind(model) if groups is None else groups
    kept = drawn(groups, seed)
    notes = compensate_(model, groups, kept, batches or batches_of(model), method)
    return kept, notes


def only_zeroed(model, kept):
    """The same cut without compensation."""
    for linear, columns in cut(bind(model), kept).values():
        alone = torch.zeros_like(linear.weight)
        alone[:, columns] = linear.weight.data[:, columns]
        linear.weight.data = alone
    return model


@torch.no_grad()
def logits(model, batches) -> Tensor:
    return torch.cat([model(**batch).logits.flatten() for batch in batches])


@torch.no_grad()
def seen(model, batches, modules) -> dict[nn.Module, Tensor]:
    """What modules read first in every batch, all tokens `(T, d)`."""
    found = {module: [] for module in modules}
    handles = [
        module.register_forward_pre_hook(lambda module, args: found[module].append(args[0].flatten(0, -2)))
        for module in modules
    ]
    for batch in batches:
        model(**batch)
    for handle in handles:
        handle.remove()
    return {module: torch.cat(rows) for module, rows in found.items()}


@pytest.fixture(params=VARIANTS)
def model(request):
    return VARIANTS[request.param]()


def methods_for(model):
    biased = any(linear.bias is not None for group in bind(model) for linear in group.readers)
    return METHODS if biased else SOLVED


class TestWhatChanges:
    def test_the_masked_model_is_the_sliced_one(self, model):
        dense = model
        for method in methods_for(dense):
            model = copy.deepcopy(dense)
            kept, _ = compensated(model, method)
            batches = batches_of(model)
            masked = logits(model, batches)
            for group in bind(model):
                slice_(group, kept[group.name])
            torch.testing.assert_close(logits(model, batches), masked, rtol=1e-4, atol=1e-4)

    def test_only_readers_that_lose_columns(self, model):
        dense = model
        for method in methods_for(dense):
            model = copy.deepcopy(dense)
            before, parameters = state(model), dict(model.named_parameters())
            kept, _ = compensated(model, method)
            readers = cut(bind(model), kept)
            names = {f"{name}.weight" for name in readers}
            if method == "bias":
                names |= {f"{name}.bias" for name, (linear, _) in readers.items() if linear.bias is not None}
            after = model.state_dict()
            assert {name for name in after if not torch.equal(after[name], before[name])} == names
            assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
            for name, (linear, columns) in readers.items():
                gone = torch.ones(linear.in_features, dtype=torch.bool)
                gone[columns] = False
                assert not linear.weight.data[:, gone].contiguous().view(torch.int32).any()  # nor -0.0
                old = before[f"{name}.weight"][:, columns]
                assert torch.equal(linear.weight.data[:, columns], old) == (method == "bias")

    def test_groups_that_are_not_given(self):
        for method in SOLVED:
            model = llama()
            before = state(model)
            compensated(model, method, select(bind(model), ["mlp_channel"]))
            changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
            assert changed == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 2)}

    @pytest.mark.parametrize("method", SOLVED)
    def test_nothing_is_run_where_nothing_goes(self, method):
        model = llama()
        before = bits(model)
        groups = bind(model)
        kept = {group.name: torch.arange(group.num_units) for group in groups}
        assert compensate_(model, groups, kept, [], method) == []
        assert bits(model) == before


class TestGolden:
    def test_least_squares_on_the_inputs_of_the_dense_model(self, model):
        dense = copy.deepcopy(model)
        kept, _ = compensated(model, "least_squares")
        found, readers = cut(bind(model), kept), cut(bind(dense), kept)
        x = seen(dense, batches_of(dense), [linear for linear, _ in readers.values()])
        for name, (linear, columns) in readers.items():
            w, a = linear.weight.data.double(), x[linear].double()
            expected = stacked(a[:, columns], a @ w.t(), w[:, columns], 1e-2)
            new = found[name][0].weight.data[:, columns].double()
            torch.testing.assert_close(new, expected, rtol=1e-3, atol=1e-3)
            assert error(new, a[:, columns], a @ w.t()) < error(w[:, columns], a[:, columns], a @ w.t())

    @pytest.mark.parametrize("name", VARIANTS)
    def test_sequential(self, name):
        dense = VARIANTS[name]()
        model, slow = copy.deepcopy(dense), copy.deepcopy(dense)
        kept, _ = compensated(model, "sequential")
        slowly_(slow, dense, kept, adds=name not in ("gemma2", "gemma3", "opt-350m"))
        found, expected = cut(bind(model), kept), cut(bind(slow), kept)
        assert len(found) >= 2
        weights = [{reader: linear.weight.data for reader, (linear, _) in cut_.items()} for cut_ in (found, expected)]
        torch.testing.assert_close(*weights, rtol=2e-3, atol=2e-3)

    def test_bias(self):
        model = opt()
        dense = copy.deepcopy(model)
        kept, notes = compensated(model, "bias")
        found, readers = cut(bind(model), kept), cut(bind(dense), kept)
        x = seen(dense, batches_of(dense), [linear for linear, _ in readers.values()])
        for name, (linear, columns) in readers.items():
            gone = linear.weight.data.clone()
            gone[:, columns] = 0
            expected = linear.bias.data + gone @ x[linear].mean(dim=0)
            torch.testing.assert_close(found[name][0].bias.data, expected)
        assert notes == []


def error(weight, x, target) -> float:
    return float((x @ weight.t() - target).square().sum())


def slowly_(model, dense, kept, adds) -> None:
    """Refit reader after reader, each on the whole of both models so far; the stream is what the norms are given."""
    batches = batches_of(dense)
    readers, originals = cut(bind(model), kept), cut(bind(dense), kept)
    for name in calls(dense, {name: linear for name, (linear, _) in originals.items()}, batches[0]):
        (linear, columns), original = readers[name], originals[name][0]
        x, a = seen(model, batches, [linear])[linear], seen(dense, batches, [original])[original]
        target = a @ original.weight.t()
        if adds:
            target += stream(dense, name, batches) - stream(model, name, batches)
        w = original.weight.data[:, columns].double()
        new = stacked(x[:, columns].double(), target.double(), w, 1e-2)
        linear.weight.data.zero_()
        linear.weight.data[:, columns] = new.float()


@torch.no_grad()
def calls(model, linears, batch) -> list[str]:
    order: list[str] = []
    handles = [linear.register_forward_pre_hook(lambda *_, n=name: order.append(n)) for name, linear in linears.items()]
    model(**batch)
    for handle in handles:
        handle.remove()
    return order


def stream(model, name, batches) -> Tensor:
    group = next(group for group in bind(model) if name in group.linear_names)
    path = name.removeprefix(f"{group.stack}.{group.layer}.")
    norm = group.block.get_submodule((TOWER_NORMS if "vision" in name else NORMS)[path])
    return seen(model, batches, [norm])[norm]


def test_a_better_method_moves_the_output_less(model):
    """The claim of the methods, on the calibration data."""
    batches = batches_of(model)
    kept = drawn(bind(model))
    dense, none = logits(model, batches), only_zeroed(copy.deepcopy(model), kept)
    moved = [float((logits(none, batches) - dense).square().mean())]
    for method in SOLVED:
        cut_model = copy.deepcopy(model)
        assert compensated(cut_model, method)[0].keys() == kept.keys()
        moved.append(float((logits(cut_model, batches) - dense).square().mean()))
    assert moved[0] > moved[1] > moved[2], moved


def data_for(model) -> CalibrationData:
    """Samples of several lengths, for any model without pictures."""
    samples = [tokens(1, length, seed=i)[0] for i, length in enumerate((21, 30, 21, 30, 30, 9, 21))]
    data = CalibrationData(samples, 30, "test")
    if model.config.is_encoder_decoder:
        data = replace(data, targets=[sample[:7] for sample in reversed(samples)], start=0)
    return data


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [llama, opt, t5])
def test_any_batch_size(build, method):
    if method not in methods_for(build()):
        return
    weights = []
    for size in (1, 3, 4):
        model = build()
        compensated(model, method, batches=list(data_for(model).even_batches(size)))
        weights.append(state(model))
    for other in weights[1:]:
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, weights[0][name], rtol=1e-3, atol=1e-3)


class TestNothingIsLeftBehind:
    def check(self, model):
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        assert torch.is_grad_enabled() and model.training
        model(**inputs(model)).logits.sum().backward()
        assert all(linear.weight.grad is not None for group in bind(model) for linear in group.linears)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("build", [opt, t5])
    def test_after_success(self, build, method):
        model = build().train()
        if method in methods_for(model):
            compensated(model, method)
            self.check(model)

    @pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit()], ids=repr)
    @pytest.mark.parametrize(
        ("method", "function"), [("least_squares",) * 2, ("sequential", "towards"), ("bias", "bias_shift")]
    )
    def test_an_error_on_the_way_leaves_the_model_as_it_was(self, monkeypatch, method, function, error):
        model = opt().train()
        before, storage = bits(model), [parameter.data_ptr() for parameter in model.parameters()]
        original, count = getattr(__import__("optimum_prune.refit", fromlist=[""]), function), []

        def fail(*given):
            count.append(1)
            if len(count) == 4:
                raise error
            return original(*given)

        monkeypatch.setattr(f"optimum_prune.refit.{function}", fail)
        with pytest.raises(type(error)):
            compensated(model, method)
        assert len(count) == 4 and bits(model) == before
        assert storage == [parameter.data_ptr() for parameter in model.parameters()]
        self.check(model)

    @pytest.mark.parametrize("poor", [0, 1])
    @pytest.mark.parametrize("method", METHODS)
    def test_inputs_that_are_not_finite(self, method, poor):
        """Of the first batch, which is traced, or of a later one."""
        model = opt()
        model.model.decoder.embed_tokens.weight.data[95] = torch.inf
        before, batches = bits(model), [{"input_ids": tokens(2, 12, vocabulary=95)} for _ in range(2)]
        batches[poor]["input_ids"][0, 3] = 95
        with pytest.raises(UnsupportedModel, match=r"input of .*\.0\.self_attn\.out_proj is not finite"):
            compensated(model, method, batches=batches)
        assert bits(model) == before

    def test_an_error_while_writing_says_so(self, monkeypatch):
        monkeypatch.setattr("optimum_prune.refit.Reader.spread", lambda *_: 1 / 0)
        with pytest.raises(PruningError, match="partly pruned"):
            compensated(llama(), "least_squares")


class TestDtypes:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_solves_in_float32(self, method, dtype):
        full, half = opt(initializer_range=0.1), opt(initializer_range=0.1)
        half.to(dtype)
        full.load_state_dict(half.state_dict())
        compensated(full, method)
        compensated(half, method)
        for name, tensor in half.state_dict().items():
            assert tensor.dtype == dtype
            torch.testing.assert_close(tensor.float(), full.state_dict()[name], rtol=0.05, atol=0.08)

    @pytest.mark.parametrize("method", SOLVED)
    def test_wo_of_a_t5_stays_float32(self, method):
        model = t5().bfloat16()
        wide = [name for name, module in model.named_modules() if name.endswith(".wo") and module.float()]
        compensated(model, method)
        assert len(wide) == 6
        for name, parameter in model.named_parameters():
            assert parameter.dtype == (torch.float32 if ".wo." in name else torch.bfloat16)
        wo = model.get_submodule(wide[0]).weight
        assert not torch.equal(wo, wo.bfloat16().float())

    @pytest.mark.parametrize("method", SOLVED)
    def test_weights_that_do_not_fit_are_left_alone(self, method):
        """Two inputs that are nearly opposite: what makes up for one is large."""
        model = llama(mlp_bias=True).half()
        down = model.model.layers[1].mlp.down_proj
        down.weight.data.fill_(0.0)
        down.weight.data[:, 0] = 6e4
        mlp = model.model.layers[1].mlp
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.data[1] = linear.weight.data[0] / 2
            linear.bias.data[1] = linear.bias.data[0] / 2
        groups = [group for group in bind(model) if group.layer == 1 and group.unit == "mlp_channel"]
        kept = {groups[0].name: torch.tensor([1])}
        notes = compensate_(model, groups, kept, batches_of(model), method)
        fallback = "the compensated weights do not fit into torch.float16; they are not compensated."
        assert f"model.layers.1.mlp.down_proj: {fallback}" in notes
        assert not down.weight.any()


class TestRefusals:
    @pytest.mark.parametrize("build", [llama, qwen2, t5])
    def test_no_bias_to_shift(self, build):
        model = build()
        before = bits(model)
        for check in (lambda: check_compensation(bind(model), "bias"), lambda: compensated(model, "bias")):
            with pytest.raises(InvalidConfig, match=r"none of them has one .*Use compensation='least_squares'"):
                check()
        assert bits(model) == before

    def test_some_biases_are_enough(self):
        model = llama(mlp_bias=True)
        check_compensation(bind(model), "bias")
        _, notes = compensated(model, "bias")
        assert notes == ["3 readers have no bias to shift, e.g. model.layers.0.self_attn.o_proj."]

    def test_an_unknown_method(self):
        with pytest.raises(InvalidConfig, match=r"Unknown compensation 'sequental'.*Did you mean 'sequential'"):
            check_compensation(bind(llama()), "sequental")

    @pytest.mark.parametrize("method", METHODS)
    def test_a_tower_that_sees_no_picture(self, method):
        model = llava()
        groups = select(bind(model), names=["vision"])
        with pytest.raises(CalibrationError, match=r"No calibration sample passes through .*vision_tower"):
            compensated(model, method, groups, [{"input_ids": tokens()}])


class TestTokens:
    @pytest.mark.parametrize("method", SOLVED)
    def test_too_few(self, method):
        _, notes = compensated(llama(), method, batches=[{"input_ids": tokens(2, 60)}])
        assert notes == [
            "120 calibration tokens for readers of 48 inputs: least squares gains from more. 10 tokens for each "
            "input are 8 samples of this length (num_samples=8)."
        ]

    def test_the_advice_is_enough(self):
        for samples, length, width in ((32, 512, 4864), (2, 60, 48), (7, 100, 8960)):
            (warning,) = few_tokens(samples * length, width, samples)
            advised = int(warning.partition("num_samples=")[2].rstrip(")."))
            assert 10 * width <= advised * length < 10 * width + length
            assert few_tokens(advised * length, width, advised) == []

    @pytest.mark.parametrize("method", SOLVED)
    def test_enough(self, method):
        assert compensated(llama(), method, batches=[{"input_ids": tokens(4, 48)}])[1] == []

    @pytest.mark.parametrize("method", SOLVED)
    def test_of_a_decoder_its_own(self, method):
        batch = {"input_ids": tokens(8, 60), "decoder_input_ids": tokens(8, 2)}
        _, (note,) = compensated(t5(), method, batches=[batch])
        assert note.startswith("16 calibration tokens for readers of 48 inputs: ")
