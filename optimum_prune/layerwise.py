"""One forward through the model, which stops before every linear until its weight is pruned.

Every micro-batch runs in a greenlet of its own: it stops in a pre-hook where the next linears read their common input.
When all have come that far, the input's statistics are complete, the linears are pruned, and all go on with the pruned
weights. So every linear sees inputs of the pruned prefix, down to the linears just before it; nothing is computed
twice; and nothing has to be known of the architecture: T5's encoder states and LLaVA's pictures flow as they always do.
What is held is what the micro-batches need to go on: a few hidden states each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from optimum_prune.calibration.moments import check_finite
from optimum_prune.errors import UnsupportedModel

Batch = Mapping[str, Tensor]
Step = Callable[[Sequence[str], Iterator[Tensor]], None]
"""`(names of linears, their common input from every micro-batch)`: prunes the linears in place."""


def trace(model: PreTrainedModel, linears: Mapping[str, nn.Module], batch: Batch) -> list[list[str]]:
    """Run one batch; return the names of the linears in the order of calls, those with a common input together.

    Raises:
        UnsupportedModel: an input is not finite.
    """
    groups: list[list[str]] = []
    last: list[Tensor] = []

    def enter(name: str, args: tuple[Tensor, ...]) -> None:
        if not last or args[0] is not last[0]:
            check_finite(name, args[0])
            last[:] = [args[0]]
            groups.append([])
        groups[-1].append(name)

    with _hooks(linears, enter):
        model(**batch, use_cache=False)
    return groups


def walk(
    model: PreTrainedModel,
    linears: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    groups: Sequence[Sequence[str]],
    step: Step,
) -> None:
    """Run all batches in lockstep, and call `step` for each group of linears when its input is known.

    Args:
        model: under `no_grad`, in evaluation mode.
        linears: by name; all that are in `groups`.
        batches: inputs of the model, without padding.
        groups: as `trace` found them.
        step: called once for each group, in order.

    Raises:
        UnsupportedModel: a batch takes another way through the model than the traced one.
    """
    driver = getcurrent()
    flows = [greenlet(lambda batch=batch: model(**batch, use_cache=False)) for batch in batches]

    def enter(name: str, args: tuple[Tensor, ...]) -> None:
        driver.switch(name, args[0])

    def inputs(wanted: str) -> Iterator[Tensor]:
        for flow in flows:
            reached = flow.switch()  # the arguments of `driver.switch`, or the model's output at its end
            if flow.dead or reached[0] != wanted:
                raise UnsupportedModel(
                    f"A batch did not reach {wanted} when the others did: {type(model).__name__} does not call its "
                    "linears in the same order every time, and cannot be pruned layer by layer."
                )
            yield reached[1]

    try:
        with _hooks({group[0]: linears[group[0]] for group in groups}, enter):
            for group in tqdm(groups, desc="Pruning", unit="input"):
                step(group, inputs(group[0]))
    finally:
        for flow in flows:
            flow.throw(GreenletExit)  # behind the last linear there is nothing left to know


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
