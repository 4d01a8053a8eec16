"""File calls that a helper inside the sandbox performs, as the sandbox sees its files."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import ISOLATED, REMOTE, eventually, host_dir, session_of

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


WAYS_OF_MACHINES = (*ISOLATED, REMOTE + "userns")
EVERY = pytest.mark.parametrize("sbx", WAYS_OF_MACHINES, indirect=True)
"""What differs: how the helper starts, what it sees, and the wire."""
ONE = pytest.mark.parametrize(
    "sbx", WAYS_OF_MACHINES if os.environ.get("EVERYWHERE") == "1" else ["userns"], indirect=True
)
"""What the helper does, which is the same wherever it runs."""


@pytest.fixture
async def sbx(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    async with session_of(request.param, persist="machine") as session:
        yield session


@pytest.fixture(params=["userns"])
async def local(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """A session on this machine, whose helper the test acts on."""
    async with session_of(request.param, persist="machine") as session:
        yield session


STOP = """
import os, signal, time
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"class Extraction" not in open(f"/proc/{name}/cmdline", "rb").read():
            continue
    except OSError:
        continue
    os.kill(int(name), signal.SIGSTOP)
    while open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    break
else:
    raise SystemExit("no helper was found")
"""
"""Finds the helper among the processes of the machine and stops it."""


def helper(session: sb.Session) -> Any:
    return session._transport.inside._channel  # type: ignore[union-attr]  # of the fixture


@pytest.mark.spec("R2")
@EVERY
async def test_files_are_as_the_sandbox_sees_them(sbx: sb.Session) -> None:
    assert await sbx.put_bytes("d/f", b"data") == 4
    assert await sbx.get_bytes("d/f") == b"data"
    assert await sbx.get_bytes(f"{sbx.work_dir}/d/f") == b"data"
    assert (await sbx.exec("cat d/f; stat -c %a d/f")).stdout == "data644\n"
    assert [(e.path, e.kind, e.size) for e in await sbx.list_dir("d")] == [("d/f", "file", 4)]
    assert [e.path for e in await sbx.list_dir()] == ["d"]
    assert (await sbx.stat("d")).kind == "dir"
    assert await sbx.exists("d/f")
    assert not await sbx.exists("d/f/g")
    await sbx.make_dir("a/b/c")
    with pytest.raises(FileExistsError):
        await sbx.make_dir("a/b", exist_ok=False)
    with pytest.raises(FileExistsError):
        await sbx.make_dir("d/f")
    with pytest.raises(FileNotFoundError):
        await sbx.make_dir("x/y", parents=False)
    with pytest.raises(OSError, match="not empty") as caught:
        await sbx.remove("a")
    assert isinstance(caught.value, sb.SandboxFileError)
    await sbx.remove("a", recursive=True)
    assert not await sbx.exists("a")
    await sbx.remove("d/f")
    with pytest.raises(FileNotFoundError):
        await sbx.remove("d/f")


@pytest.mark.spec("R2")
@EVERY
async def test_every_visible_path_is_reached_and_no_other(
    sbx: sb.Session, outside_tmp: Path
) -> None:
    assert await sbx.put_bytes("/tmp/scratch/f", b"in the sandbox's /tmp") > 0
    assert await sbx.get_bytes("/tmp/scratch/f") == b"in the sandbox's /tmp"
    assert (await sbx.exec("cat /tmp/scratch/f")).stdout == "in the sandbox's /tmp"
    await sbx.exec("echo made > /var/tmp/made", check=True)
    assert await sbx.get_bytes("/var/tmp/made") == b"made\n"
    assert [e.path for e in await sbx.list_dir("/tmp/scratch")] == ["/tmp/scratch/f"]
    assert not os.path.exists("/tmp/scratch/f"), "not the host's /tmp"
    assert b"root" in await sbx.get_bytes("/etc/passwd")
    assert b"_inside_helper" not in await sbx.get_bytes("/proc/self/status")
    (outside_tmp / "secret").write_text("of the host")
    with pytest.raises(FileNotFoundError):
        await sbx.get_bytes(str(outside_tmp / "secret"))
    with pytest.raises(FileNotFoundError):
        await sbx.get_bytes(f"/proc/self/root{outside_tmp}/secret")
    with pytest.raises(OSError, match=r"Read-only|forbid"):
        await sbx.put_bytes("/usr/x", b"")


@pytest.mark.spec("R2")
@ONE
async def test_links_are_followed_inside(sbx: sb.Session, outside_tmp: Path) -> None:
    (outside_tmp / "secret").write_text("of the host")
    await sbx.put_bytes("real/f", b"one")
    script = f"ln -s real link; ln -s real/f file; ln -s {outside_tmp} out; ln -s new dangling"
    await sbx.exec(script, check=True)
    assert await sbx.get_bytes("link/f") == b"one"
    assert (await sbx.stat("file")).kind == "file"
    await sbx.put_bytes("file", b"two", mode=0o600)
    assert await sbx.get_bytes("real/f") == b"two"
    assert (await sbx.exec("readlink file; stat -c %a real/f")).stdout == "real/f\n600\n"
    kinds = {entry.path: entry.kind for entry in await sbx.list_dir()}
    assert kinds["link"] == kinds["file"] == "symlink"
    await sbx.put_bytes("dangling", b"made")
    assert await sbx.get_bytes("new") == b"made"
    for path in ("out", "out/secret"):
        with pytest.raises(FileNotFoundError):
            await sbx.stat(path)
    await sbx.remove("link")
    assert await sbx.exists("real/f")
    await sbx.exec("ln -s loop loop", check=True)
    with pytest.raises(sb.SandboxFileError, match="symbolic links"):
        await sbx.get_bytes("loop")
    assert (outside_tmp / "secret").read_text() == "of the host"


@pytest.mark.spec("R2")
@ONE
async def test_permissions_are_the_sandboxs_own(sbx: sb.Session) -> None:
    await sbx.put_bytes("kept", b"old", mode=0o400)
    is_root = (await sbx.exec("id -u")).stdout == "0\n"
    can_write = (await sbx.exec("echo new > kept")).ok
    if can_write:
        assert is_root, "control: only a root with its capability may write"
        await sbx.put_bytes("kept", b"new")
    else:
        with pytest.raises(PermissionError) as caught:
            await sbx.put_bytes("kept", b"new")
        assert isinstance(caught.value, sb.SandboxFileAccessError)
        assert await sbx.get_bytes("kept") == b"old"
    await sbx.exec("chmod 0 kept", check=True)
    can_read = (await sbx.exec("cat kept")).ok
    if not can_read:
        with pytest.raises(PermissionError):
            await sbx.get_bytes("kept")


@pytest.mark.spec("R2")
@ONE
async def test_a_file_is_written_in_place(sbx: sb.Session) -> None:
    await sbx.put_bytes("f", b"a longer text")
    await sbx.exec("ln f hard", check=True)
    before = (await sbx.exec("stat -c %i f")).stdout
    await sbx.put_bytes("f", b"short")
    assert await sbx.get_bytes("hard") == b"short"
    assert (await sbx.exec("stat -c %i f")).stdout == before


@pytest.mark.spec("R2")
@EVERY
async def test_exclusive_append_and_rename(sbx: sb.Session) -> None:
    assert await sbx.put_bytes("f", b"1", exclusive=True) == 1
    for options in ({"exclusive": True}, {"overwrite": False}):
        with pytest.raises(FileExistsError):
            await sbx.put_bytes("f", b"2", **options)
    await sbx.exec("ln -s nowhere dangling", check=True)
    with pytest.raises(FileExistsError):
        await sbx.put_bytes("dangling", b"", exclusive=True)
    assert await sbx.append("f", b"23") == 3
    assert await sbx.append("logs/new", b"x" * 3_000_000) == 3_000_000
    assert await sbx.get_bytes("f") == b"123"
    await sbx.rename("f", "logs/g")
    assert await sbx.get_bytes("logs/g") == b"123"
    await sbx.put_bytes("other", b"other")
    with pytest.raises(FileExistsError):
        await sbx.rename("other", "logs/g", overwrite=False)
    await sbx.rename("other", "logs/g")
    assert await sbx.get_bytes("logs/g") == b"other"
    with pytest.raises(FileNotFoundError):
        await sbx.rename("missing", "x")


@pytest.mark.spec("R2")
@EVERY
async def test_glob(sbx: sb.Session) -> None:
    for path in ("a.py", "b.txt", "d/c.py", "d/e/f.py", ".hidden.py"):
        await sbx.put_bytes(path, b"")
    assert await sbx.glob("*.py") == ("a.py",)
    assert await sbx.glob("**/*.py") == ("a.py", "d/c.py", "d/e/f.py")
    assert await sbx.glob("*.py", hidden=True) == (".hidden.py", "a.py")
    assert await sbx.glob("[ab].*") == ("a.py", "b.txt")
    assert await sbx.glob(f"{sbx.work_dir}/d/*.py") == ("d/c.py",)
    assert await sbx.glob("/etc/pass?d") == ("/etc/passwd",)
    assert await sbx.glob("nothing*") == ()
    assert not any("sandbox-venv" in path for path in await sbx.glob("**", hidden=True))


@pytest.mark.spec("R2")
@EVERY
async def test_watch(sbx: sb.Session) -> None:
    await sbx.make_dir("d")
    changes = sbx.watch("d", recursive=True)
    first = asyncio.ensure_future(anext(changes))
    # The watch has begun when a change is seen: touch until then.
    number = 0
    while not first.done():
        await sbx.put_bytes(f"d/start{number}", b"")
        number += 1
        await asyncio.wait([first], timeout=0.05)
    assert (await first).path.startswith("d/start")
    await sbx.exec("mkdir -p d/deep/er; echo x > d/deep/er/f; mv d/deep/er/f d/g; rm d/g")
    seen: list[tuple[str, str]] = []
    while ("d/g", "deleted") not in seen:
        change = await asyncio.wait_for(anext(changes), 40)
        seen.append((change.path, change.kind))
    assert ("d/deep", "created") in seen
    assert ("d/g", "created") in seen
    await changes.aclose()  # type: ignore[attr-defined]  # a generator
    assert await sbx.exists("d")
    with pytest.raises(FileNotFoundError):
        await anext(sbx.watch("missing"))


@pytest.mark.skipif(
    not hasattr(tarfile, "tar_filter"),
    reason="this Python cannot unpack safely: use 3.11.4 or newer",
)
@pytest.mark.spec("R2")
@EVERY
async def test_archive_and_extract_keep_links(sbx: sb.Session) -> None:
    await sbx.put_bytes("tree/run", b"#!/bin/sh\n", mode=0o755)
    await sbx.put_bytes("tree/deep/big", bytes(2_500_000))
    await sbx.put_bytes("tree/secret/key", b"left out")
    script = "cd tree; ln -s run sym; ln -s /etc/passwd abs; ln run hard; mkfifo pipe; mkdir empty"
    await sbx.exec(script, check=True)
    data = b"".join([chunk async for chunk in sbx.archive("tree", exclude=["secret"])])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert set(members) == {"run", "deep", "deep/big", "sym", "abs", "hard", "empty"}
    assert members["sym"].linkname == "run"
    assert members["abs"].linkname == "/etc/passwd"
    assert {members["run"].islnk(), members["hard"].islnk()} == {True, False}
    assert members["deep/big"].size == 2_500_000

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 700_001):
            yield data[at : at + 700_001]

    assert await sbx.extract("copy", chunks()) == len(data)
    check = "cd copy; readlink sym abs; test run -ef hard; stat -c %a run; stat -c %s deep/big"
    assert (await sbx.exec(check, check=True)).stdout == "run\n/etc/passwd\n755\n2500000\n"
    assert await sbx.extract("again", data) == len(data)
    whole = b"".join([chunk async for chunk in sbx.archive()])
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        assert not any(name.startswith(".sandbox-venv") for name in archive.getnames())
    with pytest.raises(sb.SandboxFileTooLargeError):
        [chunk async for chunk in sbx.archive("tree", max_bytes=1000)]
    with pytest.raises(sb.SandboxFileError):
        await sbx.extract("bad", b"no archive" * 1000)
    for wrong in ("text", 3, ["text"]):
        with pytest.raises(sb.SandboxUsageError, match="data must be bytes"):
            await sbx.extract("bad", wrong)  # type: ignore[arg-type]  # the mistake


def tar_of(*members: tuple[str, str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, link, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if link:
                info.type, info.linkname = tarfile.SYMTYPE, link
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.skipif(
    not hasattr(tarfile, "tar_filter"),
    reason="this Python cannot unpack safely: use 3.11.4 or newer",
)
@pytest.mark.spec("R2")
@pytest.mark.threat(5)
@ONE
async def test_an_archive_writes_nothing_outside_its_directory(sbx: sb.Session) -> None:
    await sbx.make_dir("top")
    for members in (
        [("../out", "", b"x")],
        [("to", "..", b""), ("to/out", "", b"x")],
        [("to", sbx.work_dir, b""), ("to/out", "", b"x")],
    ):
        with pytest.raises(sb.SandboxFileError):
            await sbx.extract("top", tar_of(*members))
        assert not await sbx.exists("out")
    await sbx.extract("top", tar_of(("in", "", b"x")))
    assert await sbx.get_bytes("top/in") == b"x", "control"


@pytest.mark.spec("R2")
@ONE
async def test_special_files_are_not_waited_for(sbx: sb.Session) -> None:
    await sbx.exec("mkfifo pipe", check=True)
    for path in ("pipe", "/dev/zero"):
        with pytest.raises(sb.SandboxNotRegularError):
            await asyncio.wait_for(sbx.get_bytes(path), 40)
        with pytest.raises(sb.SandboxNotRegularError):
            await asyncio.wait_for(sbx.put_bytes(path, b"x"), 40)
    with pytest.raises(IsADirectoryError):
        await sbx.get_bytes(".")
    with pytest.raises(IsADirectoryError):
        await sbx.put_bytes("/tmp", b"x")


@pytest.mark.spec("R2")
@ONE
async def test_limits_and_large_files(sbx: sb.Session) -> None:
    data = os.urandom(3_000_000)
    assert await sbx.put_bytes("big", data) == len(data)
    assert await sbx.get_bytes("big") == data
    with pytest.raises(sb.SandboxFileTooLargeError):
        await sbx.get_bytes("big", max_bytes=2_999_999)
    assert await sbx.get_bytes("big", max_bytes=3_000_000) == data
    await sbx.exec("mkdir many; cd many; seq 3000 | xargs touch", check=True)
    assert len(await sbx.list_dir("many")) == 3000


@pytest.mark.spec("R2", "E3")
@EVERY
async def test_trees_are_copied_through_the_helper(sbx: sb.Session, tmp_path: Path) -> None:
    (tmp_path / "from/d").mkdir(parents=True)
    (tmp_path / "from/d/f").write_bytes(b"data")
    done = await sbx.upload(tmp_path / "from", "/tmp/up")
    assert (done.files, done.bytes) == (1, 4)
    await sbx.download("/tmp/up", tmp_path / "to")
    assert (tmp_path / "to/d/f").read_bytes() == b"data"


@pytest.mark.spec("R2")
@ONE
async def test_calls_at_once(sbx: sb.Session) -> None:
    await asyncio.gather(*(sbx.put_bytes(f"f{n}", b"%d" % n) for n in range(40)))
    found = await asyncio.gather(*(sbx.get_bytes(f"f{n}") for n in range(40)))
    assert found == [b"%d" % n for n in range(40)]


@pytest.mark.spec("R2")
async def test_a_helper_that_was_killed_is_replaced(local: sb.Session) -> None:
    await local.put_bytes("f", b"data")
    channel = helper(local)
    channel._process._run.signal(signal.SIGKILL)
    assert await asyncio.to_thread(lambda: eventually(lambda: channel.lost is not None))
    assert await local.get_bytes("f") == b"data"
    assert helper(local) is not channel


@pytest.mark.spec("R2")
async def test_a_helper_that_was_stopped_does_not_hang_a_call(
    local: sb.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from union.sandbox._files import inside

    await local.put_bytes("f", b"data")
    channel = helper(local)
    real = channel.request
    monkeypatch.setattr(channel, "request", lambda *a, **k: real(*a, **{**k, "within_s": 0.3}))
    await local.exec(STOP, script_type="python", check=True)
    with pytest.raises(sb.SandboxExecutionError, match="has not replied") as caught:
        await asyncio.wait_for(local.get_bytes("f"), 40)
    assert caught.value.code == "file-helper"
    assert inside._REPLY_S > 1
    assert await local.get_bytes("f") == b"data", "the next call starts another"


@pytest.mark.spec("R2")
async def test_the_host_does_not_open_the_tree(
    local: sb.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    await local.put_bytes("first", b"")  # the helper is started
    tree = local._transport._opened().work.tree  # type: ignore[union-attr]  # of the fixture

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the host opened a path of the work dir")

    for name in ("put", "get", "open_reader", "open_writer", "list_dir", "stat", "make_dir"):
        monkeypatch.setattr(type(tree), name, refuse)
    await local.put_bytes("f", b"data")
    assert await local.get_bytes("f") == b"data"
    await local.list_dir()
    await local.stat("f")
    await local.make_dir("d")
    await local.append("f", b"more")
    monkeypatch.undo()
    assert os.path.exists(f"{host_dir(local)}/f")


@pytest.mark.spec("R2", "C10")
async def test_other_sessions_refuse_the_calls_of_a_machine() -> None:
    async with session_of("userns") as session:
        for call in (
            lambda: session.append("f", b""),
            lambda: session.rename("f", "g"),
            lambda: session.glob("*"),
            lambda: anext(session.watch()),
            lambda: anext(session.archive()),
            lambda: session.extract("d", b""),
        ):
            with pytest.raises(sb.SandboxUsageError, match="persist='machine'") as caught:
                await call()
            assert caught.value.code == "needs-machine"
