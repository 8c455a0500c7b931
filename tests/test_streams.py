"""Where the residual stream is the sum of what a block's readers return, and what it is there."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from optimum_prune.binding import bind
from optimum_prune.streams import Streams
from tests.models import VARIANTS, inputs, llama

BEHIND = ("gemma2", "gemma3", "opt-350m")
"""Norms behind the sub-layers, or behind the sum."""


@pytest.mark.parametrize("name", VARIANTS)
def test_blocks_that_do_not_add_their_readers(name):
    model = VARIANTS[name]()
    streams = Streams(bind(model))
    with torch.no_grad():
        streams.look(model, inputs(model))
    blocks = {group.block for group in bind(model)}
    assert streams.unknown == (blocks if name in BEHIND else set())


def stops(model, streams, batch) -> list[Tensor | None]:
    """Return the stream in front of every reader."""
    found: list[Tensor | None] = []
    with torch.no_grad(), streams.followed():
        handles = [
            reader.register_forward_pre_hook(lambda *_: found.append(streams.latest))
            for group in bind(model)
            for reader in group.readers
        ]
        model(**batch)
    for handle in handles:
        handle.remove()
    return found


def test_the_stream_is_what_the_norms_are_given():
    model, given = llama(), []
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    found = stops(model, Streams(bind(model)), inputs(model))
    assert len(found) == 6
    assert all(torch.equal(stream, norm) for stream, norm in zip(found, given, strict=True))


def test_no_stream_in_unknown_blocks():
    model = llama()
    streams = Streams(bind(model))
    streams.unknown.add(model.model.layers[1])
    assert [stream is None for stream in stops(model, streams, inputs(model))] == [False] * 2 + [True] * 2 + [False] * 2


def test_a_damaged_sum_is_noticed():
    model = llama()
    model.model.layers[2].register_forward_hook(lambda *given: given[-1] * 1.01)
    streams = Streams(bind(model))
    with torch.no_grad():
        streams.look(model, inputs(model))
    assert streams.unknown == {model.model.layers[2]}


def test_forwards_that_run_in_turn_do_not_mix():
    model = llama()
    batches = [inputs(model, seed=seed) for seed in range(3)]
    streams = Streams(bind(model))
    alone = [stops(model, streams, batch) for batch in batches]
    driver = getcurrent()
    mixed: list[list[Tensor | None]] = [[], [], []]
    with torch.no_grad(), streams.followed():
        handles = [
            reader.register_forward_pre_hook(lambda *_: driver.switch() or None)
            for group in bind(model)
            for reader in group.readers
        ]
        flows = [greenlet(lambda batch=batch: model(**batch)) for batch in batches]
        for _ in range(6):
            for flow, found in zip(flows, mixed, strict=True):
                flow.switch()
                found.append(streams.latest)
        for handle in handles:
            handle.remove()
        for flow in flows:
            flow.switch()
    for one, other in zip(alone, mixed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("follow", ["look", "followed"])
def test_hooks_are_removed_after_an_error(follow):
    model = llama()
    streams = Streams(bind(model))
    model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        if follow == "look":
            streams.look(model, inputs(model))
        with streams.followed():
            model(**inputs(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.model.layers.modules())
    assert streams.latest is None
