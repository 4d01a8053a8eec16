"""Work dirs that a killed process left: removed with a marker of ours, and nothing else is."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.conftest import ISOLATED, eventually, session_of
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._linux import owned_dir
from union.sandbox._linux.owned_dir import OwnedDir, disown, sweep
from union.sandbox._session import threads
from union.sandbox.on_device import _workdir

OLD = time.time() - 3600
HEX = "0123456789abcdef"


def left_over(place: Path, *, files: int = 1) -> Path:
    """Make a directory as a session does, and let go of it as a crash does."""
    owned = OwnedDir.make(str(place))
    path = Path(owned.path)
    for number in range(files):
        (path / f"file-{number}").write_text("of sandboxed code")
    owned.release()
    return path


def marker_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    path = left_over(tmp_path)
    (path / "deep").mkdir()
    sweep(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.threat(133)
@pytest.mark.parametrize(
    "name",
    [
        "sandbox-project",
        "sandbox-1-abcdefgh",
        f"sandbox-1-{HEX}",
        "sandbox-999999999-0000000000000000",
        "sandbox-",
    ],
)
def test_a_directory_without_a_marker_stays_whatever_its_name(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.mkdir()
    (mine / "data").write_text("precious")
    os.utime(mine, (OLD, OLD))
    control = left_over(tmp_path)
    sweep(str(tmp_path))
    assert not control.exists(), "the control: a left-over directory is removed"
    assert (mine / "data").read_text() == "precious"


FORGED = {
    "empty": b"",
    "another format": b"unionai-sandbox work dir, version 0\n",
    "of another directory": b"unionai-sandbox work dir, version 1\nsandbox-2-%s 1 1\n"
    % HEX.encode(),
    "too long": b"x" * 300,
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.threat(133)
@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_a_marker_that_does_not_describe_the_directory_removes_nothing(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / f"sandbox-1-{HEX}"
    mine.mkdir()
    (mine / "data").write_text("precious")
    marker = marker_of(mine)
    marker.write_bytes(content)
    marker.chmod(0o600)
    with caplog.at_level(logging.WARNING, "union.sandbox"):
        sweep(str(tmp_path))
    assert (mine / "data").read_text() == "precious"


@pytest.mark.threat(133)
@pytest.mark.parametrize("change", ["replaced", "renamed", "linked", "mode", "pipe", "symlink"])
def test_a_true_marker_does_not_serve_for_another_directory(tmp_path: Path, change: str) -> None:
    path = left_over(tmp_path)
    marker, mine = marker_of(path), path
    if change == "replaced":  # the same name, another inode
        kept = tmp_path / "kept"
        path.rename(kept)
        path.mkdir()
    elif change == "renamed":
        mine = tmp_path / f"sandbox-1-{HEX}"
        marker.rename(marker_of(mine))
        mine.mkdir()
    elif change == "linked":
        (tmp_path / "second-name").hardlink_to(marker)
    elif change == "mode":
        marker.chmod(0o666)
    elif change == "pipe":
        marker.unlink()
        os.mkfifo(marker, 0o600)
    else:
        real = tmp_path / "real"
        marker.rename(real)
        marker.symlink_to(real)
    (mine / "data").write_text("precious")
    sweep(str(tmp_path))
    assert (mine / "data").read_text() == "precious"


@pytest.mark.threat(133)
def test_a_marker_of_another_user_removes_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    path = left_over(tmp_path)
    os.chown(marker_of(path), 12345, 12345)
    sweep(str(tmp_path))
    assert path.exists()


@pytest.mark.threat(133)
def test_a_directory_that_is_in_use_stays(tmp_path: Path) -> None:
    owned = OwnedDir.make(str(tmp_path))
    second = OwnedDir.join(owned.path)
    sweep(str(tmp_path))
    owned.release()
    sweep(str(tmp_path))
    assert os.path.isdir(owned.path), "another process holds it"
    second.release()
    sweep(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_the_directory_is_made_leaves_nothing_for_good(tmp_path: Path) -> None:
    name = f"sandbox-1-{HEX}"
    marker = tmp_path / f"{name}.lock"
    marker.touch(0o600)
    sweep(str(tmp_path))
    assert not marker.exists(), "before the directory was there"
    marker.touch(0o600)
    (tmp_path / name).mkdir()
    sweep(str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "before the marker was written"


@pytest.mark.threat(133)
def test_directories_are_made_while_others_sweep(tmp_path: Path) -> None:
    """Every step of making one, against a sweep at that moment."""
    stop = threading.Event()

    def sweeping() -> None:
        while not stop.is_set():
            sweep(str(tmp_path))

    sweepers = [threading.Thread(target=sweeping) for _ in range(3)]
    for sweeper in sweepers:
        sweeper.start()
    try:
        made = [OwnedDir.make(str(tmp_path)) for _ in range(300)]
        assert all(os.path.isdir(owned.path) for owned in made)
        assert all(os.path.exists(owned.path + ".lock") for owned in made)
        for owned in made:
            owned.remove()
    finally:
        stop.set()
        for sweeper in sweepers:
            sweeper.join(20)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_comes_before_the_lock_makes_it_try_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if how & fcntl.LOCK_SH:
            tries.append(os.readlink(f"/proc/self/fd/{fd}"))
            if len(tries) == 1:
                os.unlink(tries[0])  # as a sweep does with an empty marker
        real(fd, how)

    monkeypatch.setattr(owned_dir.fcntl, "flock", flock)
    owned = OwnedDir.make(str(tmp_path))
    assert len(set(tries)) == 2
    assert os.path.isdir(owned.path)
    owned.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.threat(133)
def test_a_left_over_directory_that_the_caller_names_is_the_callers(tmp_path: Path) -> None:
    for below in (".", "project"):
        path = left_over(tmp_path)
        (path / below).mkdir(exist_ok=True)
        disown(os.path.realpath(path / below))
        sweep(str(tmp_path))
        assert (path / "file-0").exists(), below
    control = left_over(tmp_path)
    sweep(str(tmp_path))
    assert not control.exists()


def test_a_directory_that_is_being_removed_cannot_be_named(tmp_path: Path) -> None:
    path = left_over(tmp_path)
    with marker_of(path).open("r+") as sweeping:
        fcntl.flock(sweeping, fcntl.LOCK_EX)
        with pytest.raises(sb.SandboxUsageError, match="being removed"):
            _workdir.WorkDir(str(path))
        fcntl.flock(sweeping, fcntl.LOCK_SH)  # as a session does
        _workdir.WorkDir(str(path)).remove()
    assert path.exists()


OPEN = """
import asyncio, sys
from union import sandbox as sb
from union.sandbox._session import threads
async def main():
    async with sb.on_device.session(backend=sys.argv[1]) as session:
        await session.exec("true")
        await threads.removal.run("sweep", int)  # after what was begun before
        while threads.removal._running:
            await asyncio.sleep(0.01)
