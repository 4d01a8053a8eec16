"""File work while another process swaps directories and files for links, as fast as it can."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest
from tests.conftest import RACE

from union.sandbox._core.file_errors import SandboxFileError
from union.sandbox._files.local import LocalTree
from union.sandbox._linux import openat2 as beneath
from union.sandbox._linux.removal import remove_tree
from union.sandbox._linux.tree import WorkTree

pytestmark = pytest.mark.slow

SECONDS = 2.0 * RACE
LAST_S = 20.0
ENOUGH = 1500

# Swaps "d" and "link" atomically: at any moment each name is there, as one or the other.
FLIP_DIRECTORY = """
import ctypes, platform
call = {"x86_64": 316, "aarch64": 276}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
print("ready", flush=True)
while True:
    if libc.syscall(call, -100, b"d", -100, b"link", 2):
        raise OSError(ctypes.get_errno(), "exchange")
"""

# "leaf" is in turn a file, a link to the secret and a link to a name outside that is free.
FLIP_LEAF = """
import os
print("ready", flush=True)
while True:
    for target in ("../outside/f", "../outside/new"):
        os.symlink(target, "spare")
        os.rename("spare", "leaf")
        with open("spare", "w") as file:
            file.write("mine")
        os.rename("spare", "leaf")
"""

# The parent of the file is made anew, as a directory and as a link, all the time.
FLIP_PARENT = """
import os, contextlib
print("ready", flush=True)
while True:
    with contextlib.suppress(OSError):
        os.rename("new", "old")
    with contextlib.suppress(OSError):
        os.symlink("../outside", "new")
    with contextlib.suppress(OSError):
        os.unlink("new")
    for at, _, files in os.walk("old", topdown=False):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(f"{at}/{name}")
        with contextlib.suppress(OSError):
            os.rmdir(at)
"""

# A tree that is being removed has its directories exchanged with links to the outside.
FLIP_INSIDE_REMOVAL = """
import contextlib, ctypes, os, platform
call = {"x86_64": 316, "aarch64": 276}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
print("ready", flush=True)
while True:
    # Built aside and moved in: the attacker itself must not write through its own links.
    os.makedirs("stage/deep/er", exist_ok=True)
    open("stage/deep/f", "w").close()
    with contextlib.suppress(FileExistsError):
        os.symlink(os.path.abspath("../outside"), "stage/link")
    with contextlib.suppress(OSError):
        os.makedirs("top", exist_ok=True)
        os.rename("stage", "top/d")
    with contextlib.suppress(OSError):
        os.symlink(os.path.abspath("../outside"), "top/link")
    for _ in range(50):
        libc.syscall(call, -100, b"top/d", -100, b"top/link", 2)
        libc.syscall(call, -100, b"top/d/deep", -100, b"top/d/link", 2)
"""


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture(params=["openat2", "walk", "local"])
def kind(request):
    """The work tree, by either way of opening below it; or the caller's side of a copy."""
    return request.param


@pytest.fixture
def work(kind, tmp_path, monkeypatch):
    if kind == "walk":
        monkeypatch.setattr(beneath, "has_openat2", lambda: False)
    elif kind == "openat2" and not beneath.has_openat2():
        pytest.skip("needs Linux 5.6 or later, and a container that allows openat2")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"secret")
    work = tmp_path / "work"
    (work / "d").mkdir(parents=True)
    (work / "d" / "f").write_bytes(b"mine")
    (work / "leaf").write_bytes(b"mine")
    os.symlink("../outside", work / "link")
    yield work
    assert (outside / "f").read_bytes() == b"secret"
    assert os.listdir(outside) == ["f"]


@contextlib.contextmanager
def attack(script, work):
    process = subprocess.Popen([sys.executable, "-c", script], cwd=work, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
        assert process.poll() is None, "the attack ended before the test did"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def tree(kind, work):
    if kind == "local":
        tree = LocalTree(str(work))
        tree.open()
    else:
        tree = WorkTree(str(work))
    yield tree
    tree.close()


def storm(tree, *attempts, at_least=0, refusals=-1):
    """Call each in turn for a while; return how many succeeded and how many were refused.

    On a busy machine a while is as long as it takes to try, and to succeed or to be refused, often
    enough to tell.
    """
    done = refused = 0
    end = time.monotonic() + SECONDS
    last = end + LAST_S
    while time.monotonic() < end or (
        (done + refused < ENOUGH or done <= at_least or refused <= refusals)
        and time.monotonic() < last
    ):
        for attempt in attempts:
            try:
                attempt(tree)
            except SandboxFileError:
                refused += 1
            else:
                done += 1
    return done, refused


def reader(rel):
    def read(tree):
        assert tree.get(rel, max_bytes=100) == b"mine"

    return read


def writer(rel):
    return lambda tree: tree.put(rel, b"mine", mode=0o644, overwrite=True)


@pytest.mark.threat(5)
@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_control_the_swap_does_fool_a_plain_open(work):
    seen = set()
    end = time.monotonic() + 20
    with attack(FLIP_DIRECTORY, work):
        while len(seen) < 2 and time.monotonic() < end:
            seen.add((work / "d" / "f").read_bytes())
    assert seen == {b"mine", b"secret"}


@pytest.mark.threat(5)
def test_directory_swapped_for_a_link_never_lets_put_or_get_out(tree, work):
    with attack(FLIP_DIRECTORY, work):
        done, refused = storm(
            tree,
            reader("d/f"),
            writer("d/f"),
            lambda tree: tree.list_dir("d"),
            lambda tree: tree.make_dir("d/sub/dir", parents=True, exist_ok=True),
            at_least=200,
            refusals=200,
        )
    assert done > 200
    assert refused > 200


@pytest.mark.threat(6)
def test_leaf_swapped_for_a_link_never_lets_put_or_get_out(tree, work):
    with attack(FLIP_LEAF, work):
        done, refused = storm(tree, reader("leaf"), writer("leaf"), at_least=50, refusals=20)
    assert done > 50
    assert refused > 20


@pytest.mark.threat(5)
def test_parents_that_turn_into_links_while_they_are_made(tree, work):
    def put_below_new(tree):
        tree.make_dir("new/a/b", parents=True, exist_ok=True)
        tree.put("new/a/b/f", b"mine", mode=0o644, overwrite=True)

    # The work tree makes the directories of a file itself; that is the attempt to be fooled.
    attempt = put_below_new if isinstance(tree, LocalTree) else writer("new/a/b/f")
    with attack(FLIP_PARENT, work):
        done, _ = storm(tree, attempt, at_least=50)
    assert done > 50


def test_a_quiet_tree_serves_everything(tree, work):
    done, refused = storm(tree, reader("d/f"), writer("d/f"), writer("leaf"))
    assert done > 1000
    assert refused == 0


@pytest.mark.threat(15)
@pytest.mark.parametrize("kind", ["openat2", "walk"], indirect=True)
def test_removal_under_attack_stays_inside(work):
    removed = 0
    end = time.monotonic() + SECONDS
    with attack(FLIP_INSIDE_REMOVAL, work):
        while time.monotonic() < end or not removed:
            with contextlib.suppress(SandboxFileError):
                remove_tree(str(work / "top"), timeout_s=0.5)
                removed += 1
    assert removed > 0
    assert (work / "leaf").read_bytes() == b"mine"
