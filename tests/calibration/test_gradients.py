"""Block-streamed gradients: those of a plain backward to the bit, at the price of one block's."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false

import copy
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, LlamaModel

from optimum_prune.binding import adapter_for, bind, stacks
from optimum_prune.calibration.data import CalibrationData
from optimum_prune.calibration.gradients import HALF_SCALE, Gradients, Wanted, stream_gradients
from optimum_prune.errors import CalibrationError, UnsupportedModel
from optimum_prune.objectives import LOSS, Objective, Outputs
from optimum_prune.objectives import NTK as LARGEST
from optimum_prune.scorers.ntk import SCORER as NTK
from optimum_prune.scoring import score_groups
from tests.models import VARIANTS, inputs, llama, llava, mistral, tokens

LENGTHS = (12, 5, 9, 12, 1)


def loss(logits, mask):
    """A second objective, to which padding is a zero weight: log-likelihoods of fixed words."""
    targets = torch.arange(logits.shape[1], device=logits.device) % logits.shape[2]
    return (logits.float().log_softmax(-1)[..., targets].diagonal(dim1=1, dim2=2) * mask).sum()


def ntk(logits, mask):
    return LARGEST.value(Outputs(logits, logits, mask, mask.long()))


def stream(model, stacks, linears, batches, objective, reduce) -> None:
    """Stream the gradients of one objective of logits and mask, with respect to weights alone."""
    asked = Objective("asked", lambda outputs: objective(outputs.logits, outputs.mask))

    def reduce_weights(place, found: dict[str, Gradients]):
        assert not found["asked"].gates
        reduce(place, found["asked"].weights)

    labels = [batch.get("decoder_input_ids", batch["input_ids"]) for batch in batches]
    stream_gradients(model, stacks, batches, labels, [Wanted(asked, linears)], reduce_weights)


def batches_of(batch_size, lengths=LENGTHS, pad=0) -> list[dict[str, torch.Tensor]]:
    samples = [tokens(1, length, seed=i)[0] for i, length in enumerate(lengths)]
    return list(CalibrationData(samples, 12, "test").batches(batch_size, pad))


def stacks_of(model) -> dict[str, nn.ModuleList]:
    return {found.path: found.blocks for found in stacks(model, adapter_for(model))}


def linears_of(model, layers=None) -> dict[tuple[int, int], list[nn.Linear]]:
    """Return the linears of every block, or of some blocks of every stack."""
    blocks = {(s, b): block for s, stack in enumerate(stacks_of(model).values()) for b, block in enumerate(stack)}
    return {
        place: [m for m in block.modules() if isinstance(m, nn.Linear)]
        for place, block in blocks.items()
        if layers is None or place[1] in layers
    }


def streamed(model, batches, objective=ntk, layers=None) -> dict[nn.Linear, torch.Tensor]:
    gradients: dict[nn.Linear, torch.Tensor] = {}
    order: list[tuple[int, int]] = []

    def reduce(place, of_block):
        assert not torch.is_grad_enabled()
        order.append(place)
        gradients.update(of_block)

    linears = linears_of(model, layers)
    stream(model, stacks_of(model), linears, batches, objective, reduce)
    assert order == sorted((place for place in linears_of(model) if place >= min(linears)), reverse=True)
    assert gradients.keys() == {linear for of_block in linears.values() for linear in of_block}
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    return gradients


def plain(model, batches, objective=ntk, layers=None, scale=1.0) -> Iterator[tuple[nn.Linear, torch.Tensor]]:
    """The backward that everybody writes, per batch in float32."""
    samples = sum(len(batch["input_ids"]) for batch in batches)
    linears = [linear for of_block in linears_of(model, layers).values() for linear in of_block]
    totals: list[torch.Tensor] = []
    for batch in batches:
        model.zero_grad()
        logits = model(**batch, use_cache=False).logits
        mask = batch.get("decoder_attention_mask", batch["attention_mask"]).bool()
        (objective(logits, mask) * (scale / samples)).backward()
        new = [
            torch.zeros_like(linear.weight) if linear.weight.grad is None else linear.weight.grad.float()
            for linear in linears
        ]
        totals = [total + grad for total, grad in zip(totals, new, strict=True)] if totals else new
    model.zero_grad()
    return zip(linears, (total / scale for total in totals), strict=True)


class TestEqualsAPlainBackward:
    @pytest.mark.parametrize("objective", [ntk, loss])
    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    @pytest.mark.parametrize("build", [llama, mistral])
    def test_in_float32(self, build, batch_size, objective):
        model, batches = build(attention_dropout=0.5), batches_of(batch_size)
        got = streamed(model.train(), batches, objective)  # dropout is switched off for it
        for linear, expected in plain(model.eval(), batches, objective):
            assert expected.abs().max() > 0
            assert torch.equal(got[linear], expected)

    @pytest.mark.parametrize(
        "variant", [{"tie_word_embeddings": True, "mlp_bias": True}, {"num_key_value_heads": 1}], ids=str
    )
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_other_shapes(self, variant, attention):
        model, batches = llama(attn_implementation=attention, **variant), batches_of(2)
        got = streamed(model, batches)
        assert all(torch.equal(got[linear], expected) for linear, expected in plain(model, batches))

    @pytest.mark.parametrize("layers", [[2], [1, 2], [0, 2], [1], [0]], ids=str)
    def test_of_some_blocks_alone(self, layers):
        model, batches = llama(), batches_of(2)
        got = streamed(model, batches, layers=layers)
        assert all(torch.equal(got[linear], expected) for linear, expected in plain(model, batches, layers=layers))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_in_half_precision(self, dtype):
        model, batches = llama().to(dtype), batches_of(2)
        scale = HALF_SCALE if dtype == torch.float16 else 1.0
        got, exact = streamed(model, batches), streamed(copy.deepcopy(model).float(), batches)
        assert all(torch.equal(got[linear], expected) for linear, expected in plain(model, batches, scale=scale))
        for gradient, reference in zip(got.values(), exact.values(), strict=True):
            assert (gradient - reference).norm() < 0.2 * reference.norm()

    def test_float16_does_not_lose_small_gradients(self):
        model, batches = llama().half(), batches_of(2)
        big, small = (
            streamed(model, batches),
            streamed(model, batches, lambda logits, mask: 2.0**-12 * ntk(logits, mask)),
        )
        for linear, gradient in big.items():
            assert (small[linear] * 2.0**12 - gradient).norm() < 0.02 * gradient.norm()

    def test_whatever_the_callers_grad_mode(self):
        model, batches = llama(), batches_of(2)
        with torch.no_grad():
            got = streamed(model, batches)
            assert not torch.is_grad_enabled()
        assert all(torch.equal(got[linear], expected) for linear, expected in plain(model, batches))

    def test_with_gradient_checkpointing_switched_on(self):
        model, batches = llama(), batches_of(2)
        expected = streamed(model, batches).values()
        model.train().gradient_checkpointing_enable()
        assert all(torch.equal(a, b) for a, b in zip(streamed(model, batches).values(), expected, strict=True))


def batches_for(model, lengths=(12, 12, 12)) -> list[dict[str, torch.Tensor]]:
    """Return two batches of any architecture, the second one of a single sample; with padding where lengths differ."""
    samples = [inputs(model, 1, length, seed=i) for i, length in enumerate(lengths)]
    joined = CalibrationData(
        [sample["input_ids"][0] for sample in samples],
        12,
        "test",
        targets=[s["decoder_input_ids"][0] for s in samples] if model.config.is_encoder_decoder else None,
        start=0,
        images=[s["pixel_values"] for s in samples] if "pixel_values" in samples[0] else None,
    )
    return list(joined.batches(2, 0))


class TestEveryArchitecture:
    """The order of additions differs where several blocks read the same encoder, so equal is within rounding."""

    @pytest.mark.parametrize("name", VARIANTS)
    def test_equals_a_plain_backward(self, name):
        model = VARIANTS[name]()
        batches = batches_for(model)
        got = streamed(model, batches)
        for linear, expected in plain(model, batches):
            assert (got[linear] - expected).norm() <= 1e-5 * expected.norm()

    @pytest.mark.parametrize("name", ["t5", "t5-gated"])
    def test_with_padding_in_both_stacks(self, name):
        model = VARIANTS[name]()
        batches = batches_for(model, lengths=(12, 5, 9))
        got = streamed(model, batches)
        for linear, expected in plain(model, batches):
            assert expected.norm() > 0
            assert (got[linear] - expected).norm() <= 1e-5 * expected.norm()

    @pytest.mark.parametrize("name", ["t5", "llava"])
    def test_of_the_later_stack_alone(self, name):
        model = VARIANTS[name]()
        later = {place: linears for place, linears in linears_of(model).items() if place[0] == 1}
        got, places = {}, []

        def reduce(place, gradients):
            places.append(place)
            got.update(gradients)

        stream(model, stacks_of(model), later, batches_for(model), ntk, reduce)
        assert places == sorted(later, reverse=True)
        for linear, expected in plain(model, batches_for(model)):
            if linear in got:
                assert (got[linear] - expected).norm() <= 1e-5 * expected.norm()

    def test_the_vision_tower_is_read_before_its_last_block(self):
        model = llava()
        got = streamed(model, batches_for(model))
        norms = [
            sum(got[m].norm().item() for m in block.modules() if isinstance(m, nn.Linear))
            for block in model.model.vision_tower.encoder.layers
        ]
        assert norms[0] > 0 and norms[1] > 0 and norms[2] == 0

    def test_after_a_forward_that_collected_hidden_states(self):
        model = llava()
        model(**inputs(model))  # from here on transformers' own hooks sit on the tower
        got = streamed(model, batches_for(model))
        for linear, expected in plain(model, batches_for(model)):
            assert (got[linear] - expected).norm() <= 1e-5 * expected.norm()

    def test_a_tower_that_no_sample_passes_through(self):
        model = llava()
        with pytest.raises(CalibrationError, match=r"No calibration sample passes through model.vision_tower.*images"):
            streamed(model, batches_of(2))


class TestGates:
    """Products of an input with the gradient of the loss to it, summed over the tokens of a sample."""

    @staticmethod
    def streamed_gates(model, batches, labels):
        readers = {
            place: [linear for group in bind(model) for linear in group.readers if linear in {*block.modules()}]
            for place, block in (
                ((s, b), block) for s, stack in enumerate(stacks_of(model).values()) for b, block in enumerate(stack)
            )
        }
        found: dict[nn.Linear, torch.Tensor] = {}

        def reduce(place, gradients: dict[str, Gradients]):
            assert not gradients["loss"].weights
            found.update(gradients["loss"].gates)

        stream_gradients(model, stacks_of(model), batches, labels, [Wanted(LOSS, gates=readers)], reduce)
        return found

    @staticmethod
    def plain_gates(model, batches, labels):
        """Leaves put in front of the readers, one whole backward."""
        readers = [linear for group in bind(model) for linear in group.readers]
        totals: dict[nn.Linear, list[torch.Tensor]] = {linear: [] for linear in readers}
        count = sum(int((row != -100).sum()) for row in labels)
        for batch, row in zip(batches, labels, strict=True):
            given: dict[nn.Linear, torch.Tensor] = {}

            def keep(linear, args, given=given):
                args[0].retain_grad()
                given[linear] = args[0]

            handles = [linear.register_forward_pre_hook(keep) for linear in readers]
            logits = model(**batch, use_cache=False).logits
            (nn.functional.cross_entropy(logits.flatten(0, 1), row.flatten(), reduction="sum") / count).backward()
            for handle in handles:
                handle.remove()
            for linear, x in given.items():
                if x.grad is not None:
                    rows = len(x) if x.dim() == 3 else len(batch["input_ids"])  # OPT's MLP flattens
                    totals[linear].append((x.detach() * x.grad).reshape(rows, -1, x.shape[-1]).sum(dim=1))
        return totals

    @pytest.mark.parametrize("name", VARIANTS)
    def test_equal_a_plain_backward(self, name):
        model = VARIANTS[name]().float()
        batches = batches_for(model)
        labels = []
        for batch in batches:
            ids = batch.get("decoder_input_ids", batch["input_ids"])
            mask = batch.get("decoder_attention_mask", batch["attention_mask"])
            labels.append(torch.where(mask.bool(), ids % 7, -100))
        got = self.streamed_gates(model, batches, labels)
        for linear, expected in self.plain_gates(model, batches, labels).items():
            if expected:
                rows = torch.cat(expected)
                torch.testing.assert_close(got[linear], rows, rtol=1e-4, atol=1e-5 * rows.abs().max().item())
            else:
                assert not got[linear].any()


class TestPaddingAndBatches:
    def scores(self, model, batch_size, lengths):
        samples = [tokens(1, length, seed=i)[0] for i, length in enumerate(lengths)]
        data = CalibrationData(samples, 12, "test")
        return list(score_groups(model, bind(model), [NTK], data=data, batch_size=batch_size)[0].values())

    @pytest.mark.parametrize("lengths", [(12,) * 8, (12, 5, 9, 12, 1, 3, 7, 8)], ids=["full", "padded"])
    def test_micro_batches_of_any_size_give_the_same_scores(self, lengths):
        one, *others = (self.scores(llama(), size, lengths) for size in (1, 2, 8))
        for other in others:
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=0)

    def test_padding_is_not_seen(self):
        model = llama()
        zeros, nineties = streamed(model, batches_of(5, pad=0)), streamed(model, batches_of(5, pad=90))
        assert all(torch.equal(zeros[linear], nineties[linear]) for linear in zeros)

    def test_the_mask_is_what_hides_it(self):
        model, (batch,) = llama(), batches_of(5)
        seen = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
        hidden, shown = streamed(model, [batch]), streamed(model, [seen])
        assert any((hidden[linear] - shown[linear]).norm() > 0.1 * shown[linear].norm() for linear in hidden)


class TestLeavesTheModelAsItWas:
    @pytest.fixture
    def model(self):
        model = llama(attention_bias=True).train()
        model.model.layers[1].eval()
        model.lm_head.requires_grad_(False)
        model.model.layers[0].mlp.requires_grad_(False)
        model.model.norm.weight.grad = torch.ones(32)
        model.model.layers[2].register_forward_hook(lambda *_: None)
        return model

    @staticmethod
    def state(model):
        return {
            "values": [tensor.tolist() for tensor in model.state_dict().values()],
            "training": [module.training for module in model.modules()],
            "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
            "grad": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
            "parameters": [id(parameter) for parameter in model.parameters()],
            "hooks": [
                [list(getattr(module, kind)) for module in model.modules()]
                for kind in (
                    "_forward_hooks",
                    "_forward_pre_hooks",
                    "_backward_hooks",
                    "_forward_hooks_with_kwargs",
                )
            ],
            "tensor hooks": [list((parameter._backward_hooks or {}).keys()) for parameter in model.parameters()],
        }

    def test_when_all_goes_well(self, model):
        before = self.state(model)
        streamed(model, batches_of(2))
        assert self.state(model) == before

    def test_when_the_objective_raises(self, model):
        def objective(logits, mask):
            raise RuntimeError("objective")

        before = self.state(model)
        with pytest.raises(RuntimeError, match="objective"):
            streamed(model, batches_of(2), objective)
        assert self.state(model) == before

    @pytest.mark.parametrize("call", [1, 3, 4, 6], ids=["forward", "second forward", "backward", "backward, again"])
    def test_when_a_block_raises(self, model, call):
        calls = []

        def hook(*_):
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt  # as a user would

        model.model.layers[1].mlp.register_forward_hook(hook)
        before = self.state(model)
        with pytest.raises(KeyboardInterrupt):
            streamed(model, batches_of(2))
        assert self.state(model) == before

    def test_when_reducing_raises(self, model):
        def reduce(index, gradients):
            raise ValueError(index)

        before = self.state(model)
        with pytest.raises(ValueError, match="2"):
            stream(model, stacks_of(model), linears_of(model), batches_of(2), ntk, reduce)
        assert self.state(model) == before


class TestRefuses:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_a_block_that_gives_no_numbers(self, index, value):
        model = llama()
        model.model.layers[index].mlp.down_proj.weight.data[0, 0] = value
        with pytest.raises(UnsupportedModel, match=rf"model.layers.{index} .*not finite.*bfloat16 or float32"):
            streamed(model, batches_of(2))

    def test_an_overflow_of_activations(self):
        model = llama().half()
        model.model.layers[1].mlp.down_proj.weight.data.fill_(6e4)
        with pytest.raises(UnsupportedModel, match=r"model.layers.1 .*not finite"):
            streamed(model, batches_of(2))

    @pytest.mark.parametrize(("module", "what"), [("model.embed_tokens", "embeddings"), ("lm_head", "head")])
    def test_numbers_lost_outside_the_blocks(self, module, what):
        model = llama()
        model.get_submodule(module).weight.data.fill_(torch.nan)
        with pytest.raises(UnsupportedModel, match=f"{what} .*not finite"):
            streamed(model, batches_of(2))

    def test_gradients_that_are_no_numbers(self):
        with pytest.raises(UnsupportedModel, match=r"gradient of model\.layers\.2"):
            streamed(llama(), batches_of(2), lambda logits, mask: (0 * logits).sum().sqrt())

    @pytest.mark.parametrize(
        "build", [LlamaModel, AutoModelForSequenceClassification.from_config], ids=["base", "classifier"]
    )
    def test_a_model_without_logits_per_token(self, build):
        model = build(llama().config).eval()
        blocks = getattr(model, "model", model).layers
        linears = {(0, 0): [blocks[0].mlp.up_proj]}
        with pytest.raises(UnsupportedModel, match=r"gives no logits \(batch, tokens, vocabulary\)"):
            stream(model, {"layers": blocks}, linears, batches_of(2), ntk, lambda *_: None)


class WeightSized(TorchDispatchMode):
    """Counts the storages of a weight's shape that are alive, and are no weight, after every operation."""

    def __init__(self, model):
        super().__init__()
        self.weights = {linear.weight for of_block in linears_of(model).values() for linear in of_block}
        self.shapes = {shape for w in self.weights for shape in (w.shape, w.shape[::-1])}
        self.alive: list[weakref.ref] = []
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        new = [tensor for tensor in tensors if tensor.shape in self.shapes and tensor.is_floating_point()]
        self.alive += [weakref.ref(tensor) for tensor in new]
        self.alive = [reference for reference in self.alive if reference() is not None]
        storages = {s.data_ptr(): s for reference in self.alive if (s := self.storage(reference())) is not None}
        for weight in self.weights:
            storages.pop(weight.untyped_storage().data_ptr(), None)
        self.peak = max(self.peak, len(storages))
        return result

    @staticmethod
    def storage(tensor):
        """Return the memory of a tensor, None for one that is a single number expanded."""
        if tensor is None or tensor.untyped_storage().nbytes() < tensor.nbytes:
            return None
        return tensor.untyped_storage()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_holds_one_blocks_gradients_at_a_time(dtype):
    model, batches = llama(num_hidden_layers=5).to(dtype), batches_of(2)
    with WeightSized(model) as whole:
        list(plain(model, batches[:1]))
    assert whole.peak >= 5 * 7  # what there is to save, and that the counter counts
    with WeightSized(model) as one:
        stream(model, stacks_of(model), linears_of(model), batches, ntk, lambda *_: None)
    assert one.peak <= 7 + 1  # a block's seven, and the one that is being added or looked at
