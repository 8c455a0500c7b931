"""One forward through the model, which stops before every linear until its weight is pruned.

Every micro-batch runs in a greenlet of its own: it stops in a pre-hook where the next linears read their common input.
When all have come that far, the input's statistics are complete, the linears are pruned, and all go on with the pruned
weights. So every linear sees inputs of the pruned prefix, down to the linears just before it; nothing is computed
twice; and nothing has to be known of the architecture: T5's encoder states and LLaVA's pictures flow as they always do.
What is held is what the micro-batches need to go on: a few hidden states each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.calibration.moments import check_finite
from optimum_prune.errors import CalibrationError, UnsupportedModel

Batch = Mapping[str, Tensor]
Step = Callable[[Sequence[str], Iterator[Tensor]], None]
"""`(names of linears, their common input from every micro-batch)`: prunes the linears in place."""


class Call(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def trace(model: PreTrainedModel, linears: Mapping[str, nn.Module], batch: Batch) -> list[list[str]]:
    """Run one batch; return the names of the linears in the order of calls, those with a common input together.

    The run ends where the last of them has been called: the head alone would take more memory than all before it.

    Raises:
        CalibrationError: the batch does not pass through one of the linears.
        UnsupportedModel: an input is not finite.
    """
    groups: list[list[str]] = []
    last: list[Tensor] = []
    unseen = set(linears)
    driver, flow = getcurrent(), greenlet(lambda: model(**batch, use_cache=False))

    def enter(name: str, args: tuple[Tensor, ...]) -> None:
        if not last or args[0] is not last[0]:
            check_finite(name, args[0])
            last[:] = [args[0]]
            groups.append([])
        groups[-1].append(name)
        unseen.discard(name)
        if not unseen:
            driver.switch()

    try:
        with _hooks(linears, enter):
            flow.switch()
    finally:
        flow.throw(GreenletExit)
    if unseen:
        raise CalibrationError(
            f"No calibration sample passes through {min(unseen)}. A vision tower needs samples with images."
        )
    return groups


def walk(
    model: PreTrainedModel,
    linears: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    groups: Sequence[Sequence[str]],
    step: Step,
    what: str = "Pruning",
) -> None:
    """Run all batches in lockstep, and call `step` for each group of linears when its input is known.

    Args:
        model: under `no_grad`, in evaluation mode.
        linears: by name; all that are in `groups`.
        batches: inputs of the model, without padding.
        groups: as `trace` found them.
        step: called once for each group, in order.
        what: for the progress bar.

    Raises:
        UnsupportedModel: a batch takes another way through the model than the traced one.
    """
    with tqdm(total=len(groups), desc=what, unit="input") as bar:

        def counted(names: Sequence[str], inputs: Iterator[Tensor]) -> None:
            step(names, inputs)
            bar.update()

        lockstep(model, [_call(batch) for batch in batches], linears, groups, counted)


def lockstep(
    module: nn.Module,
    given: Sequence[Call],
    linears: Mapping[str, nn.Module],
    groups: Sequence[Sequence[str]],
    step: Step,
) -> None:
    """Run a model, or a part of it, on several inputs that go on together; see `walk`."""
    driver = getcurrent()
    flows = [greenlet(partial(module, *call.args, **call.kwargs)) for call in given]

    def enter(name: str, args: tuple[Tensor, ...]) -> None:
        driver.switch(name, args[0])

    def inputs(wanted: str) -> Iterator[Tensor]:
        for flow in flows:
            reached = flow.switch()  # the arguments of `driver.switch`, or the model's output at its end
            if flow.dead or reached[0] != wanted:
                raise _astray(module, wanted)
            yield reached[1]

    try:
        with _hooks({group[0]: linears[group[0]] for group in groups}, enter):
            for group in groups:
                step(group, inputs(group[0]))
    finally:
        for flow in flows:
            flow.throw(GreenletExit)  # behind the last linear there is nothing left to know


def calls(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], batches: Sequence[Batch]
) -> Iterator[tuple[str, list[Call]]]:
    """Run all batches in lockstep, and stop at every module: what is done to it there, the runs go on with.

    Args:
        model: under `no_grad`, in evaluation mode.
        modules: by name, in the order in which they are called; each is called once in a run.
        batches: inputs of the model, without padding.

    Yields:
        The name of a module, and what each batch calls it with. The module has no hook of this while the caller is at
        it.
    """
    driver = getcurrent()
    flows = [greenlet(partial(model, **_call(batch).kwargs)) for batch in batches]

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        driver.switch(Call(args, kwargs))

    def reached(name: str, flow: greenlet) -> Call:
        call = flow.switch()
        if flow.dead:
            raise _astray(model, name)
        return call

    try:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(enter, with_kwargs=True)
            try:
                found = [reached(name, flow) for flow in flows]
            finally:
                handle.remove()
            yield name, found
    finally:
        for flow in flows:
            flow.throw(GreenletExit)


def _call(batch: Batch) -> Call:
    return Call((), {**batch, "use_cache": False})


def _astray(module: nn.Module, wanted: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"A batch did not reach {wanted} when the others did: {type(module).__name__} does not call its linears in the "
        "same order every time, and cannot be pruned layer by layer."
    )


@contextmanager
def _hooks(linears: Mapping[str, nn.Module], enter: Callable[[str, tuple[Tensor, ...]], None]) -> Iterator[None]:
    def entering(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: enter(name, args)

    handles = [linear.register_forward_pre_hook(entering(name)) for name, linear in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
