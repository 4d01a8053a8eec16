"""Removal of trees built to survive it."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tests.conftest import SOON_S

from union.sandbox._core.file_errors import SandboxFileError, SandboxPathError
from union.sandbox._linux import openat2 as beneath
from union.sandbox._linux.removal import remove_tree


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def place(request, tmp_path):
    """On a disk; thousands of files are made in memory. The removal of as many from a disk, as a
    session does it at its end, is a test of tests/escape/test_lifecycle.py.
    """
    if not request.node.get_closest_marker("many_files"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="sbx-removal-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture(params=["openat2", "walk"])
def work(request, place, monkeypatch):
    if request.param == "walk":
        monkeypatch.setattr(beneath, "has_openat2", lambda: False)
    elif not beneath.has_openat2():
        pytest.skip("needs Linux 5.6 or later, and a container that allows openat2")
    plant = place / "plant"
    plant.mkdir(mode=0o750)
    (plant / "f").write_bytes(b"plant")
    (plant / "f").chmod(0o400)
    work = place / "work"
    work.mkdir()
    yield work
    assert (plant / "f").read_bytes() == b"plant"
    assert stat.S_IMODE((plant / "f").stat().st_mode) == 0o400
    assert stat.S_IMODE(plant.stat().st_mode) == 0o750
    assert os.listdir(plant) == ["f"]


@pytest.fixture
def few_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 6, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descend(top, depth, *, mode=0o755):
    """Nest ``depth`` directories by descriptors, with a file beside each."""
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    opened = []
    for _ in range(depth):
        os.mkdir("d", dir_fd=at)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        if mode == 0o755:
            os.close(at)
        else:
            opened.append(at)
        at = below
    for fd in reversed(opened):
        os.fchmod(fd, mode)
        os.close(fd)
    os.close(at)


@pytest.mark.slow
@pytest.mark.many_files
def test_five_thousand_levels(work, few_descriptors):
    descend(work, 5000)
    started = time.monotonic()
    remove_tree(str(work))
    assert not work.exists()
    assert time.monotonic() - started < SOON_S


@pytest.mark.slow
@pytest.mark.many_files
def test_twenty_thousand_files(work, few_descriptors):
    for group in range(20):
        (work / f"g{group}").mkdir()
        for number in range(1000):
            os.close(os.open(work / f"g{group}" / str(number), os.O_CREAT | os.O_WRONLY))
    remove_tree(str(work))
    assert not work.exists()


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o500, 0o100, 0o300])
def test_directories_without_permissions(work, mode):
    descend(work, 30, mode=mode)
    (work.parent / "other").mkdir()
    remove_tree(f"{work}/")
    assert sorted(os.listdir(work.parent)) == ["other", "plant"]


def test_wide_and_deep_with_links_and_odd_names(work):
    for a in range(8):
        for b in range(8):
            at = work / f"a{a}" / f"b{b}" / "c"
            at.mkdir(parents=True)
            os.symlink(work.parent / "plant", at / "dirlink")
            os.symlink(work.parent / "plant" / "f", at / "filelink")
            os.symlink("../../../../plant", at / "rel")
            os.symlink("nowhere", at / "dangling")
            os.link(work.parent / "plant" / "f", at / "hard")
            os.mkfifo(at / "fifo")
            os.mkdir(os.fsencode(at) + b"/\xff\xfe\n-rf")
            os.close(os.open(os.fsencode(at) + b"/\xff\xfe\n-rf/\x80", os.O_CREAT | os.O_WRONLY))
            at.chmod(0)
    remove_tree(str(work))
    assert os.listdir(work.parent) == ["plant"]
    assert (work.parent / "plant" / "f").stat().st_nlink == 1


def test_an_empty_directory(work):
    remove_tree(str(work))
    assert not work.exists()


@pytest.mark.parametrize("spelling", ["link", "link/"])
def test_a_link_is_refused_and_left(work, spelling):
    os.symlink("plant", work.parent / "link")
    with pytest.raises(SandboxPathError, match="symbolic link"):
        remove_tree(f"{work.parent}/{spelling}")
    assert (work.parent / "link").is_symlink()


def test_what_is_not_a_directory_or_not_there(work):
    with pytest.raises(FileNotFoundError, match="none"):
        remove_tree(f"{work}/none")
    with pytest.raises(FileNotFoundError):
        remove_tree(f"{work}/none/none")
    with pytest.raises(NotADirectoryError):
        remove_tree(str(work.parent / "plant" / "f"))
    for path in ("/", "", ".", "..", f"{work}/.."):
        with pytest.raises(SandboxPathError):
            remove_tree(path)


def test_what_cannot_be_removed_is_named_and_the_rest_is_gone(work, monkeypatch):
    (work / "a" / "b" / "c").mkdir(parents=True)
    (work / "a" / "b" / "c" / "stuck").touch()
    (work / "a" / "b" / "other").touch()
    (work / "x").touch()
    real = os.unlink

    def unlink(name, *, dir_fd):
        if name == "stuck":
            raise PermissionError(1, "Operation not permitted")
        real(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(SandboxFileError, match=r"a/b/c/stuck.*not permitted") as info:
            remove_tree(str(work))
    assert info.value.code == "remove-incomplete"
    assert sum(len(files) for _, _, files in os.walk(work)) == 1
    remove_tree(str(work))


@pytest.mark.parametrize("victim", ["work", "d"])
def test_a_directory_swapped_for_a_link_right_before_it_is_entered(work, monkeypatch, victim):
    (work / "d" / "e").mkdir(parents=True)
    (work / "d" / "e" / "f").touch()
    at = work if victim == "work" else work / "d"
    real, swapped = os.rmdir, []

    def rmdir(name, *, dir_fd):
        try:
            real(name, dir_fd=dir_fd)
        except OSError:
            if os.fsdecode(name) == victim and not swapped:
                swapped.append(name)
                os.rename(at, work.parent / "aside")
                os.symlink("plant" if victim == "work" else "../plant", at)
            raise

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        try:
            remove_tree(str(work))
        except SandboxFileError as exc:
            assert exc.code == "remove-incomplete"  # noqa: PT017 - a later pass may succeed
    assert swapped
    assert (work.parent / "aside").is_dir()


def test_a_writer_that_never_stops_does_not_hold_removal_for_ever(work):
    stop = threading.Event()
    (work / "busy").mkdir()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            try:
                os.makedirs(work / "busy" / str(number))
            except OSError:
                time.sleep(0)

    thread = threading.Thread(target=write)
    thread.start()
    started = time.monotonic()
    try:
        try:
            remove_tree(str(work), timeout_s=1.0)
        except SandboxFileError as exc:
            assert exc.code == "remove-incomplete"  # noqa: PT017 - winning the race is fine too
        assert time.monotonic() - started < SOON_S
    finally:
        stop.set()
        thread.join()
    shutil.rmtree(work, ignore_errors=True)


BIND = """
import ctypes, os, sys
from union.sandbox._linux import openat2 as beneath
from union.sandbox._linux.removal import remove_tree
from union.sandbox.errors import SandboxError
if sys.argv[2] == "walk":
    beneath.has_openat2 = lambda: False
