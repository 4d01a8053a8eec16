"""Kill -9 of the host or of the launcher at each step of a checkpoint, a rollback and a fork."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.checkpoints.killed_host import FILES, start_of
from tests.checkpoints.steps import SENT, Steps
from tests.conftest import ISOLATED, eventually, session_of
from tests.faults.strace import Strace

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher
from union.sandbox.on_device import _workdir
from union.sandbox.on_device._bring_up import Postures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
SWEEP_S = 180.0


@pytest.fixture
def place(outside_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The directory of private work dirs, which no other process sweeps; empty in the end."""
    found = outside_tmp / "place"
    found.mkdir()
    monkeypatch.setattr(_workdir, "_PREFERRED", str(found))
    yield str(found)
    assert eventually(lambda: not os.listdir(found))


def killed_hosts(*arguments: str) -> list[dict[str, Any]]:
    """Run hosts that are killed at each step; return their reports. The last one is not killed."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.checkpoints.killed_host", *arguments],
        capture_output=True,
        check=False,
        timeout=300,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    *killed, last = map(json.loads, ran.stdout.splitlines())
    assert {one["status"] for one in killed} == {-signal.SIGKILL}
    assert (last["status"], last["done"][-1]) == (0, "drop"), ran.stderr.decode()
    return [*killed, last]


def left_by(reports: list[dict[str, Any]]) -> set[str]:
    """Return what is left of killed hosts: directories, and launchers that still run.

    Names and start times tell it from what later processes with the same ids have there.
    """
    names = set(os.listdir(reports[0]["place"]))
    running = {
        f"launcher {one['launcher'][0]}"
        for one in reports
        if start_of(one["launcher"][0]) == one["launcher"][1]
    }
    return running.union(*(names.intersection(one["left"]) for one in reports))


def check_removed(reports: list[dict[str, Any]]) -> None:
    """Check that an open session removes what hundreds of killed hosts have left.

    The disk decides how long that takes. It is seldom asked for, since each time takes a share of
    the interpreter from the thread that removes.
    """
    assert eventually(lambda: not left_by(reports), within_s=SWEEP_S, every_s=0.5), left_by(reports)


@pytest.mark.spec("L1", "L2")
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_host_that_is_killed_at_any_step_leaves_nothing(
    backend: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with session_of(backend) as bystander:
        await bystander.put_bytes("a", b"1")
        kept = await bystander.checkpoint()
        await bystander.put_bytes("a", b"2")
        reports = await asyncio.to_thread(killed_hosts, "private", backend, place)
        # Each call was interrupted at several steps, and left something.
        for done in ("checkpoint", "rollback", "fork", "adopt"):
            assert sum(one["done"][-1:] == [done] for one in reports) > 3, done
        assert all(one["left"] for one in reports[:-1])
        assert not reports[-1]["left"]
        # The next session that opens in another process removes it, and nothing of this one.
        monkeypatch.setattr(_workdir, "_swept", set())
        async with session_of(backend):
            await asyncio.to_thread(check_removed, reports)
        await bystander.rollback(kept)
        assert await bystander.get_bytes("a") == b"1"


@pytest.mark.spec("L1", "L2")
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_host_that_is_killed_during_a_merge_leaves_nothing(
    backend: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = await asyncio.to_thread(killed_hosts, "merged", backend, place)
    # After the checkpoint, only the merge has steps; it has made directories, files and links.
    assert sum(one["done"] == ["checkpoint"] for one in reports) > 10
    assert not reports[-1]["left"]
    monkeypatch.setattr(_workdir, "_swept", set())
    async with session_of(backend):
        await asyncio.to_thread(check_removed, reports)


@pytest.mark.spec("L1", "L2")
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_host_that_is_killed_at_any_step_loses_no_file_of_the_caller(
    backend: str, place: str, outside_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned work dir keeps each file, as it is or as it was at the checkpoint."""
    top = outside_tmp / "pinned"
    top.mkdir()
    reports = await asyncio.to_thread(killed_hosts, "pinned", backend, place, str(top))
    before = [one for one in reports if not one["done"]]
    during = [one for one in reports if one["done"] == ["checkpoint"]]
    after = [one for one in reports if "rollback" in one["done"]]
    assert min(len(before), len(during), len(after)) > 5
    for one in (*before, *after):
        assert one["found"] == FILES, one
    for one in during:
        found = {name: text for name, text in one["found"].items() if ".put-" not in name}
        assert found.pop("a") in {"1", "other"}, one
        assert found.pop("d/b", "2") == "2", one
        assert found.pop("e/f", "new") == "new", one
        assert not found
    assert {one["found"]["a"] for one in during} == {"1", "other"}
    monkeypatch.setattr(_workdir, "_swept", set())
    async with session_of(backend):
        await asyncio.to_thread(check_removed, reports)


# The launcher, at each step of this process.


def _kill_launcher() -> None:
    launcher = Launcher._current
    if launcher is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def steps() -> Iterator[Steps]:
    counted = Steps(_kill_launcher)
    counted.install()
    yield counted
    counted.disarm()


