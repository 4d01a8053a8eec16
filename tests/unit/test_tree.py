"""File work on a quiet tree: what is served, what is refused, and in which words."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
import time

import pytest
from tests.conftest import SOON_S

from union.sandbox._core.file_errors import (
    SandboxFileError,
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxFileTooLargeError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
    SandboxNotRegularError,
    SandboxPathError,
)
from union.sandbox._files.writer import FileWriter
from union.sandbox._linux import openat2 as beneath
from union.sandbox._linux import tree as tree_module
from union.sandbox._linux.tree import WorkTree
from union.sandbox.errors import SandboxUsageError, SessionClosedError

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture(params=["openat2", "walk"])
def work(request, tmp_path, monkeypatch):
    if request.param == "walk":
        monkeypatch.setattr(beneath, "has_openat2", lambda: False)
    elif not beneath.has_openat2():
        pytest.skip("needs Linux 5.6 or later, and a container that allows openat2")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    work = tmp_path / "work"
    work.mkdir()
    yield work
    assert (tmp_path / "outside" / "secret").read_bytes() == b"secret"
    assert os.listdir(tmp_path / "outside") == ["secret"]


@pytest.fixture
def tree(work):
    tree = WorkTree(str(work))
    yield tree
    tree.close()


def names(path):
    return sorted(os.listdir(path))


def test_put_then_get(tree, work):
    assert tree.put("a/b/c.txt", b"hello", mode=0o640) == 5
    assert tree.get("a/b/c.txt", max_bytes=5) == b"hello"
    assert stat.S_IMODE((work / "a/b/c.txt").stat().st_mode) == 0o640
    assert names(work / "a/b") == ["c.txt"]


def test_modes_do_not_depend_on_the_umask(tree, work):
    old = os.umask(0o077)
    try:
        tree.put("new/f", b"", mode=0o666)
    finally:
        os.umask(old)
    assert stat.S_IMODE((work / "new").stat().st_mode) == 0o755
    assert stat.S_IMODE((work / "new/f").stat().st_mode) == 0o666


@pytest.mark.parametrize(
    "data", [b"", b"x" * (3 * MIB), bytearray(b"ab"), memoryview(b"abcdef")[::2]]
)
def test_any_bytes_like_content(tree, data):
    assert tree.put("f", data) == len(bytes(data))
    assert tree.get("f", max_bytes=4 * MIB) == bytes(data)


def test_text_is_refused_with_a_remedy(tree, work):
    with pytest.raises(SandboxUsageError, match="encode") as info:
        tree.put("f", "text")
    assert info.value.argument == "data"
    assert names(work) == []


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777, -1, 0o10000, True, "644"])
def test_set_id_and_other_bits_are_refused(tree, work, mode):
    with pytest.raises(SandboxUsageError, match="mode") as info:
        tree.put("f", b"x", mode=mode)
    assert info.value.argument == "mode"
    assert names(work) == []


def test_stream_of_pieces(tree):
    assert tree.put_stream("f", (bytes([n]) * 10 for n in range(100))) == 1000
    assert tree.get("f", max_bytes=1000)[-10:] == b"c" * 10


def test_a_stream_that_breaks_leaves_the_old_file_and_nothing_else(tree, work):
    tree.put("f", b"old")

    def broken():
        yield b"new"
        raise RuntimeError("source is gone")

    with pytest.raises(RuntimeError, match="source is gone"):
        tree.put_stream("f", broken())
    assert tree.get("f", max_bytes=10) == b"old"
    assert names(work) == ["f"]


@pytest.mark.parametrize("fallback", [False, True])
def test_overwrite_false_keeps_what_is_there(tree, work, monkeypatch, fallback):
    if fallback:
        monkeypatch.setattr(beneath, "_SYS_RENAMEAT2", {})
    tree.put("f", b"first", overwrite=False)
    with pytest.raises(SandboxFileExistsError, match="'f'"):
        tree.put("f", b"second", overwrite=False)
    # The same when the file comes between the look and the move.
    monkeypatch.setattr(FileWriter, "_check_target", lambda _: None)
    with pytest.raises(FileExistsError):
        tree.put("f", b"third", overwrite=False)
    assert (work / "f").read_bytes() == b"first"
    assert names(work) == ["f"]


def test_failed_write_leaves_nothing(tree, work, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tree_module.os, "write", full)
    with pytest.raises(SandboxFileError, match="No space left") as info:
        tree.put("d/f", b"x")
    assert info.value.errno == errno.ENOSPC
    assert names(work / "d") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files are given to another user")
def test_owner_applies_to_the_file_and_to_new_parents(tree, work):
    tree.owner = (1234, 4321)
    tree.put("d/e/f", b"x")
    for made in ("d", "d/e", "d/e/f"):
        found = (work / made).stat()
        assert (found.st_uid, found.st_gid) == (1234, 4321)


@pytest.mark.parametrize(
    "rel", ["new\nline", "bad\udcff\udcfe", "-rf", " ", "*", "a\\b", "é", "x" * 255, "d/\udc80/f"]
)
def test_odd_names(tree, work, rel):
    tree.put(rel, b"odd")
    assert tree.get(rel, max_bytes=3) == b"odd"
    raw = os.path.join(os.fsencode(work), rel.encode("utf-8", "surrogateescape"))
    with open(raw, "rb") as file:
        assert file.read() == b"odd"
    top = rel.partition("/")[0]
    assert [info.path for info in tree.list_dir()] == [top]
    tree.remove(top, recursive=True)
    assert tree.list_dir() == ()


@pytest.mark.parametrize(
    "rel",
    [
        "..",
        "../outside/secret",
        "d/../../outside/secret",
        "d/../d/f",
        "/etc/passwd",
        "./../outside/secret",
        "d//../../outside/secret",
        "d/..",
        "//",
    ],
)
def test_nine_traversals_are_refused_even_without_the_lexical_check(tree, work, rel):
    tree.put("d/f", b"x")
    for attempt in (
        lambda: tree.get(rel, max_bytes=100),
        lambda: tree.put(rel, b"evil"),
        lambda: tree.stat(rel),
        lambda: tree.check_dir(rel),
        lambda: tree.list_dir(rel),
        lambda: tree.make_dir(rel, parents=True, exist_ok=True),
        lambda: tree.remove(rel, recursive=True),
    ):
        with pytest.raises(SandboxUsageError):
            attempt()
    assert tree.get("d/f", max_bytes=1) == b"x"


@pytest.mark.parametrize("link", ["plain", "chained", "dangling", "loop", "dir", "magic", "inside"])
def test_leaf_and_parent_links_are_refused_both_ways(tree, work, link):
    (work / "real").write_bytes(b"real")
    target = {
        "plain": "../outside/secret",
        "chained": "second",
        "dangling": "../outside/new",
        "loop": "link",
        "dir": "../outside",
        "magic": "/proc/self/cwd",
        "inside": "real",
    }[link]
    os.symlink("../outside/secret", work / "second")
    os.symlink(target, work / "link")
    for rel in ("link", "link/secret"):
        for attempt in (
            lambda rel=rel: tree.get(rel, max_bytes=100),
            lambda rel=rel: tree.put(rel, b"evil"),
            lambda rel=rel: tree.check_dir(rel),
            lambda rel=rel: tree.list_dir(rel),
        ):
            with pytest.raises(SandboxPathError, match="symbolic link") as info:
                attempt()
            assert info.value.code == "path-symlink"
            assert info.value.filename == rel
    with pytest.raises(PermissionError):
        tree.stat("link/secret")
    assert tree.stat("link").kind == "symlink"
    assert tree.exists("link")
    tree.remove("link")
    assert not tree.exists("link")
    assert (work / "real").read_bytes() == b"real"


def test_fifo_and_socket_are_refused_at_once(tree, work):
    os.mkfifo(work / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.getcwd()
        os.chdir(work)  # the path of a socket may have 107 bytes
        try:
            sock.bind("sock")
        finally:
            os.chdir(here)
        started = time.monotonic()
        for rel in ("fifo", "sock"):
            with pytest.raises(SandboxNotRegularError, match=rel):
                tree.get(rel, max_bytes=10)
            with pytest.raises(PermissionError, match="regular"):
                tree.put(rel, b"x")
            assert tree.stat(rel).kind == "other"
        assert time.monotonic() - started < SOON_S
    assert names(work) == ["fifo", "sock"]


@pytest.mark.needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root can make a device")
def test_device_is_refused(tree, work):
    os.mknod(work / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    with pytest.raises(SandboxNotRegularError, match="zero"):
        tree.get("zero", max_bytes=10)
    with pytest.raises(SandboxNotRegularError, match="device"):
        tree.put("zero", b"x")


def test_a_file_under_a_lease_does_not_make_the_host_wait(tree, work):
    (work / "f").write_bytes(b"x")
    ready, hold = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        fd = os.open(work / "f", os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_SETSIG, 0)
        import signal

        signal.signal(signal.SIGIO, signal.SIG_IGN)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.write(ready[1], b"y")
        except OSError:
            os.write(ready[1], b"n")
        os.close(hold[1])
        os.read(hold[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"y"
        started = time.monotonic()
        with pytest.raises(SandboxFileError, match="f"):
            tree.get("f", max_bytes=10)
        assert time.monotonic() - started < SOON_S
        tree.put("f", b"new")  # replaces the name, so the lease is no obstacle
        assert tree.get("f", max_bytes=10) == b"new"
    finally:
        for fd in (*ready, *hold):
            os.close(fd)
        os.waitpid(child, 0)


def test_wrong_kinds(tree):
    tree.put("d/f", b"x")
    with pytest.raises(SandboxIsADirectoryError, match="'d'"):
        tree.put("d", b"x")
    with pytest.raises(IsADirectoryError):
        tree.get("d", max_bytes=10)
    with pytest.raises(SandboxNotADirectoryError):
        tree.put("d/f/g", b"x")
    with pytest.raises(NotADirectoryError):
        tree.get("d/f/g", max_bytes=10)
    with pytest.raises(NotADirectoryError):
        tree.check_dir("d/f")
    with pytest.raises(SandboxFileNotFoundError, match="'d/none'") as info:
        tree.get("d/none", max_bytes=10)
    assert info.value.errno == errno.ENOENT
    with pytest.raises(FileNotFoundError):
        tree.check_dir("none")
    tree.check_dir("d")
    tree.check_dir(".")


def test_put_on_a_file_hard_linked_outside_leaves_the_outside_alone(tree, work):
    secret = work.parent / "outside" / "secret"
    os.link(secret, work / "linked")
    assert tree.get("linked", max_bytes=10) == b"secret"  # the same inode: control
    tree.put("linked", b"changed", mode=0o777)
    assert tree.get("linked", max_bytes=10) == b"changed"
    assert secret.read_bytes() == b"secret"
    assert stat.S_IMODE(secret.stat().st_mode) != 0o777
    assert secret.stat().st_nlink == 1


@pytest.mark.parametrize("max_bytes", [1024, 1 << 41])
def test_a_sparse_tebibyte_costs_nothing(tree, work, max_bytes):
    with open(work / "sparse", "wb") as file:
        file.truncate(1 << 40)
    started = time.monotonic()
    with pytest.raises(SandboxFileTooLargeError, match="sparse") as info:
        tree.get("sparse", max_bytes=max_bytes)
    assert info.value.errno == errno.EFBIG
    assert time.monotonic() - started < SOON_S


def test_exactly_the_limit_is_served_and_one_byte_more_is_not(tree):
    tree.put("f", b"x" * 1000)
    assert len(tree.get("f", max_bytes=1000)) == 1000
    with pytest.raises(SandboxFileTooLargeError, match="max_bytes=999"):
        tree.get("f", max_bytes=999)


def test_a_file_that_grows_during_the_read_stops_at_the_limit(tree, work, monkeypatch):
    (work / "log").write_bytes(b"x" * 1000)
    real_read, asked = os.read, []

    def read(fd, size):
        with open(work / "log", "ab") as file:
            file.write(b"y" * 200_000)
        asked.append(size)
        return real_read(fd, size)

    with monkeypatch.context() as patch:
        patch.setattr(tree_module.os, "read", read)
        with pytest.raises(SandboxFileTooLargeError, match="log"):
            tree.get("log", max_bytes=300_000)
    assert sum(asked) <= 300_001 + 65536 * len(asked)
    assert max(asked) <= 300_001


def test_a_file_that_grows_within_the_limit_is_read_whole(tree, work, monkeypatch):
    (work / "log").write_bytes(b"x" * 1000)
    real_fstat = os.fstat

    def fstat(fd):
        found = real_fstat(fd)
        with open(work / "log", "ab") as file:
            file.write(b"y" * 100_000)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(tree_module.os, "fstat", fstat)
        data = tree.get("log", max_bytes=MIB)
    assert data == (work / "log").read_bytes()


def test_list_and_stat(tree, work):
    tree.put("d/b", b"12", mode=0o600)
    tree.put("d/a/x", b"")
    os.symlink("/etc", work / "d/link")
    infos = tree.list_dir("d")
    assert [(i.path, i.name, i.kind) for i in infos] == [
        ("d/a", "a", "dir"),
        ("d/b", "b", "file"),
        ("d/link", "link", "symlink"),
    ]
    assert tree.stat("d/b") == infos[1]
    assert (infos[1].size, infos[1].mode) == (2, 0o600)
    assert abs(infos[1].mtime - time.time()) < 60
    assert tree.stat(".").kind == "dir"
    assert (tree.exists("d/b"), tree.exists("d/c"), tree.exists("d/b/c")) == (True, False, False)
    with pytest.raises(SandboxFileTooLargeError, match="more than 2"):
        tree.list_dir("d", max_entries=2)


def test_make_dir(tree, work):
    tree.make_dir("a")
    with pytest.raises(FileExistsError):
        tree.make_dir("a")
    tree.make_dir("a", exist_ok=True)
    with pytest.raises(FileNotFoundError):
        tree.make_dir("b/c")
    tree.make_dir("b/c", parents=True)
    tree.put("f", b"")
    with pytest.raises(FileExistsError):
        tree.make_dir("f", exist_ok=True)
    os.symlink("../outside", work / "link")
    with pytest.raises(SandboxPathError):
        tree.make_dir("link", exist_ok=True)
    assert names(work) == ["a", "b", "f", "link"]


def test_remove(tree, work):
    tree.put("d/f", b"")
    with pytest.raises(SandboxFileError, match="not empty"):
        tree.remove("d")
    tree.remove("d/f")
    tree.remove("d")
    tree.put("e/f/g", b"")
    os.symlink("../../outside", work / "e/link")
    tree.remove("e", recursive=True)
    with pytest.raises(FileNotFoundError):
        tree.remove("e", recursive=True)
    with pytest.raises(SandboxUsageError, match="itself"):
        tree.remove(".", recursive=True)
    assert names(work) == []


@pytest.mark.parametrize("spelling", ["link", "link/", "link//"])
def test_a_work_dir_that_is_a_link_is_refused(work, spelling):
    os.symlink("work", work.parent / "link")
    with pytest.raises(SandboxPathError, match="symbolic link"):
        WorkTree(f"{work.parent}/{spelling}")
    with pytest.raises(FileNotFoundError):
        WorkTree(f"{work.parent}/none")


def test_a_work_dir_that_is_swapped_later_does_not_matter(tree, work):
    os.rename(work, work.parent / "moved")
    os.symlink("outside", work)
    tree.put("f", b"x")
    assert (work.parent / "moved/f").read_bytes() == b"x"
    with pytest.raises(FileNotFoundError):
        tree.get("secret", max_bytes=10)


def test_closed_tree_refuses_and_a_call_under_way_ends_well(tree, work):
    entered, go = threading.Event(), threading.Event()

    def pieces():
        yield b"a"
        entered.set()
        assert go.wait(10)
        yield b"b"

    thread = threading.Thread(target=tree.put_stream, args=("slow", pieces()))
    thread.start()
    assert entered.wait(10)
    tree.close()
    tree.close()
    with pytest.raises(SessionClosedError, match="closed"):
        tree.get("slow", max_bytes=10)
    go.set()
    thread.join(10)
    assert (work / "slow").read_bytes() == b"ab"


def test_a_file_in_several_calls_has_its_name_at_the_end(tree, work):
    new = tree.open_writer("d/f", mode=0o640)
    assert names(work) == [], "nothing before the first piece"
    new.write(b"ab")
    assert not (work / "d/f").exists()
    new.write(memoryview(b"cd"))
    assert new.commit() == 4
    new.abort()
    assert (work / "d/f").read_bytes() == b"abcd"
    assert (work / "d/f").stat().st_mode & 0o777 == 0o640
    assert names(work / "d") == ["f"]
    assert tree.open_writer("empty").commit() == 0
    assert (work / "empty").read_bytes() == b""


def test_a_file_that_is_given_up_leaves_nothing(tree, work):
    tree.put("f", b"old")
    for begun in (False, True):
        new = tree.open_writer("f")
        if begun:
            new.write(b"new")
        new.abort()
        new.abort()
        with pytest.raises(SessionClosedError):
            new.write(b"more")
        with pytest.raises(SessionClosedError):
            new.commit()
    assert names(work) == ["f"]
    assert tree.get("f", max_bytes=9) == b"old"


def test_closing_gives_up_files_in_the_making_and_ends_reads(tree, work):
    tree.put("old", b"x" * 10)
    new, old = tree.open_writer("f"), tree.open_reader("old", max_bytes=10)
    new.write(b"new")
    assert old.read(4) == b"xxxx"
    tree.close()
    assert names(work) == ["old"]
    with pytest.raises(SessionClosedError):
        new.write(b"more")
    with pytest.raises(SessionClosedError):
        old.read(4)
    old.close()


def test_a_file_in_pieces_ends_at_the_limit(tree, work):
    tree.put("f", b"0123456789")
    with contextlib.closing(tree.open_reader("f", max_bytes=10)) as old:
        assert [old.read(4) for _ in range(4)] == [b"0123", b"4567", b"89", b""]
    for rel, error in (("f", SandboxFileTooLargeError), (".", SandboxIsADirectoryError)):
        with contextlib.closing(tree.open_reader(rel, max_bytes=9)) as old, pytest.raises(error):
            old.read(4)
    with contextlib.closing(tree.open_reader("f", max_bytes=12)) as old:
        assert old.read(10) == b"0123456789"
        with open(work / "f", "ab") as file:
            file.write(b"grown")
        with pytest.raises(SandboxFileTooLargeError):
            old.read(10)
