"""One forward that stops at every linear: what it sees, how often it runs, and what it leaves behind."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from greenlet import greenlet
from torch import nn

from optimum_prune.binding import bind
from optimum_prune.errors import CalibrationError, UnsupportedModel
from optimum_prune.layerwise import trace, walk
from tests.models import VARIANTS, inputs, llama, llava, t5, tokens


def linears_of(model) -> dict[str, nn.Module]:
    return {
        name: linear for group in bind(model) for name, linear in zip(group.linear_names, group.linears, strict=True)
    }


def batches_of(model, count=3):
    """Batches of one, two and three samples of different lengths."""
    return [inputs(model, batch=i + 1, length=11 + i, seed=i) for i in range(count)]


def halve_(linear: nn.Module, x: torch.Tensor) -> None:
    """Zero the half of a linear that says least about the input; what it does depends on every bit of the input."""
    scores = linear.weight.abs() * x.square().mean(dim=0)
    linear.weight.copy_(torch.where(scores > scores.median(dim=1, keepdim=True).values, linear.weight, 0))


def pruning(linears):
    def step(names, inputs):
        x = torch.cat([x.flatten(0, -2) for x in inputs])
        for name in names:
            halve_(linears[name], x)

    return step


def slowly_(model, batches) -> None:
    """Prune linear after linear; run the whole model from the start for the input of each."""
    linears = linears_of(model)
    order, seen = [], []
    handles = [m.register_forward_pre_hook(lambda *_, n=n: order.append(n)) for n, m in linears.items()]
    model(**batches[0], use_cache=False)
    for handle in handles:
        handle.remove()
    assert sorted(order) == sorted(linears)
    for name in order:
        seen.clear()
        handle = linears[name].register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
        for batch in batches:
            model(**batch, use_cache=False)
        handle.remove()
        halve_(linears[name], torch.cat(seen))


def walked(model, batches, step=None):
    linears = linears_of(model)
    with torch.no_grad():
        groups = trace(model, linears, batches[0])
        walk(model, linears, batches, groups, step or pruning(linears))
    return groups


@pytest.mark.parametrize("name", VARIANTS)
def test_every_linear_sees_what_the_pruned_model_before_it_makes(name):
    model = VARIANTS[name]()
    slow, batches = copy.deepcopy(model), batches_of(model)
    walked(model, batches)
    with torch.no_grad():
        slowly_(slow, batches)
    expected = slow.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    assert any((linear.weight == 0).any() for linear in linears_of(model).values())


class TestTrace:
    def test_groups_of_a_llama(self):
        model = llama(num_hidden_layers=2)
        with torch.no_grad():
            groups = trace(model, linears_of(model), inputs(model))
        assert groups == [
            [f"model.layers.{layer}.{site}.{name}_proj" for name in names]
            for layer in range(2)
            for site, names in (("self_attn", "qkv"), ("self_attn", "o"), ("mlp", ["gate", "up"]), ("mlp", ["down"]))
        ]

    def test_cross_attention_reads_two_inputs(self):
        model = t5(num_layers=1, num_decoder_layers=1)
        with torch.no_grad():
            groups = trace(model, linears_of(model), inputs(model))
        assert [[name.split(".")[-1] for name in group] for group in groups] == [
            *(["q", "k", "v"], ["o"], ["wi"], ["wo"]),
            *(["q", "k", "v"], ["o"], ["q"], ["k", "v"], ["o"], ["wi"], ["wo"]),
        ]

    def test_pictures_come_first(self):
        model = llava()
        with torch.no_grad():
            groups = trace(model, linears_of(model), inputs(model))
            unseen = trace(model, language_of(model), {"input_ids": tokens()})
        towers = ["vision" in group[0] for group in groups]
        assert towers == sorted(towers, reverse=True) and any(towers)
        assert unseen == groups[towers.index(False) :]

    def test_only_the_linears_asked_for(self):
        model = llama()
        chosen = {name: linear for name, linear in linears_of(model).items() if "1.mlp.up" in name or "v_proj" in name}
        with torch.no_grad():
            groups = trace(model, chosen, inputs(model))
        assert [[name.removeprefix("model.layers.") for name in group] for group in groups] == [
            ["0.self_attn.v_proj"],
            ["1.self_attn.v_proj"],
            ["1.mlp.up_proj"],
            ["2.self_attn.v_proj"],
        ]

    def test_ends_behind_the_last_linear(self):
        model, calls, alive = llama(), [], greenlets()
        for module in (model.model.layers[1].mlp.down_proj, model.model.layers[2], model.model.norm, model.lm_head):
            module.register_forward_pre_hook(lambda module, _: calls.append(module))
        chosen = {name: linear for name, linear in linears_of(model).items() if ".1." in name}
        with torch.no_grad():
            groups = trace(model, chosen, inputs(model))
        assert sorted(name for group in groups for name in group) == sorted(chosen)
        assert calls == [model.model.layers[1].mlp.down_proj]
        assert hooks(model) == 3 + 1 and greenlets() <= alive

    def test_runs_to_the_end_where_a_linear_is_never_called(self):
        model, ends = llava(), []
        model.get_output_embeddings().register_forward_hook(lambda *_: ends.append(1))
        with torch.no_grad(), pytest.raises(CalibrationError, match=r"passes through model\.vision_tower.*images"):
            trace(model, linears_of(model), {"input_ids": tokens()})
        assert ends == [1] and hooks(model) == 1  # the one above

    def test_inputs_that_are_not_finite(self):
        model = llama()
        model.model.layers[1].post_attention_layernorm.weight.data[0] = torch.nan
        with pytest.raises(UnsupportedModel, match=r"input of model\.layers\.1\.mlp\.gate_proj is not finite"):
            trace(model, linears_of(model), inputs(model))
        assert not hooks(model)


def language_of(model):
    return {name: linear for name, linear in linears_of(model).items() if "vision" not in name}


def hooks(model) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def greenlets() -> int:
    gc.collect()
    return sum(type(thing) is greenlet for thing in gc.get_objects())


@pytest.mark.parametrize("build", [llama, t5, llava])
def test_one_forward_alone(build):
    model, calls = build(), {}
    for name, linear in linears_of(model).items():
        linear.register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    walked(model, batches_of(model))
    assert calls == dict.fromkeys(linears_of(model), 1 + 3)  # the trace, and every batch


@pytest.mark.parametrize("build", [llama, t5, llava])
def test_the_head_is_never_called(build):
    model, calls = build(), []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    walked(model, batches_of(model))
    assert not calls


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(**inputs(model)).logits


class Interrupted(Exception):
    pass


def drain(names, inputs) -> None:
    for _ in inputs:
        pass


def failing_step(error, at=3):
    steps = []

    def step(names, inputs):
        steps.append(names)
        for _ in inputs:
            if len(steps) == at:
                raise error

    return step


class TestNothingIsLeftBehind:
    def check(self, model, expected, alive):
        assert hooks(model) == 0
        assert greenlets() <= alive
        assert torch.is_grad_enabled()
        assert torch.equal(logits(model), expected)
        model(**inputs(model)).logits.sum().backward()
        assert all(linear.weight.grad is not None for linear in linears_of(model).values())

    @pytest.mark.parametrize("build", [llama, t5])
    def test_after_success(self, build):
        model, alive = build(), greenlets()
        expected = logits(model)
        walked(model, batches_of(model), step=drain)
        self.check(model, expected, alive)

    @pytest.mark.parametrize("build", [llama, t5])
    @pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt(), SystemExit()], ids=repr)
    def test_after_an_error_in_the_step(self, build, error):
        model, alive = build(), greenlets()
        expected = logits(model)
        with pytest.raises(type(error)):
            walked(model, batches_of(model), step=failing_step(error))
        error.__traceback__ = None
        self.check(model, expected, alive)

    @pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt(), MemoryError()], ids=repr)
    @pytest.mark.parametrize("call", [1, 2, 4])  # of the trace, the first batch, the last batch
    def test_after_an_error_in_the_model(self, error, call):
        model, alive, calls = llama(), greenlets(), []
        expected = logits(model)

        def interrupt(*_):
            calls.append(1)
            if len(calls) == call:
                raise error

        handle = model.model.layers[1].mlp.act_fn.register_forward_hook(interrupt)
        with pytest.raises(type(error)):
            walked(model, batches_of(model), step=drain)
        handle.remove()
        error.__traceback__ = None
        self.check(model, expected, alive)

    @pytest.mark.parametrize("error", [None, Interrupted()], ids=repr)
    def test_no_frame_keeps_a_batch_or_a_hidden_state(self, error):
        model, seen = llama(), []
        batches = batches_of(model)
        handle = model.model.layers[0].input_layernorm.register_forward_hook(
            lambda *args: seen.append(weakref.ref(args[-1]))
        )
        refs = [weakref.ref(tensor) for batch in batches for tensor in batch.values()]
        with nullcontext() if error is None else pytest.raises(Interrupted):
            walked(model, batches, step=failing_step(error, at=3 if error else 0))
        if error is not None:
            error.__traceback__ = None
        handle.remove()
        del batches
        gc.collect()
        assert len(seen) == 4
        assert [ref() for ref in refs + seen] == [None] * len(refs + seen)

    def test_contexts_of_the_model_are_closed(self):
        """A flow that is given up leaves its `with` blocks and `finally` clauses."""
        model, left = llama(), []
        inner = model.model.forward

        def forward(*args, **options):
            try:
                return inner(*args, **options)
            finally:
                left.append(1)

        model.model.forward = forward
        with pytest.raises(Interrupted):
            walked(model, batches_of(model), step=failing_step(Interrupted()))
        assert len(left) == 1 + 3


class Fickle(nn.Module):
    """Calls its linears in an order that depends on the first token."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.orders = {0: (0, 1, 2), 1: (1, 0, 2), 2: (0, 2), 3: (0, 1), 4: (0, 0, 1, 2)}

    def forward(self, input_ids, use_cache):
        x = torch.nn.functional.one_hot(input_ids, 4).float()
        for layer in self.orders[int(input_ids[0, 0] + 4 * input_ids[0, 1])]:
            x = self.layers[layer](x)
        return x


@pytest.mark.parametrize("other", [1, 2, 3, 4])
def test_a_model_that_does_not_always_do_the_same_is_refused(other):
    model = Fickle()
    linears = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    batches = [{"input_ids": torch.tensor([[order % 4, order // 4]])} for order in (0, 0, other)]
    alive = greenlets()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedModel, match=r"did not reach layers\.\d when the others did: Fickle"),
    ):
        walk(model, linears, batches, trace(model, linears, batches[0]), drain)
    assert not hooks(model) and greenlets() <= alive


def test_the_same_order_in_all_batches_is_fine():
    model, steps = Fickle(), []
    linears = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    batches = [{"input_ids": torch.tensor([[1, 0]])}] * 2
    with torch.no_grad():
        walk(
            model,
            linears,
            batches,
            trace(model, linears, batches[0]),
            lambda names, inputs: steps.append((names, len(list(inputs)))),
        )
    assert steps == [(["layers.1"], 2), (["layers.0"], 2), (["layers.2"], 2)]


def test_nothing_to_prune_runs_nothing():
    model = llama()
    walk(model, {}, [inputs(model)], [], pruning({}))