top = sys.argv[1]
os.makedirs(f"{top}/work/a/b/mnt")
os.makedirs(f"{top}/work/tmpfs")
MS_BIND = 4096
mount = ctypes.CDLL(None).mount  # a small system has no program for it
assert mount(f"{top}/plant".encode(), f"{top}/work/a/b/mnt".encode(), None, MS_BIND, None) == 0
assert mount(b"none", f"{top}/work/tmpfs".encode(), b"tmpfs", 0, None) == 0
open(f"{top}/work/tmpfs/kept", "w").close()
try:
    remove_tree(f"{top}/work")
except SandboxError as exc:
    print(exc)
print(os.path.exists(f"{top}/work/tmpfs/kept"))
try:
    remove_tree(f"{top}/work/tmpfs")
except SandboxError as exc:
    print(exc)
print(os.path.exists(f"{top}/work/tmpfs/kept"))
"""


@pytest.mark.needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts are made in a private namespace")
def test_mount_points_are_not_entered(work, request):
    how = "walk" if "walk" in request.node.name else "openat2"
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", BIND]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [*command, str(work.parent), how], env=env, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert "mount point" in lines[0]
    assert lines[1] == "True"
    assert "mount point" in lines[2]
    assert lines[3] == "True"
    remove_tree(str(work))
