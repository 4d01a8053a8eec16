"""upload and download: single files and whole trees, limits, progress, cancellation."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest
from tests.conftest import host_dir

from union import sandbox as sb

pytestmark = pytest.mark.spec("E3")

MIB = 1024 * 1024
RAW = b"raw\xff".decode("utf-8", "surrogateescape")
CONTENT = {
    "plain": b"1",
    "empty": b"",
    "d/e/f/deep": b"2" * 1000,
    "d/large": os.urandom(1 << 16) * 40,
    "new\nline": b"3",
    f"d/{RAW}": b"4",
    "-rf": b"5",
    ".hidden/x": b"6",
}


def make_tree(top: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def tree_of(top: Path) -> dict[str, bytes | None]:
    """Every file below, with its content; None for a directory that is empty."""
    found: dict[str, bytes | None] = {}
    for path in sorted(top.rglob("*")):
        name = path.relative_to(top).as_posix()
        if not path.is_dir():
            assert path.is_file(), name
            assert not path.is_symlink(), name
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[name] = None
    return found


async def test_a_tree_goes_in_and_comes_back(sbx: sb.Session, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    make_tree(source, CONTENT)
    (source / "bare" / "er").mkdir(parents=True)
    sent = await sbx.upload(source, "in/side")
    size = sum(map(len, CONTENT.values()))
    assert sent == sb.Transfer(files=8, dirs=6, bytes=size, skipped=())
    assert (await sbx.exec("cat in/side/d/e/f/deep | wc -c")).stdout.strip() == "1000"
    owned = await sbx.exec(
        "touch in/side/bare/er/x && rm in/side/bare/er/x && rmdir in/side/bare/er"
    )
    assert owned.ok, owned.stderr
    assert await sbx.download("in/side", target) == sb.Transfer(files=8, dirs=5, bytes=size)
    assert tree_of(target) == {**CONTENT, "bare": None}


async def test_files_of_the_sandbox_can_be_downloaded(sbx: sb.Session, tmp_path: Path) -> None:
    await sbx.run(
        "umask 077; mkdir -p out/d; echo a > out/a; seq 200000 > out/d/big; chmod 755 out/a"
    )
    got = await sbx.download(f"{sbx.work_dir}/out/", str(tmp_path))
    assert (got.files, got.dirs) == (2, 1)
    assert (tmp_path / "a").read_bytes() == b"a\n"
    assert (tmp_path / "d/big").read_text().split() == [str(n) for n in range(1, 200001)]
    for path in (tmp_path, tmp_path / "d", tmp_path / "d/big"):
        assert path.stat().st_uid == os.geteuid()


async def test_a_single_file_has_the_name_it_is_given(sbx: sb.Session, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    assert await sbx.upload(tmp_path / "f", "a/b") == sb.Transfer(files=1, dirs=0, bytes=7)
    assert await sbx.get_bytes("a/b") == b"content"
    for target in (tmp_path / "x" / "y", tmp_path / RAW):
        assert await sbx.download("a/b", target) == sb.Transfer(files=1, dirs=0, bytes=7)
        assert target.read_bytes() == b"content"
    os.symlink("f", tmp_path / "link")
    await sbx.upload(tmp_path / "link", "by-link")  # the caller's own word
    assert await sbx.get_bytes("by-link") == b"content"


async def test_a_tree_joins_what_is_there(sbx: sb.Session, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_tree(source, {"a": b"new", "d/b": b"new"})
    make_tree(target, {"a": b"old", "d/c": b"old"})
    await sbx.put_bytes("t/d/c", b"old")
    await sbx.put_bytes("t/a", b"old")
    await sbx.upload(source, "t")
    await sbx.download("t", target)
    assert tree_of(target) == {"a": b"new", "d/b": b"new", "d/c": b"old"}
    for call in (
        sbx.upload(source, "t", overwrite=False),
        sbx.download("t", target, overwrite=False),
    ):
        with pytest.raises(FileExistsError) as caught:
            await call
        assert isinstance(caught.value, sb.SandboxError)
    assert (await sbx.download("t", tmp_path / "free", overwrite=False)).files == 3


async def test_the_whole_work_dir_without_the_venv(sbx: sb.Session, tmp_path: Path) -> None:
    await sbx.run("echo x > f; mkdir d")
    got = await sbx.download(".", tmp_path / "all")
    assert tree_of(tmp_path / "all") == {"f": b"x\n", "d": None}
    assert [(one.path, one.reason) for one in got.skipped] == [(".sandbox-venv", "venv")]
    make_tree(tmp_path / "all", {"g": b"y", ".sandbox-venv/pyvenv.cfg": b"mine"})
    sent = await sbx.upload(tmp_path / "all", ".")
    assert [one.reason for one in sent.skipped] == ["venv"]
    assert await sbx.run_code("print(open('g').read())") == "y\n"


async def test_modes_arrive_without_set_id_bits(sbx: sb.Session, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_tree(source, {"run": b"", "shut": b"", "set": b""})
    for name, mode in {"run": 0o751, "shut": 0o000, "set": 0o6755}.items():
        (source / name).chmod(mode)
    if os.geteuid():  # only root can read it otherwise
        (source / "shut").unlink()
    await sbx.upload(source, "t")
    found = {info.name: info.mode for info in await sbx.list_dir("t")}
    assert found.items() <= {"run": 0o751, "shut": 0o600, "set": 0o755}.items()
    # Set-id bits are refused inside, so the host plants them.
    os.chmod(f"{host_dir(sbx)}/t/set", 0o6777)
    os.chmod(f"{host_dir(sbx)}/t/run", 0o757)
    before = os.umask(0o022)
    try:
        await sbx.download("t", tmp_path / "target")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "target").iterdir()}
    assert modes.items() <= {"run": 0o755, "shut": 0o600, "set": 0o755}.items()
    assert len(modes) == len(found) >= 2


async def test_links_and_special_files_are_left_out_and_named(
    sbx: sb.Session, tmp_path: Path
) -> None:
    made = await sbx.exec(
        "mkdir -p t/d; echo x > t/f; ln -s f t/link; ln -s /etc t/d/out; ln -s no t/dangling; "
        "mkfifo t/d/fifo; cd t; python -c 'import socket; "
        'socket.socket(socket.AF_UNIX).bind("socket")\''
    )
    assert made.ok, made.stderr
    got = await sbx.download("t", tmp_path / "target")
    assert tree_of(tmp_path / "target") == {"f": b"x\n", "d": None}
    assert {(one.path, one.reason) for one in got.skipped} == {
        ("link", "symlink"),
        ("dangling", "symlink"),
        ("d/out", "symlink"),
        ("d/fifo", "special"),
        ("socket", "special"),
    }
    source = tmp_path / "source"
    make_tree(source, {"f": b"x"})
    os.symlink("/etc", source / "out")
    os.mkfifo(source / "fifo")
    sent = await sbx.upload(source, "in")
    assert {(one.path, one.reason) for one in sent.skipped} == {
        ("out", "symlink"),
        ("fifo", "special"),
    }
    assert [info.name for info in await sbx.list_dir("in")] == ["f"]


REFUSED = {
    "missing": ("download", "missing", "x", FileNotFoundError),
    "a link": ("download", "link", "x", PermissionError),
    "a linked tree": ("download", "linkdir", "x", PermissionError),
    "through a link": ("download", "linkdir/f", "x", PermissionError),
    "a fifo": ("download", "fifo", "x", PermissionError),
    "outside": ("download", "/etc", "x", PermissionError),
    "above": ("download", "..", "x", PermissionError),
    "a file on a directory": ("download", "f", "dir", IsADirectoryError),
    "a file on a directory's name": ("download", "f", "dir/", IsADirectoryError),
    "a file on a link": ("download", "f", "local-link", PermissionError),
    "a tree on a file": ("download", "dir", "file", OSError),
    "below a file": ("download", "f", "file/x", OSError),
    "no such local": ("upload", "nothing", "x", FileNotFoundError),
    "a local fifo": ("upload", "local-fifo", "x", PermissionError),
    "upload outside": ("upload", "dir", "/tmp/contract-up", PermissionError),
    "upload a tree on a file": ("upload", "dir", "f", FileExistsError),
    "upload a tree on a link": ("upload", "dir", "linkdir", PermissionError),
    "upload a file on a directory": ("upload", "file", "dir", IsADirectoryError),
    "upload a file as the work dir": ("upload", "file", ".", ValueError),
    "upload through a link": ("upload", "file", "linkdir/x", PermissionError),
}


async def test_refused_with_the_builtin_that_fits(
    sbx: sb.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tree(tmp_path, {"file": b"here", "dir/x": b"here"})
    os.symlink("file", "local-link")
    os.mkfifo("local-fifo")
    made = await sbx.exec("mkdir dir; echo x > f; ln -s f link; ln -s dir linkdir; mkfifo fifo")
    assert made.ok, made.stderr
    for case, (call, *ends, error) in REFUSED.items():
        with pytest.raises(error) as caught:
            await getattr(sbx, call)(*ends)
        assert isinstance(caught.value, sb.SandboxError), case
    assert sorted(os.listdir()) == ["dir", "file", "local-fifo", "local-link"]
    assert Path("file").read_bytes() == b"here"
    assert os.listdir(f"{host_dir(sbx)}/dir") == []
    assert not os.path.exists("/tmp/contract-up")


async def test_limits_are_held_before_anything_is_written(sbx: sb.Session, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_tree(source, {"a": b"12345", "d/b": b"12345"})
    os.symlink("a", source / "link")
    await sbx.upload(source, "t", max_bytes=10, max_files=4)
    await sbx.run("ln -s a t/link")
    for limit, code in (({"max_bytes": 9}, "file-too-large"), ({"max_files": 3}, "too-many-files")):
        name, value = next(iter(limit.items()))
        for call in (
            sbx.upload(source, "new", **limit),
            sbx.download("t", tmp_path / "new", **limit),
        ):
            with pytest.raises(sb.SandboxError, match=f"{name}={value}") as caught:
                await call
            assert caught.value.code == code
    assert not await sbx.exists("new")
    assert not tree_of(tmp_path / "new")
    await sbx.download("t", tmp_path / "exact", max_bytes=10, max_files=4)
    for call in (
        sbx.upload(source / "a", "one", max_bytes=4),
        sbx.download("t/a", tmp_path / "one", max_bytes=4),
    ):
        with pytest.raises(sb.SandboxError, match="max_bytes=4"):
            await call
    assert not (tmp_path / "one").exists()


async def test_progress_tells_how_far_it_is(sbx: sb.Session, tmp_path: Path) -> None:
    make_tree(tmp_path / "s", {"a": b"1" * 10, "d/b": b"2" * (3 * MIB), "empty": b""})
    total = 3 * MIB + 10
    seen: list[tuple[int, int | None, str]] = []

    def tell(done: int, total: int | None, path: str) -> None:
        seen.append((done, total, path))

    for call in (
        lambda: sbx.upload(tmp_path / "s", "t", progress=tell),
        lambda: sbx.download("t", tmp_path / "t", progress=tell),
    ):
        seen.clear()
        await call()
        counting = [each for each in seen if each[1] is None]
        assert {path for _, _, path in counting} == {"", "d"}
        copying = seen[len(counting) :]
        assert {path for _, _, path in copying} == {"a", "d/b", "empty"}
        assert [all_ for _, all_, _ in copying] == [total] * len(copying)
        done = [each for each, _, _ in copying]
        assert done == sorted(done)
        assert done[-1] == total
        assert len({each for each, _, path in copying if path == "d/b"}) >= 2, "in pieces"


async def test_an_error_in_progress_ends_the_copy(sbx: sb.Session, tmp_path: Path) -> None:
    def stop(done: int, total: int | None, path: str) -> None:
        if done > MIB:
            raise RuntimeError("enough")

    make_tree(tmp_path / "s", {"large": b"1" * (4 * MIB)})
    with pytest.raises(RuntimeError, match="enough"):
        await sbx.upload(tmp_path / "s", "t", progress=stop)
    assert await sbx.list_dir("t") == ()
    await sbx.upload(tmp_path / "s", "t")
    with pytest.raises(RuntimeError, match="enough"):
        await sbx.download("t", tmp_path / "t", progress=stop)
    assert os.listdir(tmp_path / "t") == []


async def test_a_cancelled_copy_leaves_no_part_of_a_file(sbx: sb.Session, tmp_path: Path) -> None:
    make_tree(tmp_path / "s", {f"{n}": b"1" * (2 * MIB) for n in range(8)})
    started = asyncio.Event()

    def tell(done: int, total: int | None, path: str) -> None:
        if done > 3 * MIB:
            started.set()

    for copy, there in (
        (lambda: sbx.upload(tmp_path / "s", "t", progress=tell), f"{host_dir(sbx)}/t"),
        (lambda: sbx.download("s", tmp_path / "t", progress=tell), f"{tmp_path}/t"),
    ):
        started.clear()
        task = asyncio.create_task(copy())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = os.listdir(there)
        assert 0 < len(found) < 8
        assert all(os.path.getsize(f"{there}/{name}") == 2 * MIB for name in found), found
        assert not [name for name in found if name.startswith(".")]
        await sbx.upload(tmp_path / "s", "s")  # the session goes on


async def test_closing_the_session_ends_a_copy(open_session: object, tmp_path: Path) -> None:
    source, work = tmp_path / "s", tmp_path / "work"
    make_tree(source, {f"{n}": b"1" * (2 * MIB) for n in range(8)})
    work.mkdir()
    started = asyncio.Event()
    async with open_session(host_work_dir=str(work)) as session:  # type: ignore[operator]
        task = asyncio.create_task(
            session.upload(source, "t", progress=lambda done, *_: done and started.set())
        )
        await started.wait()
    found = os.listdir(work / "t")
    assert not [name for name in found if name.startswith(".")]
    with pytest.raises(sb.SessionClosedError):
        await task
    assert sorted(os.listdir(work / "t")) == sorted(found)
    for call in ("upload", "download"):
        with pytest.raises(sb.SessionClosedError):
            await getattr(session, call)(str(tmp_path), "x")


async def test_copies_run_beside_each_other(sbx: sb.Session, tmp_path: Path) -> None:
    for n in range(4):
        make_tree(tmp_path / f"s{n}", {"d/f": b"%d" % n * MIB, "g": b"%d" % n})
    await asyncio.gather(*(sbx.upload(tmp_path / f"s{n}", f"t{n}") for n in range(4)))
    await asyncio.gather(*(sbx.download(f"t{n}", tmp_path / f"t{n}") for n in range(4)))
    for n in range(4):
        assert tree_of(tmp_path / f"t{n}") == tree_of(tmp_path / f"s{n}")


async def test_a_socket_of_the_caller_is_not_opened(sbx: sb.Session, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(tmp_path)  # the name of a socket is short
        try:
            listener.bind("s")
        finally:
            os.chdir(here)
        sent = await sbx.upload(tmp_path, "t")
        assert [one.reason for one in sent.skipped] == ["special"]
        with pytest.raises(PermissionError):
            await sbx.upload(tmp_path / "s", "t")
