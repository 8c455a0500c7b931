"""Processes that train together, as `accelerate launch` starts them: each has a model, and a part of every batch."""

import atexit
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env

from optimum_prune.errors import PruningError

T = TypeVar("T")


def launched() -> bool:
    """Tell whether a launcher started this process as one of several."""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def on_cpu() -> bool:
    """Tell whether processes train on CPUs: where there is nothing else, or they were told so."""
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def join() -> PartialState:
    """Join the others, if this is one of several.

    Raises:
        PruningError: it was launched as one of several, and set up to work alone.
    """
    joined = _is_joined()
    state = PartialState(cpu=on_cpu())
    if _is_joined() and not joined:
        atexit.register(_part)
    if launched() and state.num_processes == 1:
        raise PruningError(
            f"This is one of {os.environ['WORLD_SIZE']} processes, and accelerate was set up in it to work alone. "
            "Start them by `accelerate launch`, or make no PartialState beforehand."
        )
    return state


def count() -> int:
    """Return how many they are."""
    return join().num_processes


def is_main() -> bool:
    """Tell whether this process writes for all; as long as none have joined, each does for itself."""
    return not _is_joined() or dist.get_rank() == 0


def from_main(value: T) -> T:
    """Return the value that the main process gives: rounding must not make two of them decide differently."""
    join()
    return broadcast_object_list([value])[0]


def in_main(work: Callable[[], T]) -> T:
    """Let the main process do what must be done once; its result, or its error, is that of all."""
    found, error = None, None
    if join().is_main_process:
        try:
            found = work()
        except Exception as raised:
            if count() == 1:
                raise
            error = raised  # the others wait to hear of it
    found, error = from_main((found, error))
    if error is not None:
        raise error
    return found  # pyright: ignore[reportReturnType] - there is one where there is no error


def check_alike(identity: Mapping[str, Any]) -> None:
    """Refuse to train different models together.

    Args:
        identity: what must be the same in all, by name.

    Raises:
        PruningError: in all of them, naming what differs.
    """
    join()
    everyone = gather_object([identity])
    if differing := [name for name, value in identity.items() if any(other[name] != value for other in everyone)]:
        raise PruningError(
            f"The {len(everyone)} processes that train together differ in their {', '.join(differing)}. Tell "
            "them the same, load a checkpoint that was pruned before, and name a dataset instead of text that each of "
            "them writes itself."
        )


def each(machine: str) -> str:
    """Word a machine of which each process has one."""
    return machine if count() == 1 else f"{count()} x {machine}"


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _part() -> None:
    """Leave in order: threads of the connection that are alive at the end would make it a crash."""
    if _is_joined():
        dist.destroy_process_group()
