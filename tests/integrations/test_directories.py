"""Whole directories or none, on the file system alone."""

import errno
import os
import re
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from optimum_prune.errors import CheckpointError
from optimum_prune.integrations import directories
from optimum_prune.integrations.directories import replacing

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def write(target, text="new", stale=lambda path: path.name == "weights"):
    """Replace a directory by one with a file `new`."""
    with replacing(Path(target), stale) as folder:
        (folder / "new").write_text(text)


def tree(folder):
    """Return everything below a folder: the text of files, the targets of links, None for folders."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_text()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def old(tmp_path):
    """Return an old directory: weights, and what somebody has put beside them."""
    folder = tmp_path / "it"
    (folder / "notes" / "deep").mkdir(parents=True)
    (folder / "weights").write_text("old")
    (folder / "new").write_text("old")
    (folder / "notes" / "deep" / "a.txt").write_text("mine")
    (folder / "notes" / "weights").write_text("not at the top, so not stale")
    (folder / "link").symlink_to("notes/deep/a.txt")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "folder").symlink_to("notes")
    (folder / ".hidden").write_text("hidden")
    return folder


@pytest.fixture(params=["exchange", "two renames"])
def swap(request, monkeypatch):
    """Both ways to put the new directory in place."""
    if request.param == "two renames":
        monkeypatch.setattr(directories, "_exchange", lambda a, b: False)
    elif sys.platform != "linux":
        pytest.skip("only Linux exchanges directories in one step")


KEPT = {
    "notes": None,
    "notes/deep": None,
    "notes/deep/a.txt": "mine",
    "notes/weights": "not at the top, so not stale",
    "link": "notes/deep/a.txt",
    "dangling": "nowhere",
    "folder": "notes",
    ".hidden": "hidden",
}


# What is written


def test_new_directory(tmp_path):
    write(tmp_path / "a" / "b" / "it")
    assert tree(tmp_path) == {"a": None, "a/b": None, "a/b/it": None, "a/b/it/new": "new"}


def test_foreign_files_are_kept_and_stale_ones_removed(old, swap):
    write(old)
    assert tree(old) == KEPT | {"new": "new"}
    assert os.listdir(old.parent) == ["it"]


def test_new_file_in_place_of_an_old_folder(old, swap):
    (old / "new").unlink()
    (old / "new").mkdir()
    write(old)
    assert tree(old) == KEPT | {"new": "new"}


def test_folders_that_both_have_are_merged(old, swap):
    (old / "both" / "deep").mkdir(parents=True)
    (old / "both" / "theirs").write_text("theirs")
    (old / "both" / "deep" / "theirs").write_text("theirs")
    (old / "both" / "ours").write_text("old")
    with replacing(old, stale=lambda path: False) as new:
        (new / "both" / "deep").mkdir(parents=True)
        (new / "both" / "ours").write_text("new")
    found = {path.relative_to(old / "both").as_posix() for path in (old / "both").rglob("*") if path.is_file()}
    assert found == {"theirs", "deep/theirs", "ours"}
    assert (old / "both" / "ours").read_text() == "new"


def test_twice(old, swap):
    write(old, "first")
    write(old, "second")
    assert tree(old) == KEPT | {"new": "second"}


@pytest.mark.parametrize(
    "name", ["a b", "x[1]*?", "ünï-çø∂é 漢字", ".hidden", "it.saving-1", "-rf", "%s{}", "new\nline"]
)
def test_odd_names(name, tmp_path, swap):
    for text in ("first", "second"):
        write(tmp_path / name, text)
    assert tree(tmp_path) == {name: None, f"{name}/new": "second"}


def test_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("it")
    write("./other/../it", "second")
    assert tree(tmp_path)["it/new"] == "second"


def test_link_stays_a_link(old, swap):
    link = old.with_name("link")
    link.symlink_to(old.name)
    write(link)
    assert link.is_symlink()
    assert (old / "new").read_text() == "new"
    assert sorted(os.listdir(old.parent)) == ["it", "link"]


def test_link_to_nothing_yet(tmp_path):
    (tmp_path / "link").symlink_to("later/it")
    write(tmp_path / "link")
    assert (tmp_path / "later" / "it" / "new").read_text() == "new"


def test_permissions_are_kept(old, swap):
    old.chmod(0o2750)
    write(old)
    assert stat.S_IMODE(old.stat().st_mode) == 0o2750


def test_copies_where_there_are_no_hard_links(old, monkeypatch):
    def no_links(*arguments, **options):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    write(old)
    assert tree(old) == KEPT | {"new": "new"}


# What is refused: nothing is changed, and nothing is left behind


def refused(target, message):
    with pytest.raises(CheckpointError, match=message):
        write(target)


def test_target_is_a_file(tmp_path):
    file = tmp_path / "it"
    file.write_text("precious")
    refused(file, "it is a file; pass a directory")
    assert tree(tmp_path) == {"it": "precious"}


def test_parent_is_a_file(tmp_path):
    (tmp_path / "file").write_text("precious")
    refused(tmp_path / "file" / "it", "file cannot be written to: .*Pass another directory")
    assert tree(tmp_path) == {"file": "precious"}


@pytest.mark.parametrize("inside", [".", "notes/deep"])
def test_working_directory(old, inside, monkeypatch):
    before = tree(old)
    monkeypatch.chdir(old / inside)
    refused(old, "it holds the working directory")
    assert tree(old) == before


def test_mount_point(old, monkeypatch):
    before = tree(old)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == old)
    refused(old, "it is a mount point.*Pass a directory in it")
    assert tree(old) == before
    assert os.listdir(old.parent) == ["it"]


def test_name_too_long(tmp_path):
    refused(tmp_path / ("x" * 300), "cannot be written to: File name too long")
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_parent_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        refused(tmp_path / "it", "cannot be written to: Permission denied")
    finally:
        tmp_path.chmod(0o700)
    assert not any(tmp_path.iterdir())


def test_parent_that_refuses(old, monkeypatch):
    """As the one above, for root."""
    before = tree(old)
    mkdir = Path.mkdir

    def refuse(self, *arguments, **options):
        if ".saving-" in self.name:
            raise OSError(errno.EROFS, "Read-only file system")
        mkdir(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    refused(old, f"{re.escape(str(old.parent))} cannot be written to: Read-only file system")
    assert tree(old) == before


@pytest.mark.parametrize("error", [RuntimeError("no"), NO_SPACE, KeyboardInterrupt()])
@pytest.mark.parametrize("exists", [True, False])
def test_error_in_the_block_passes_through(error, exists, old):
    target = old if exists else old.parent / "other"
    before = tree(old.parent)
    with pytest.raises(type(error)) as caught, replacing(target, lambda name: True) as folder:
        (folder / "half").write_text("half")
        raise error
    assert caught.value is error
    assert tree(old.parent) == before


@pytest.mark.parametrize("function", ["copytree", "copymode"])
def test_disk_fills_up_while_carrying_over(function, old, monkeypatch):
    fails_and_changes_nothing(old, monkeypatch, directories.shutil, function)


def test_disk_fills_up_while_flushing(old, monkeypatch):
    fails_and_changes_nothing(old, monkeypatch, os, "fsync")


@pytest.mark.parametrize("which", [1, 2])
def test_failure_between_the_two_renames(which, old, monkeypatch):
    """The first rename puts the old directory aside. When the second fails, the old one is put back."""
    before = tree(old.parent)
    monkeypatch.setattr(directories, "_exchange", lambda a, b: False)
    rename, calls = Path.rename, []

    def sometimes(self, target):
        calls.append(target)
        if len(calls) == which:
            raise NO_SPACE
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", sometimes)
    refused(old, "it could not be replaced: .*No space left on device")
    assert tree(old.parent) == before


def fails_and_changes_nothing(old, monkeypatch, module, function):
    def fail(*arguments, **options):
        raise NO_SPACE

    before = tree(old.parent)
    monkeypatch.setattr(module, function, fail)
    refused(old, "it could not be replaced: .*No space left on device")
    assert tree(old.parent) == before


# What killed processes leave


@pytest.fixture(scope="module")
def dead():
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def left_by(process, host=None):
    return f".it.saving-{host or socket.gethostname()}-{process}-0123abcd"


def test_threads_may_save_to_one_directory(old):
    def save(number):
        for _ in range(5):
            write(old, f"thread {number}")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(save, range(3)))
    assert os.listdir(old.parent) == ["it"]
    assert (old / "new").read_text().startswith("thread ")


def test_leftovers_of_the_dead_are_removed(old, dead):
    for name in (left_by(dead), f"{left_by(dead)}-old"):
        (old.parent / name / "sub").mkdir(parents=True)
        (old.parent / name / "sub" / "half").write_text("half")
    write(old)
    assert os.listdir(old.parent) == ["it"]


def test_what_is_not_a_leftover_stays(old, dead):
    alive = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    others = {
        left_by(alive.pid),
        left_by(os.getpid()),  # another thread's
        left_by(dead, host="elsewhere"),
        left_by(dead).replace(".it", ".other"),
        left_by(dead)[1:],
        left_by(dead) + "x",
        ".it.saving-",
        ".it.saving-old",
    }
    for name in others:
        (old.parent / name).mkdir()
    write(old)
    alive.communicate(b"\n")
    assert set(os.listdir(old.parent)) == others | {"it"}


def test_killed_between_the_two_renames(old, dead):
    """The old directory is then the one that was put aside: the next save finds what somebody kept in it."""
    (old.parent / left_by(dead)).mkdir()
    old.rename(old.parent / f"{left_by(dead)}-old")
    write(old)
    assert tree(old) == KEPT | {"new": "new"}
    assert os.listdir(old.parent) == ["it"]
