"""Whole directories or none: written beside the target, then swapped in."""

import ctypes
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from optimum_prune.errors import CheckpointError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_ASIDE = "-old"


@contextmanager
def replacing(target: Path, stale: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `target` when the block ends without an error.

    A process killed at any moment leaves either the old directory or the new one under `target`. Whatever else the old
    directory held is carried over.

    Args:
        target: a directory, or a path where none exists yet.
        stale: says of a path at the top of the old directory that it belongs to the old checkpoint and must go.

    Raises:
        CheckpointError: the target cannot be replaced: a file, a mount point, the directory that this process works
            in, a place without permission or space.
    """
    try:
        target = target.resolve()
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file; pass a directory.")
        if Path.cwd().is_relative_to(target):
            raise CheckpointError(
                f"{target} holds the working directory, which cannot be swapped. Pass another directory."
            )
        if os.path.ismount(target):
            raise CheckpointError(f"{target} is a mount point, which cannot be swapped. Pass a directory in it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        new = target.with_name(f"{_prefix(target)}{os.getpid()}-{uuid4().hex[:8]}")
        new.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"{target.parent} cannot be written to: {error.strerror}. Pass another directory."
        ) from error
    try:
        yield new
        try:
            if target.exists():
                _carry_over(target, new, stale)
                shutil.copymode(target, new)
            _sync(new)
            _swap(new, target)
        except OSError as error:
            raise CheckpointError(f"{target} could not be replaced: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)  # the half-written new one, or the old one after the swap


def _prefix(target: Path) -> str:
    # With the host: on a shared disk, the number of another machine's process says nothing here.
    return f".{target.name}.saving-{socket.gethostname()}-"


def _remove_leftovers(target: Path) -> None:
    """Remove what a killed process of this machine left half-written beside the target."""
    name = re.compile(rf"{re.escape(_prefix(target))}(\d+)-[0-9a-f]{{8}}({_ASIDE})?")
    for path in target.parent.iterdir():
        match = name.fullmatch(path.name)
        if match and not _alive(int(match[1])):
            if match[2] and not target.exists():
                path.rename(target)  # killed between the two renames of `_swap`
            else:
                shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's process
        return True
    return True


def _carry_over(old: Path, new: Path, stale: Callable[[Path], bool]) -> None:
    for path in old.iterdir():
        if stale(path):
            continue
        if path.is_dir() and not path.is_symlink() and (new / path.name).is_dir():
            _carry_over(path, new / path.name, stale=lambda nested: False)
        elif (new / path.name).exists():
            continue
        elif path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(path, new / path.name)


def _link_or_copy(source: str | Path, destination: str | Path) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination, follow_symlinks=False)


def _sync(directory: Path) -> None:
    """Flush the new files, so that a crash of the machine after the swap finds them whole."""
    for path in directory.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _swap(new: Path, target: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    if not _exchange(new, target):
        # Not atomic: without an exchange there is a moment when the old name is gone and the new one not yet there.
        aside = new.with_name(new.name + _ASIDE)
        target.rename(aside)
        try:
            new.rename(target)
        except OSError:
            aside.rename(target)
            raise
        aside.rename(new)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step, where the system can (Linux); return whether it did."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    return renameat2 is not None and not renameat2(
        _AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE
    )
