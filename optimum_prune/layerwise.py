"""One forward through the model, which stops before every linear until its weight is pruned.

Every micro-batch runs in a greenlet of its own: it stops in a pre-hook where the next linears read their common input.
When all have come that far, the input's statistics are complete, the linears are pruned, and all go on with the pruned
weights. So every linear sees inputs of the pruned prefix, down to the linears just before it; nothing is computed twice;
and nothing has to be known of the architecture: T5's encoder states and LLaVA's pictures flow as they always do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

Batch = Mapping[str, Tensor]
Step = Callable[[Sequence[str], Iterator[Tensor]], None]
"""`(names of linears, their common input from every micro-batch)`: prunes the linears in place."""


def trace(model: PreTrainedModel, linears: Mapping[str, nn.Module], batch: Batch) -> list[list[str]]:
    """Run one batch; return the names of the linears in the order of their calls, those with a common input together."""
    groups: list[list[str]] = []
    last: list[Tensor] = []

    def enter(name: str, args: tuple[Tensor, ...]) -> None:
        if not last or args[0] is not last[0]:
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
    """Run all batches in lockstep, and call `step` for each group of linears when its input is known."""
    driver = getcurrent()
    flows = [greenlet(lambda batch=batch: model(**batch, use_cache=False)) for batch in batches]

    def enter(name: str, args: tuple[Tensor, ...]) -> None:
        driver.switch(args[0])

    try:
        with _hooks({group[0]: linears[group[0]] for group in groups}, enter):
            for group in tqdm(groups, desc="Pruning", unit="input"):
                step(group, (flow.switch() for flow in flows))
    finally:
        for flow in flows:
            flow.throw(GreenletExit)  # behind the last linear there is nothing left to know


@contextmanager
def _hooks(linears: Mapping[str, nn.Module], enter: Callable[[str, tuple[Tensor, ...]], None]) -> Iterator[None]:
    handles = [
        linear.register_forward_pre_hook(lambda _, args, name=name: enter(name, args))
        for name, linear in linears.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
