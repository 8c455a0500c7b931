"""The folder of a training's checkpoints: whose it is, what can be resumed from, and what its errors mean."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import nn

from optimum_prune import processes
from optimum_prune.errors import CheckpointError, PruningError
from optimum_prune.fetching import fetch_json

logger = logging.getLogger(__name__)

IDENTITY = "recovery.json"
"""File beside the checkpoints: of which recovery they are."""
LOCK = ".recovery.lock"
"""File beside it that one recovery at a time holds."""
STATE = "trainer_state.json"
"""File of a checkpoint that a Trainer writes last."""


@contextmanager
def checkpoints(directory: str | Path | None, identify: Callable[[], Mapping[str, Any]]) -> Iterator[Path]:
    """Yield the folder of the checkpoints, the same in all processes.

    Args:
        directory: where it is to be, of this recovery or new; None: a temporary one.
        identify: tells one recovery from another: JSON types by name.

    Raises:
        CheckpointError: it holds checkpoints of another recovery, or another process trains there at this moment.
        PruningError: processes that train together are not of one recovery.
    """
    identity = {}
    if directory is not None or processes.count() > 1:  # else nobody asks, and it reads all weights
        identity = {**identify(), "processes": processes.count()}
    processes.check_alike(identity | {"directory": directory and str(directory)})
    with ExitStack() as held:

        def prepare() -> Path:
            if directory is None:
                folder = Path(held.enter_context(TemporaryDirectory(prefix="optimum-prune-")))
            else:
                folder = _checked(directory)
                held.enter_context(_locked(folder))
            _identify(folder, identity)
            return folder

        folder = processes.in_main(prepare)
        _check_seen(folder)
        yield folder
        processes.join().wait_for_everyone()  # some may still be reading there


def check_directory(directory: str | Path) -> Path:
    """Make the folder of checkpoints where there is none, and refuse one that cannot be.

    Returns:
        Its absolute path, since checkpoints name each other.

    Raises:
        CheckpointError: it holds other files, or cannot be written to.
    """
    return processes.in_main(lambda: _checked(directory))


def latest(directory: Path) -> Path | None:
    """Return the last checkpoint that is whole."""
    found = [path for path in directory.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            json.loads((path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if _has_random_states(path):
            return path
    return None


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn what a full disk or a damaged file of the checkpoints raises into one error.

    Raises:
        CheckpointError: with what to do.
    """
    try:
        yield
    except (OSError, EOFError, SafetensorError, RuntimeError) as error:
        # torch.save has no other kind of error for a disk that is full
        if isinstance(error, PruningError) or (type(error) is RuntimeError and "stream" not in str(error).lower()):
            raise
        raise CheckpointError(
            f"The checkpoints in {directory} cannot be written or read: {error}. Make room there, or delete the one "
            "that is damaged; with the same directory= the training goes on from the last that is whole."
        ) from error


def digest(model: nn.Module) -> str:
    """Return what tells one model's weights from another's."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _checked(directory: str | Path) -> Path:
    try:
        folder = Path(directory).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        # hidden: the lock, and what a killed process left of a trial
        foreign = any(not path.name.startswith(".") for path in folder.iterdir())
        if foreign and not (folder / IDENTITY).exists():
            raise CheckpointError(
                f"{folder} is not empty and holds no checkpoints of a recovery. Pass another directory."
            )
        with TemporaryDirectory(dir=folder, prefix=".trial-"):
            pass  # the only answer that holds on every file system
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints cannot be written to {directory}: {error.strerror}. Pass another directory."
        ) from error
    return folder


def _check_seen(folder: Path) -> None:
    """Refuse a folder that some process does not see: it would keep another step than the main one.

    Raises:
        CheckpointError: in all processes.
    """
    if not all(gather_object([(folder / IDENTITY).is_file()])):
        raise CheckpointError(
            f"{folder}, where the main process writes checkpoints, is not seen by every process. Pass a directory that "
            "is."
        )


def _has_random_states(checkpoint: Path) -> bool:
    """Tell whether every process has written its own, which the main one does not wait for."""
    if processes.count() == 1:
        return True  # `STATE` is written after it
    everyone = [checkpoint / f"rng_state_{process}.pth" for process in range(processes.count())]
    return all(path.is_file() and path.stat().st_size for path in everyone)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second recovery out; the system lets go of the lock however this one ends.

    Raises:
        CheckpointError: there is one already, or the file of the lock is somebody else's.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise CheckpointError(
            f"Another process trains in {folder} at this moment. Wait for it, or pass another directory."
        ) from error
    except NotImplementedError:
        logger.info("The disk of %s has no locks; see to it that nobody else trains there.", folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder / LOCK} cannot be locked: {error.strerror}. Delete it, or pass another directory."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _identify(folder: Path, identity: Mapping[str, Any]) -> None:
    """Write down of which recovery a folder's checkpoints are, or compare.

    Raises:
        CheckpointError: they are of another.
    """
    if not any(folder.glob("checkpoint-*")):  # nothing was trained yet
        with writing(folder):
            (folder / IDENTITY).write_text(json.dumps(identity) + "\n", encoding="utf-8")
    found = fetch_json(folder, IDENTITY)
    if differing := [name for name in identity if found.get(name) != json.loads(json.dumps(identity[name]))]:
        raise CheckpointError(
            f"{folder} holds checkpoints of another recovery: {', '.join(differing)} differ. Pass another "
            "directory, or delete it to begin anew."
        )