asyncio.run(main())
"""


def open_elsewhere(backend: str, place: Path) -> None:
    """Open a session in another process that has ``place`` for its work dirs."""
    preferred = (
        f"from union.sandbox.on_device import _workdir; _workdir._PREFERRED = {str(place)!r}"
    )
    argv = [sys.executable, "-c", preferred + OPEN, backend]
    subprocess.run(argv, check=True, timeout=60)


@pytest.mark.threat(133)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_opening_a_session_removes_only_what_a_crash_left(
    backend: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    mine = place / f"sandbox-{os.getpid()}-{HEX}"
    (mine / "data").mkdir(parents=True)
    (mine / "data" / "precious").write_text("mine")
    other = place / "sandbox-of-another-tool"
    other.mkdir()
    (other / "file").touch()
    crashed = left_over(place)
    async with session_of(backend, host_work_dir=str(mine)) as live:
        for path in (mine, other, crashed):
            os.utime(path, (OLD, OLD))
        await asyncio.to_thread(open_elsewhere, backend, place)
        assert not crashed.exists(), "the control: the sweep has been here"
        assert (await live.exec("cat data/precious")).stdout == "mine"
    assert sorted(path.name for path in place.iterdir()) == sorted([mine.name, other.name])
    assert (other / "file").exists()


CRASH = """
import asyncio, os, signal, sys
from union import sandbox as sb
async def main():
    session = await sb.on_device.session(backend=sys.argv[1]).open()
    await session.exec("touch file; chmod 0 .")
    print(session.work_dir, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.threat(133)
@pytest.mark.parametrize("backend", [*ISOLATED, pytest.param("none", marks=pytest.mark.bare)])
def test_the_work_dir_of_a_killed_process_is_removed_by_the_next(
    backend: str, tmp_path: Path
) -> None:
    preferred = (
        f"from union.sandbox.on_device import _workdir; _workdir._PREFERRED = {str(tmp_path)!r}"
    )
    argv = [sys.executable, "-W", "ignore", "-c", preferred + CRASH, backend]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert Path(done.stdout.strip()).parent == tmp_path
    assert len(list(tmp_path.iterdir())) == 2, "the directory and its marker"
    open_elsewhere("userns", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.threat(148)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_left_overs_are_removed_beside_the_loop(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal that never ends delays neither the opening of a session, nor its commands."""
    monkeypatch.setattr(_workdir, "_PREFERRED", str(tmp_path))
    path = left_over(tmp_path)
    entered, go, where = threading.Event(), threading.Event(), []
    remove_tree = owned_dir.remove_tree

    def slow(target: str) -> None:
        if target == str(path):
            where.append(threading.current_thread())
            entered.set()
            assert go.wait(60)
        remove_tree(target)

    monkeypatch.setattr(owned_dir, "remove_tree", slow)
    try:
        async with asyncio.timeout(30):
            async with session_of(backend) as session:
                assert await asyncio.to_thread(entered.wait, 20), "the control: it is at work"
                assert (await session.exec("echo works")).stdout == "works\n"
                await session.put_bytes("file", b"x")
            # Closing removes a directory too: the sweep has not taken every thread for that.
        assert path.exists()
        assert where[0] is not threading.main_thread()
    finally:
        go.set()
    assert await asyncio.to_thread(eventually, lambda: not path.exists())


@pytest.mark.threat(149)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_session_with_slow_files_leaves_threads_to_the_others(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with session_of(backend) as slow, session_of(backend) as other:
        tree = slow._transport._opened().work.tree  # type: ignore[union-attr]
        go, entered = threading.Event(), threading.Semaphore(0)

        def stuck(*_: object, **__: object) -> int:
            entered.release()
            assert go.wait(60)
            return 0

        monkeypatch.setattr(tree, "put", stuck)
        calls = [asyncio.create_task(slow.put_bytes("x", b"x")) for _ in range(100)]
        try:
            for _ in range(4):
                assert await asyncio.to_thread(entered.acquire, timeout=20)
            async with asyncio.timeout(30):
                await other.put_bytes("y", b"y")
                assert await other.get_bytes("y") == b"y"
                assert (await other.exec("cat y")).stdout == "y"
                async with session_of(backend) as third:
                    await third.exec("true")
            assert not any(call.done() for call in calls), "the control: they hold their threads"
        finally:
            go.set()
        await asyncio.gather(*calls)


@pytest.mark.threat(148)
async def test_a_close_without_threads_reports_it_and_leaves_the_rest_to_a_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = await session_of("userns").open()
    path = session.work_dir

    def refuse(*_: object) -> None:
        raise threads.PoolFullError("removal: no thread can be started")

    with monkeypatch.context() as patched:
        patched.setattr(threads.removal, "start", refuse)
        with pytest.raises(OSError, match="no thread can be started"):
            await session.close()
    assert os.path.isdir(path)
    sweep(os.path.dirname(path))
    assert not os.path.exists(path)


CLIENT = """
import asyncio, sys
from union import sandbox as sb
async def main():
    session = sb.remote.session(endpoint=sys.argv[1], token=sys.argv[2], lazy=False)
    await session.open()
    await session.put_bytes("file", b"x")
    print("open", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


@pytest.mark.threat(170)
@pytest.mark.parametrize("backend", ISOLATED)
def test_a_restarted_server_removes_the_work_dirs_of_the_one_that_crashed(backend: str) -> None:
    with ServerProcess("--backend", backend) as first:
        assert first.token is not None
        argv = [sys.executable, "-c", CLIENT, first.endpoint, first.token]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"open\n"
            kept = first.work_dir / "sandbox-of-the-operator"
            kept.mkdir()
            for process in (first.process, client):
                process.kill()
                process.wait(20)
        assert len(list(first.work_dir.iterdir())) == 3, "the control: it was left"
        with ServerProcess("--backend", backend, "--work-dir", str(first.work_dir)):
            # No session was opened on it.
            assert eventually(lambda: list(first.work_dir.iterdir()) == [kept], within_s=20)
