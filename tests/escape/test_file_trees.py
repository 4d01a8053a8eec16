"""Attacks on listing, removing, upload and download by a tree that changes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S, shown_to_host
from tests.escape.inside import attack, program
from tests.escape.plants import SECRET, snapshot

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.spec("E2", "E3")

MIB = 1024 * 1024
_ENOUGH = 10
_LAST_S = 30.0

# "t/d" and "l", a link to the plant, change places as fast as they can.
_FLIP_PARENT = """
print("ready", flush=True)
while True:
    libc.renameat2(-100, b"t/d", -100, b"l", 2)
"""
# "t/f" is in turn a file, a link to the plant, a FIFO and nothing; long enough to be met as each.
_FLIP_LEAF = """
print("ready", flush=True)
while True:
    os.symlink(given["target"], "next"); os.rename("next", "t/f"); time.sleep(0.0005)
    os.mkfifo("next"); os.rename("next", "t/f"); time.sleep(0.0005)
    os.unlink("t/f")
    write("next", "inside"); os.rename("next", "t/f"); time.sleep(0.001)
"""


@contextlib.asynccontextmanager
async def attacked(jail: sb.Session, code: str, plant: Path) -> AsyncIterator[None]:
    """Run the attack during the test; check that the plant is unchanged afterwards."""
    before = snapshot(plant)
    source = program(code, given={"target": str(plant / "secret")})
    proc = await jail.run(source, script_type="python", stdout=True, timeout_s=60)
    assert await anext(proc.iter_stdout_lines()) == "ready"
    yield
    assert proc.returncode is None, "the attack ended before the test did"
    proc.kill()
    await proc.wait()
    assert snapshot(plant) == before


def content_of(top: Path) -> set[bytes]:
    """Return the contents of copied files; fails on a link, a FIFO or an unfinished file."""
    found = set()
    for path in top.rglob("*"):
        mode = path.lstat().st_mode
        assert stat.S_ISDIR(mode) or stat.S_ISREG(mode), path
        assert not path.name.startswith("."), path
        if stat.S_ISREG(mode):
            found.add(path.read_bytes())
    return found


@pytest.mark.threat(5)
async def test_a_download_from_under_a_swap_brings_nothing_from_outside(
    jail: sb.Session, plant: Path, tmp_path: Path
) -> None:
    """A directory of the tree is a link to the plant every other moment."""
    await jail.put_bytes("t/d/secret", b"inside")
    await jail.put_bytes("t/d/inner/deep", b"inside")
    await jail.run(["ln", "-s", str(plant), "l"])
    whole = partly = 0
    last = time.monotonic() + _LAST_S
    async with attacked(jail, _FLIP_PARENT, plant):
        while min(whole, partly) < _ENOUGH and time.monotonic() < last:
            target = tmp_path / f"{whole + partly}"
            got = await jail.download("t", target)
            assert content_of(target) <= {b"inside"}
            assert {one.reason for one in got.skipped} <= {"symlink", "changed"}
            if got.skipped:
                partly += 1
            else:
                assert got.files == 2
                whole += 1
    assert whole >= _ENOUGH, "the real tree is served when its turn comes"
    assert partly >= _ENOUGH, "the link is left out when its turn comes"


@pytest.mark.threat(5, 6, 12)
async def test_a_file_that_turns_into_anything_is_copied_only_as_a_file(
    jail: sb.Session, plant: Path, tmp_path: Path
) -> None:
    """Nothing waits for the FIFO, nothing follows the link."""
    await jail.put_bytes("t/f", b"inside")
    served = skipped = 0
    last = time.monotonic() + _LAST_S
    async with attacked(jail, _FLIP_LEAF, plant), asyncio.timeout(_LAST_S + 10):
        while min(served, skipped) < _ENOUGH and time.monotonic() < last:
            target = tmp_path / f"{served + skipped}"
            got = await jail.download("t", target)
            assert content_of(target) <= {b"inside"}
            served, skipped = served + got.files, skipped + len(got.skipped)
    assert served >= _ENOUGH
    assert skipped >= _ENOUGH


@pytest.mark.threat(5)
async def test_an_upload_into_a_swap_writes_nothing_outside(
    jail: sb.Session, plant: Path, tmp_path: Path
) -> None:
    """Nor do making a directory, listing and removing reach through the link."""
    source = tmp_path / "source"
    (source / "d" / "inner").mkdir(parents=True)
    for name in ("d/secret", "d/inner/deep", "d/new"):
        (source / name).write_bytes(b"inside")
    await jail.upload(source, "t")
    await jail.run(["ln", "-s", str(plant), "l"])
    done = refused = 0
    last = time.monotonic() + _LAST_S
    async with attacked(jail, _FLIP_PARENT, plant):
        while min(done, refused) < 4 * _ENOUGH and time.monotonic() < last:
            for call in (
                lambda: jail.upload(source, "t"),
                lambda: jail.make_dir("t/d/made/here"),
                lambda: jail.list_dir("t/d"),
                lambda: jail.stat("t/d/inner/deep"),
                lambda: jail.remove("t/d/new"),
                lambda: jail.remove("t/d/inner", recursive=True),
            ):
                try:
                    found = await call()
                except sb.SandboxError:
                    refused += 1
                    continue
                done += 1
                assert getattr(found, "size", 6) == 6, "a file of the plant was described"
    assert done >= 4 * _ENOUGH
    assert refused >= 4 * _ENOUGH


@pytest.fixture
def top(jail: sb.Session) -> Iterator[str]:
    """A path of this process for the work dir, also for one that has layers."""
    with shown_to_host(jail) as path:
        yield path


async def test_control_a_plain_copy_is_fooled_by_the_swap(
    jail: sb.Session, plant: Path, top: str
) -> None:
    """The attack succeeds against a program that opens files by name."""
    await jail.put_bytes("t/d/secret", b"inside")
    await jail.run(["ln", "-s", str(plant), "l"])
    seen: set[bytes] = set()
    last = time.monotonic() + _LAST_S
    async with attacked(jail, _FLIP_PARENT, plant):
        while len(seen) < 2 and time.monotonic() < last:
            with contextlib.suppress(OSError):
                seen.add(Path(f"{top}/t/d/secret").read_bytes())
    assert seen == {b"inside", SECRET.encode()}


@pytest.mark.threat(13)
async def test_a_growing_file_never_exceeds_the_cap(jail: sb.Session, tmp_path: Path) -> None:
    """The size is right when it is counted and wrong when it is read."""
    code = """
    os.mkdir("t")
    fd = os.open("t/grows", os.O_WRONLY | os.O_CREAT, 0o644)
    print("growing", flush=True)
    while True:
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, 0)
        for _ in range(64):
            os.write(fd, b"x" * 4096)
    """
    proc = await jail.run(program(code), script_type="python", stdout=True, timeout_s=60)
    assert await anext(proc.iter_stdout_lines()) == "growing"
    served = refused = 0
    last = time.monotonic() + _LAST_S
    while min(served, refused) < _ENOUGH and time.monotonic() < last:
        try:
            got = await jail.download("t", tmp_path / "target", max_bytes=100_000)
        except sb.SandboxError as exc:
            assert exc.code == "file-too-large"  # noqa: PT017 - either outcome is right
            refused += 1
            await asyncio.sleep(0.001)  # lets the writer run on a machine with few cores
        else:
            assert got.bytes == (tmp_path / "target" / "grows").stat().st_size <= 100_000
            served += 1
        assert os.listdir(tmp_path / "target") in ([], ["grows"])
    proc.kill()
    await proc.wait()
    assert served >= _ENOUGH
    assert refused >= _ENOUGH


@pytest.mark.threat(5, 6, 12, 13)
async def test_a_file_that_changes_between_counting_and_copying(
    jail: sb.Session, plant: Path, tmp_path: Path, top: str
) -> None:
    """The same, one change at a time and at the worst moment."""
    before = snapshot(plant)
    where = f"{top}/t/z"

    def grow() -> None:
        os.truncate(where, 50 * MIB)

    def link() -> None:
        os.unlink(where)
        os.symlink(plant / "secret", where)

    def fifo() -> None:
        os.unlink(where)
        os.mkfifo(where)

    def directory() -> None:
        os.unlink(where)
        os.mkdir(where)

    for case, change in enumerate((grow, link, fifo, directory, lambda: os.unlink(where))):
        await jail.remove("t", recursive=True) if case else None
        for size in (3, MIB):
            await jail.put_bytes("t/a", b"first")
            if await jail.exists("t/z"):
                await jail.remove("t/z")
            await jail.put_bytes("t/z", b"x" * size)

            def at_once(done: int, total: int | None, path: str, change=change) -> None:
                if path == "a":
                    change()

            target = tmp_path / f"{case}-{size}"
            copy = jail.download("t", target, max_bytes=2 * MIB, progress=at_once)
            if change is grow:
                with pytest.raises(sb.SandboxError, match="max_bytes"):
                    await copy
            else:
                got = await copy
                assert [(one.path, one.reason) for one in got.skipped] == [("z", "changed")]
            assert os.listdir(target) == ["a"]
    assert snapshot(plant) == before


@pytest.mark.threat(16)
async def test_a_tree_that_is_too_deep_is_refused(jail: sb.Session, tmp_path: Path) -> None:
    """Depth costs neither stack nor descriptors, and has an end."""
    code = """
    for top, name, depth in (("deep", "d", 300), ("long", "d" * 200, 30), ("fine", "d", 100)):
        os.mkdir(top); here = os.getcwd(); os.chdir(top)
        for _ in range(depth):
            os.mkdir(name); os.chdir(name)
        write("bottom", "x")
        os.chdir(here)
    """
    await attack(jail, code)
    await asyncio.sleep(0)  # waiters are resumed before descriptors are closed
    descriptors = len(os.listdir("/proc/self/fd"))
    for top in ("deep", "long"):
        with pytest.raises(sb.SandboxError) as caught:
            await jail.download(top, tmp_path / top)
        assert caught.value.code == "tree-too-deep"
        assert not os.listdir(tmp_path / top)
        await jail.remove(top, recursive=True)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    got = await jail.download("fine", tmp_path / "fine")
    assert (got.files, got.dirs) == (1, 100)


@pytest.mark.threat(16)
async def test_a_tree_with_too_many_entries_is_refused(jail: sb.Session, tmp_path: Path) -> None:
    """Entries of any kind count, before a byte is copied."""
    code = """
    os.makedirs("t/d")
    write("t/file", "x")
    for n in range(2000):
        os.mkdir(f"t/{n}") if n % 50 == 0 else os.symlink("x", f"t/d/{n}")
    """
    await attack(jail, code)
    with pytest.raises(sb.SandboxError) as caught:
        await jail.download("t", tmp_path / "t", max_files=2001)
    assert caught.value.code == "too-many-files"
    assert not os.listdir(tmp_path / "t")
    got = await jail.download("t", tmp_path / "t", max_files=2002)
    assert (got.files, got.dirs, len(got.skipped)) == (1, 41, 1960)


@pytest.mark.threat(13)
async def test_a_sparse_file_is_refused_without_reading_it(
    jail: sb.Session, tmp_path: Path
) -> None:
    """Gigabytes of nothing, counted and not read."""
    await attack(jail, 'os.mkdir("t"); write("t/huge"); os.truncate("t/huge", 6 * 2**30)')
    begun = time.monotonic()
    with pytest.raises(sb.SandboxError) as caught:
        await jail.download("t", tmp_path / "t")
    assert caught.value.code == "file-too-large"
    assert time.monotonic() - begun < SOON_S
    assert not list(tmp_path.rglob("huge"))


@pytest.mark.threat(7)
async def test_links_in_the_target_are_not_followed(
    jail: sb.Session, plant: Path, tmp_path: Path
) -> None:
    """Left in the caller's directory by an earlier program."""
    before = snapshot(plant)
    await attack(jail, 'os.makedirs("t/inner"); write("t/secret"); write("t/inner/deep")')
    for name, target in (("secret", plant / "secret"), ("inner", plant / "inner")):
        local = tmp_path / f"local-{name}"
        local.mkdir()
        os.symlink(target, local / name)
        with pytest.raises(PermissionError) as caught:
            await jail.download("t", local)
        assert isinstance(caught.value, sb.SandboxError)
        assert caught.value.code == "path-symlink"
        assert os.readlink(local / name) == str(target)
    assert snapshot(plant) == before
    assert (await jail.download("t", tmp_path / "free")).files == 2
