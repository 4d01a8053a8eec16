"""Copies of trees: what a lying source is not believed, and how the copy ends when a side fails."""

from __future__ import annotations

import errno
import itertools
import os

import pytest

from union import sandbox as sb
from union.sandbox._core.file_errors import SandboxFileTooLargeError
from union.sandbox._core.files import FileInfo
from union.sandbox._files.local import LocalTree
from union.sandbox._files.writer import FileWriter
from union.sandbox.testing import ScriptedTransport, scripted_session

pytestmark = pytest.mark.spec("E3")


@pytest.mark.parametrize("follows", [False, True])
def test_a_local_directory_behind_a_link_is_refused(tmp_path, monkeypatch, follows):
    """Also on a kernel that ignores O_NOFOLLOW when it opens a directory, as gVisor does."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").touch()
    (tmp_path / "top" / "real").mkdir(parents=True)
    (tmp_path / "top" / "link").symlink_to(tmp_path / "outside")
    if follows:
        plain = os.open

        def careless(path, flags, *args, **kwargs):
            if flags & os.O_DIRECTORY and not flags & os.O_PATH:
                flags &= ~os.O_NOFOLLOW
            return plain(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", careless)
    tree = LocalTree(str(tmp_path / "top"))
    tree.open()
    try:
        assert tree.list_dir("real") == ()
        for attempt in (
            lambda: tree.list_dir("link"),
            lambda: tree.make_dir("link/new", parents=True, exist_ok=True),
            lambda: tree.get("link/secret", max_bytes=1),
        ):
            with pytest.raises(sb.SandboxError, match="link"):
                attempt()
    finally:
        tree.close()
    assert os.listdir(tmp_path / "outside") == ["secret"]


def entry(path: str, kind: str = "file", size: int = 1) -> FileInfo:
    return FileInfo(path=path, kind=kind, size=size, mode=0o6777, mtime=0.0)


class HostileServer(ScriptedTransport):
    """A hostile server: each directory has the entries that ``entries`` returns for it."""

    def __init__(self, entries) -> None:
        super().__init__({})
        self._entries = entries
        self.listings = 0

    async def stat(self, path):
        return entry(path, "dir")

    async def list_dir(self, path):
        self.listings += 1
        return self._entries(path)

    async def get(self, path, *, max_bytes):
        if max_bytes < 200_000:
            raise SandboxFileTooLargeError("larger than that", path=path)
        return b"x" * 200_000


LIES = [
    "t/../../outside/f",
    "t/..",
    "t/.",
    "t/",
    "..",
    "/etc/passwd",
    "t/a/b",
    "other/a",
    "a",
    "",
    "t/a\0b",
]


@pytest.mark.parametrize("path", LIES)
@pytest.mark.parametrize("kind", ["file", "dir", "symlink"])
async def test_a_name_that_no_directory_can_hold_ends_the_download(tmp_path, path, kind):
    (tmp_path / "outside").mkdir()
    local = tmp_path / "a" / "local"
    local.mkdir(parents=True)
    liar = HostileServer(lambda _: (entry("t/fine"), entry(path, kind)))
    async with scripted_session(liar) as sbx:
        with pytest.raises(sb.SandboxError) as caught:
            await sbx.download("t", local)
    assert caught.value.code == "bad-entry"
    assert sorted(os.walk(tmp_path)) == sorted(
        [
            (str(tmp_path), caught_dirs(tmp_path), []),
            (str(tmp_path / "a"), ["local"], []),
            (str(local), [], []),
            (str(tmp_path / "outside"), [], []),
        ]
    )


def caught_dirs(path):
    return next(os.walk(path))[1]


async def test_control_an_honest_listing_is_copied(tmp_path):
    liar = HostileServer(lambda path: (entry("t/d", "dir"),) if path == "t" else (entry("t/d/f"),))
    async with scripted_session(liar) as sbx:
        got = await sbx.download("t", tmp_path)
    assert (got.files, got.dirs, got.bytes) == (1, 1, 200_000)
    assert (tmp_path / "d/f").stat().st_mode & 0o7000 == 0


async def test_a_size_below_nothing_is_not_believed(tmp_path):
    liar = HostileServer(lambda _: (entry("t/a", size=10**12), entry("t/b", size=-(10**12))))
    async with scripted_session(liar) as sbx:
        with pytest.raises(sb.SandboxError) as caught:
            await sbx.download("t", tmp_path)
    assert caught.value.code in {"bad-entry", "file-too-large"}
    liar = HostileServer(lambda _: (entry("t/b", size=-(10**12)),))
    async with scripted_session(liar) as sbx:
        with pytest.raises(sb.SandboxError) as caught:
            await sbx.download("t", tmp_path)
    assert caught.value.code == "bad-entry"


async def test_directories_without_end_are_given_up(tmp_path):
    deep = HostileServer(lambda path: (entry(f"{path}/d", "dir"),))
    async with scripted_session(deep) as sbx:
        with pytest.raises(sb.SandboxError) as caught:
            await sbx.download("t", tmp_path)
    assert caught.value.code == "tree-too-deep"
    assert deep.listings < 200
    numbers = itertools.count()
    wide = HostileServer(
        lambda path: tuple(entry(f"{path}/{next(numbers)}", "dir") for _ in range(5))
    )
    async with scripted_session(wide) as sbx:
        with pytest.raises(sb.SandboxError) as caught:
            await sbx.download("t", tmp_path, max_files=1000)
    assert caught.value.code in {"too-many-files", "tree-too-deep"}
    assert wide.listings <= 250


async def test_content_that_exceeds_its_size_ends_at_the_limit(tmp_path):
    liar = HostileServer(lambda _: tuple(entry(f"t/{n}") for n in range(5)))
    async with scripted_session(liar) as sbx:
        with pytest.raises(sb.SandboxError, match="max_bytes=600000") as caught:
            await sbx.download("t", tmp_path, max_bytes=600_000)
    assert caught.value.code == "file-too-large"
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [200_000] * 3


class Full(ScriptedTransport):
    """A side whose disk is full after the first piece."""

    async def write(self, path, chunks, *, mode, overwrite):
        async for _ in chunks:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise AssertionError("no piece came")


async def test_an_error_of_the_target_comes_out_and_lets_go_of_the_source(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 1_000_000)
    before = sorted(os.listdir("/proc/self/fd"))
    async with scripted_session(Full({})) as sbx:
        with pytest.raises(OSError, match="No space left"):
            await sbx.upload(tmp_path, "t")
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_a_full_disk_of_the_caller_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with scripted_session({}, files={"t/f": b"x" * 1_000_000, "t/g": b"x"}) as sbx:
        for name in ("t", "t/f", "t/g"):
            with monkeypatch.context() as patch:
                patch.setattr("union.sandbox._files.writer.os.write", full)
                with pytest.raises(sb.SandboxError, match="No space left"):
                    await sbx.download(name, tmp_path / name)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        assert (await sbx.download("t", tmp_path / "t")).files == 2


async def test_a_scripted_session_copies_like_any_other(tmp_path):
    transport = ScriptedTransport({}, files={"out/a": b"1", "out/d/b": b"2" * 300_000})
    async with scripted_session(transport) as sbx:
        got = await sbx.download("out", tmp_path / "t")
        assert got == sb.Transfer(files=2, dirs=1, bytes=300_001)
        sent = await sbx.upload(tmp_path / "t", "in")
        assert sent == got
        with pytest.raises(FileExistsError):
            await sbx.upload(tmp_path / "t", "in", overwrite=False)
    assert transport.files["in/d/b"] == b"2" * 300_000


# The caller's side.


@pytest.fixture
def local(tmp_path):
    before = sorted(os.listdir("/proc/self/fd"))
    (tmp_path / "top").mkdir()
    tree = LocalTree(str(tmp_path / "top"))
    tree.open()
    yield tree
    tree.close()
    tree.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def put(tree, rel, data=b"x", **options):
    return tree.put(rel, data, **{"mode": 0o644, "overwrite": True, **options})


@pytest.mark.parametrize("rel", ["../f", "a/../../f", "/f", "a//f", "", "a/", "./f"])
def test_the_local_side_refuses_what_is_no_plain_path(local, tmp_path, rel):
    for call in (
        lambda: put(local, rel),
        lambda: local.get(rel, max_bytes=9),
        lambda: local.list_dir(rel),
        lambda: local.make_dir(rel, parents=True, exist_ok=True),
    ):
        with pytest.raises(sb.SandboxError):
            call()
    assert os.listdir(tmp_path) == ["top"]
    assert os.listdir(tmp_path / "top") == []


def test_the_local_side_follows_no_link(local, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"secret")
    os.symlink("../outside", tmp_path / "top/d")
    os.symlink("../outside/f", tmp_path / "top/f")
    for call in (
        lambda: put(local, "d/f"),
        lambda: put(local, "f"),
        lambda: local.get("d/f", max_bytes=9),
        lambda: local.get("f", max_bytes=9),
        lambda: local.list_dir("d"),
        lambda: local.make_dir("d", parents=False, exist_ok=True),
        lambda: local.make_dir("d/new/er", parents=True, exist_ok=True),
    ):
        with pytest.raises(sb.SandboxError) as caught:
            call()
        assert caught.value.code == "path-symlink"
        assert caught.value.argument == "local"
    assert os.listdir(outside) == ["f"]
    assert (outside / "f").read_bytes() == b"secret"
    local.make_dir("real/deep", parents=True, exist_ok=False)
    assert put(local, "real/deep/f", b"mine") == 4
    assert local.get("real/deep/f", max_bytes=4) == b"mine"


def test_the_local_side_makes_directories_and_files_as_asked(local, tmp_path):
    with pytest.raises(FileNotFoundError):
        local.make_dir("a/b", parents=False, exist_ok=True)
    local.make_dir("a", parents=False, exist_ok=False)
    with pytest.raises(FileExistsError):
        local.make_dir("a", parents=True, exist_ok=False)
    put(local, "a/f", b"1", overwrite=False)
    with pytest.raises(FileExistsError, match="top/a/f"):
        put(local, "a/f", b"2", overwrite=False)
    assert (tmp_path / "top/a/f").read_bytes() == b"1"
    with pytest.raises(FileExistsError):
        local.make_dir("a/f", parents=True, exist_ok=True)
    with pytest.raises(IsADirectoryError, match="top/a"):
        put(local, "a")


def test_a_taken_name_is_not_replaced_even_if_it_came_just_now(local, tmp_path, monkeypatch):
    put(local, "f", b"1")
    monkeypatch.setattr(FileWriter, "_check_target", lambda _: None)
    with pytest.raises(FileExistsError):
        put(local, "f", b"2", overwrite=False)
    assert local.get("f", max_bytes=9) == b"1"
    assert os.listdir(tmp_path / "top") == ["f"]