async def _checkpoint(session: sb.Session, _: sb.Checkpoint) -> None:
    made = await session.checkpoint()
    await made.drop()


async def _rollback(session: sb.Session, kept: sb.Checkpoint) -> None:
    await session.rollback(kept)


async def _fork(_: sb.Session, kept: sb.Checkpoint) -> None:
    async with kept.fork() as other:
        assert await other.get_bytes("a") == b"1"


CALLS: dict[str, Callable[[sb.Session, sb.Checkpoint], Any]] = {
    "checkpoint": _checkpoint,
    "rollback": _rollback,
    "fork": _fork,
}
MAX_STEPS = 100


@pytest.mark.spec("L1", "L2")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_launcher_that_is_killed_at_any_step_loses_nothing(
    backend: str, name: str, steps: Steps
) -> None:
    call = CALLS[name]
    async with session_of(backend, warm=0) as session:
        await session.put_bytes("a", b"1")
        kept = await session.checkpoint("kept")
        failed = 0
        for at in range(1, MAX_STEPS):
            await session.put_bytes("b", b"2")
            steps.arm(at)
            try:
                await call(session, kept)
            except sb.SandboxError as error:
                assert "launcher" in str(error), (at, steps.seen)  # noqa: PT017 - it may succeed
                failed += 1
            finally:
                steps.disarm()
            if not steps.has_acted:
                break
            await _check_whole(session, kept, runs=at % 5 == 0)
        # Every step was met: the last attempt had fewer than the number of the next one.
        assert 5 < at < MAX_STEPS - 1
        assert SENT in steps.seen
        assert failed > 1
        await _check_whole(session, kept, runs=True)
        assert [info.name for info in await session.checkpoints()] == ["kept"]
        # The checkpoint itself, its writable layer and no other is left.
        store = session._transport.checkpoint_calls._state.store()
        await asyncio.gather(*session._transport.checkpoint_calls._state.removals)
        assert len([found for found in os.listdir(store.path) if found.isdigit()]) == 1


@pytest.mark.spec("L1")
async def test_a_fork_that_does_not_open_holds_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise sb.BackendUnavailableError("refused", backend="userns", missing=("test",))

    async with session_of("userns", warm=0) as session:
        await session.put_bytes("a", b"1")
        kept = await session.checkpoint()
        store = session._transport.checkpoint_calls._state.store().path
        plain = session._transport.work.source
        with monkeypatch.context() as patched:
            patched.setattr(Postures, "probe", refuse)
            with pytest.raises(sb.BackendUnavailableError, match="refused"):
                await kept.fork().open()
        await _check_whole(session, kept, runs=True)
        assert os.path.isdir(store)
        assert os.path.isdir(plain)
    assert not os.path.exists(store)
    assert not os.path.exists(plain)


async def _check_whole(session: sb.Session, kept: sb.Checkpoint, *, runs: bool) -> None:
    """Return to the checkpoint, which is there as it was, for this session and for forks."""
    try:
        await session.rollback(kept)
    except sb.SandboxExecutionError as error:
        assert "launcher" in str(error)  # noqa: PT017 - it may also succeed
        await session.rollback(kept)
    assert await session.get_bytes("a") == b"1"
    assert [info.path for info in await session.list_dir(".")] == ["a"]
    if runs:
        assert (await session.exec("cat a; ls", check=True)).stdout == "1a\n"
        async with kept.fork() as other:
            assert (await other.exec("cat a", check=True)).stdout == "1"
        await session.rollback(kept)


# The process of the launcher that mounts layers, at each of its own steps.

CHANGES = (
    "chdir", "clone", "fsconfig", "fsmount", "fsopen", "mkdir", "mount", "mount_setattr",
    "move_mount", "open_tree", "pivot_root", "sendmsg", "setns", "umount2", "unshare",
)  # fmt: skip


@pytest.mark.spec("L1", "L2")
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_mount_that_is_killed_at_any_step_loses_nothing(
    backend: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with session_of(backend, warm=0) as session:
        await session.put_bytes("a", b"1")
        kept = await session.checkpoint("kept")
        with Strace(Launcher.current().pid, log, f"trace={','.join(CHANGES)}") as strace:
            await session.rollback(kept)
        counts = strace.most_calls()
        assert {"fsconfig", "fsmount", "move_mount", "open_tree"} <= counts.keys(), counts
        failed = 0
        for call, count in counts.items():
            for at in range(1, count + 1):
                await session.put_bytes("b", b"2")
                inject = f"trace={call}", f"inject={call}:signal=KILL:when={at}"
                with Strace(Launcher.current().pid, log, *inject):
                    try:
                        await session.rollback(kept)
                    except sb.SandboxExecutionError:
                        failed += 1
                await _check_whole(session, kept, runs=False)
        assert failed >= len(counts)
        await _check_whole(session, kept, runs=True)
