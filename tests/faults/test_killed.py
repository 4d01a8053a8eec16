"""One process of the product is killed or stopped, by what it is; the soak kills at random."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scripts.soaking.kills import targets_below
from scripts.soaking.state import descendants, groups_of, left_by, started_at
from tests.conftest import ISOLATED, eventually, session_of
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._linux import cgroup
from union.sandbox._linux import channel as channels
from union.sandbox._linux.launcher import Launcher
from union.sandbox.on_device import _probe, _sandboxes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.spec("D8", "G4")

ROOT = Path(__file__).resolve().parents[2]
NO_GROUPS = (
    "no control group can be made here: run as root on a machine, or in a container whose "
    "/sys/fs/cgroup is writable (docker run --privileged --cgroupns=private)"
)


async def works(session: sb.Session) -> bool:
    async with asyncio.timeout(30):
        result = await session.exec("echo fine; exit 3")
        return (result.returncode, result.stdout) == (3, "fine\n")


def require_sight_of(backend: str) -> None:
    """Skip where the roles of its processes cannot be seen."""
    if backend == "bubblewrap" and os.geteuid() != 0:
        pytest.skip("only root may see what the processes that bubblewrap makes execute")


async def find(role: str) -> int:
    """A process of this kind below our launcher, as soon as there is one."""
    return (await find_all(role))[0]


async def find_all(role: str) -> list[int]:
    """Every process of this kind below our launcher, as soon as there is one."""
    for _ in range(500):
        if found := targets_below(Launcher.current().pid).get(role):
            return sorted(found)
        await asyncio.sleep(0.01)
    raise AssertionError(f"no {role} to be seen")


def outlived_by(below: dict[int, str | None]) -> list[int]:
    """Which of these processes still run."""
    return [pid for pid, started in below.items() if started and started_at(pid) == started]


@pytest.fixture
async def bystander() -> AsyncIterator[sb.SandboxProcess]:
    async with session_of("userns", warm=0) as session:
        proc = await session.run("cat", stdin=sb.PIPE, stdout=True)
        proc.stdin.write(b"here\n")  # type: ignore[union-attr]
        assert await anext(proc.iter_stdout_lines()) == "here"
        yield proc


async def is_unharmed(proc: sb.SandboxProcess) -> bool:
    out, _ = await proc.communicate(b"still\n")
    return (proc.returncode, out) == (0, b"still\n")


@pytest.mark.parametrize("backend", ISOLATED)
async def test_first_process_killed(backend: str, bystander: sb.SandboxProcess) -> None:
    require_sight_of(backend)
    async with session_of(backend, warm=0) as session:
        mine = set(targets_below(Launcher.current().pid)["first process"])
        proc = await session.run("sleep 60 & setsid sleep 60 & wait", stdout=True)
        for _ in range(500):
            if new := set(targets_below(Launcher.current().pid)["first process"]) - mine:
                break
            await asyncio.sleep(0.01)
        os.kill(max(new), signal.SIGKILL)
        with pytest.raises(sb.SandboxExecutionError, match="without reporting how") as caught:
            await proc.wait()
        assert (caught.value.returncode, proc.returncode) == (-1, None)
        assert await works(session)
        assert await is_unharmed(bystander)


async def test_bwrap_killed(bystander: sb.SandboxProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where nothing can be shared, a bwrap stays for as long as its sandbox.
    monkeypatch.setitem(_probe._known, "bubblewrap", _probe.HostFeatures(share=False))
    async with session_of("bubblewrap", warm=0) as session:
        proc = await session.run("sleep 60", stdout=True)
        os.kill(await bwrap_around("sleep"), signal.SIGKILL)
        with pytest.raises(sb.SandboxExecutionError):
            await proc.wait()
        assert proc.returncode is None
        assert await works(session)
        assert await is_unharmed(bystander)


async def bwrap_around(program: str) -> int:
    """The bwrap whose sandbox runs this, not one of a sandbox that was only tried out."""
    async with asyncio.timeout(40):
        while True:
            for pid in targets_below(Launcher.current().pid).get("bwrap", ()):
                if program in {name_of(below) for below in descendants(pid)}:
                    return pid
            await asyncio.sleep(0.01)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # gone meanwhile
        return ""


@pytest.mark.parametrize("which", ["all of it", "the one that waits", "the first"])
async def test_spare_killed_while_it_waits(which: str, bystander: sb.SandboxProcess) -> None:
    async with session_of("userns") as session:
        assert await works(session)
        spares = await find_all("spare")
        for pid in {"all of it": spares, "the first": spares[:1]}.get(which, spares[-1:]):
            with contextlib.suppress(ProcessLookupError):  # one takes the other along
                os.kill(pid, signal.SIGKILL)
        # At once, and again: never an exit code that no command had.
        for _ in range(3):
            try:
                assert await works(session)
            except sb.SandboxExecutionError as exc:
                assert exc.stage in {"spawn", "stream"}  # noqa: PT017 - it may also have worked
        assert await works(session)
        assert await is_unharmed(bystander)


async def test_the_process_that_would_have_been_the_command_is_killed(
    bystander: sb.SandboxProcess,
) -> None:
    """Stopped first, so that the command is certainly handed over before it dies."""
    async with session_of("userns", warm=1) as session:
        assert await works(session)
        await find("spare")
        await asyncio.sleep(0.05)
        waiting = max(targets_below(Launcher.current().pid)["spare"])
        os.kill(waiting, signal.SIGSTOP)
        proc = await session.run("true", stdout=True)
        os.kill(waiting, signal.SIGKILL)
        with pytest.raises(sb.SandboxExecutionError, match="request") as caught:
            await proc.wait()
        assert (proc.returncode, caught.value.stage) == (None, "spawn")
        assert await works(session)
        assert await is_unharmed(bystander)


async def test_waiting_python_killed(bystander: sb.SandboxProcess) -> None:
    async with session_of("userns") as session:
        for _ in range(3):
            assert await session.run_code("print(1)") == "1\n"
            os.kill(await find("waiting python"), signal.SIGKILL)
            await asyncio.sleep(0.1)  # a signal takes a moment
        assert await session.run_code("print(2)") == "2\n"
        assert await is_unharmed(bystander)


@pytest.mark.parametrize("backend", ISOLATED)
async def test_launcher_killed(backend: str) -> None:
    resources = sb.Resources(memory="64Mi")
    async with session_of(backend, resources=resources) as session, session_of("userns") as other:
        assert await works(session)
        assert await works(other)
        proc = await session.run("sleep 60 & setsid sleep 60 & wait", stdout=True)
        below = {pid: started_at(pid) for pid in descendants(Launcher.current().pid)}
        os.kill(Launcher.current().pid, signal.SIGKILL)
        with pytest.raises(sb.SandboxExecutionError) as caught:
            await proc.wait()
        assert (caught.value.returncode, proc.returncode) == (-1, None)
        async with asyncio.timeout(40):
            while outlived_by(below):  # one that was half made ends when our loop lets it go
                await asyncio.sleep(0.01)
        assert await works(session)
        assert await works(other)
    assert left_by(os.getpid()) == []


@pytest.mark.parametrize("backend", ISOLATED)
async def test_close_after_the_connection_to_a_killed_launcher_was_replaced(backend: str) -> None:
    """A run of the old connection is still there, and is ended on a socket that is closed."""
    session = await session_of(backend).open()
    proc = await session.run("sleep 60", background=True)
    transport = session._transport
    os.kill(Launcher.current().pid, signal.SIGKILL)
    # Without a turn of the loop, in which the run itself would notice.
    before = transport.pool.opened_channel
    assert eventually(lambda: not before.is_usable)
    assert transport.pool.channel() is not before
    async with asyncio.timeout(40):
        await session.close()
    assert proc.termination_reason in {"closed", "stream", "spawn-failed"}
    assert left_by(os.getpid()) == []


@pytest.mark.parametrize("backend", ISOLATED)
async def test_close_after_the_launcher_was_killed(backend: str) -> None:
    """Nothing has noticed yet when the session is closed, and a sandbox may be half made."""
    for wait in range(20):
        session = await session_of(backend, resources=sb.Resources(memory="64Mi")).open()
        proc = await session.run("sleep 60", background=True)
        await asyncio.sleep(wait % 7 / 2000)
        os.kill(Launcher.current().pid, signal.SIGKILL)
        async with asyncio.timeout(40):
            await session.close()
        assert proc.returncode in {None, 137}
        assert proc.termination_reason in {"closed", "stream", "spawn-failed"}
        assert left_by(os.getpid()) == []


@pytest.mark.spec("B2")
async def test_close_says_what_it_could_not_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in the group that no kill of ours reaches; another program may put one there."""
    if cgroup.hierarchy() is None:
        pytest.skip(NO_GROUPS)
    monkeypatch.setattr(_sandboxes, "_REMOVAL_TIMEOUT_S", 0.2)
    session = await session_of("userns", resources=sb.Resources(memory="64Mi"), warm=0).open()
    work_dir = session.work_dir
    await session.run("sleep 60", background=True)
    (group, *_) = left_groups = groups_of(os.getpid())
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        for place in left_groups:
            Path(place, "cgroup.procs").write_text(str(stranger.pid))
        with pytest.raises(sb.SandboxExecutionError, match=group) as caught:
            await session.close()
        assert (caught.value.code, bool(caught.value.hint)) == ("close-incomplete", True)
        assert not os.path.exists(work_dir), "what could be removed is"
    finally:
        stranger.kill()
        stranger.wait()
    async with asyncio.timeout(40):
        while left_by(os.getpid()):  # it is still being tried
            await asyncio.sleep(0.02)


async def test_open_while_the_launcher_is_killed() -> None:
    async with session_of("userns", warm=0) as session:
        assert await works(session)
        errors = []
        for wait in range(12):
            another = session_of("userns", warm=0)
            opening = asyncio.create_task(another.open())
            await asyncio.sleep(wait / 1000)
            os.kill(Launcher.current().pid, signal.SIGKILL)
            try:
                async with asyncio.timeout(40):
                    await opening
                    assert await works(another)
            except sb.SandboxExecutionError as exc:
                errors.append(str(exc))
            finally:
                await another.close()
        assert all("killed" in text or "ended" in text for text in errors), errors
        assert await works(session)


async def test_stopped_launcher_is_replaced_when_a_session_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "_CONFIRM_S", 0.5)
    session = await session_of("userns").open()
    proc = await session.run("sleep 60", stdout=True)
    pid = Launcher.current().pid
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(40):
        await session.close()
    assert (proc.termination_reason, proc.returncode) == ("closed", 137)
    assert started_at(pid) is None
    async with session_of("userns") as session:
        assert await works(session)


async def test_stopped_launcher_does_not_mix_up_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with session_of("userns"):
        launcher = Launcher.current()
        launcher._control.settimeout(0.3)
        os.kill(launcher.pid, signal.SIGSTOP)
        with pytest.raises(OSError, match="does not reply"):
            launcher.userns(inside=(5, 5), outside=(6, 6))
        assert not launcher.is_usable(), "a late reply would answer no request"
    async with session_of("userns") as session:
        assert await works(session)


@pytest.mark.parametrize("backend", ISOLATED)
async def test_stopped_first_process_obeys_the_time_limit(backend: str) -> None:
    require_sight_of(backend)
    async with session_of(backend, warm=0) as session:
        proc = await session.run("sleep 60", stdout=True, timeout_s=0.5)
        os.kill(await find("first process"), signal.SIGSTOP)
        async with asyncio.timeout(40):
            await proc.wait()
        assert (proc.returncode, proc.termination_reason) == (137, "timeout")
        assert await works(session)


# Whole programs.


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
async def test_server_killed(sig: signal.Signals) -> None:
    with ServerProcess("--backend", "userns", "--grace", "2") as server:
        session = sb.remote.session(
            endpoint=server.endpoint, token=server.token, lazy=False, connect_timeout_s=3
        )
        await session.open()
        assert await works(session)
        proc = await session.run("sleep 60", stdout=True)
        below = {pid: started_at(pid) for pid in descendants(server.pid)}
        os.kill(server.pid, sig)
        if sig == signal.SIGSTOP:
            await asyncio.sleep(0.5)
            os.kill(server.pid, signal.SIGCONT)
            assert await works(session), "a pause is no loss"
            os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(sb.SandboxExecutionError) as caught:
                await proc.wait()
        assert (caught.value.stage, proc.returncode) == ("transport", None)
        with pytest.raises(sb.SandboxError):
            await session.exec("true")
        await session.close()
        assert eventually(lambda: not outlived_by(below))


@pytest.mark.timeout(120)
async def test_server_killed_between_an_exit_and_the_end_of_its_output() -> None:
    """The exit overtakes output that waits for its reader; lost output is reported."""
    with ServerProcess("--backend", "userns", "--grace", "2") as server:
        session = sb.remote.session(endpoint=server.endpoint, token=server.token, lazy=False)
        await session.open()
        proc = await session.run("head -c 3000000 /dev/zero", stdout=True)
        for _ in range(500):
            if proc.returncode is not None:
                break
            await asyncio.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
        size = 0
        async with asyncio.timeout(60):
            try:
                async for chunk in proc.iter_stdout():
                    size += len(chunk)
            except sb.SandboxExecutionError as exc:
                assert exc.stage == "transport"  # noqa: PT017 - it may also have come whole
            else:
                assert size == 3_000_000
        await session.close()


async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_host_program_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves listeners, holds groups, and is the client of a server."""
    server = await asyncio.start_server(service, "127.0.0.1", 0)
    port = str(server.sockets[0].getsockname()[1])
    with ServerProcess("--backend", "userns", "--grace", "1") as remote:
        argv = [sys.executable, "-m", "scripts.soaking.victim", remote.endpoint, remote.token, port]
        program = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT)  # type: ignore[arg-type]
        assert program.stdout is not None
        assert await asyncio.to_thread(program.stdout.readline) == b"ready\n"
        below = {pid: started_at(pid) for pid in descendants(program.pid)}
        assert len(below) > 5
        program.kill()
        program.communicate()
        assert eventually(lambda: not outlived_by(below), within_s=10)
        gone = lambda: json.loads(remote.request("GET", "/v1/sessions")[1])["sessions"] == []  # noqa: E731
        assert eventually(gone, within_s=10), "the server has missed its client"
    server.close()
    await server.wait_closed()
    # What only a living program can remove, the next one does: work dirs at its first session,
    # groups at its first limit, but none that are new.
    monkeypatch.setattr(cgroup, "_SWEEP_AFTER_S", 0.0)
    found = cgroup.hierarchy()
    for place in {place for _, place in found.places} if found else ():
        cgroup.sweep(place)
    done = subprocess.run([sys.executable, "-c", OPEN], check=True, capture_output=True, timeout=60)
    assert done.stderr == b""
    assert left_by(program.pid) == []


OPEN = """
import asyncio
from union import sandbox as sb
from union.sandbox._session import threads
async def main():
    async with sb.on_device.session(backend="userns"):
        while threads.removal._running:  # the sweep goes on beside the session
            await asyncio.sleep(0.01)
asyncio.run(main())
"""


@pytest.mark.needs_root
def test_sweep_takes_only_groups_of_the_dead() -> None:
    found = cgroup.hierarchy()
    if os.geteuid() != 0 or found is None:
        pytest.skip(NO_GROUPS)
    place = Path(found.places[0][1])
    ended = subprocess.Popen(["true"])
    ended.wait()
    names: dict[str, Any] = {
        f"sandbox-{ended.pid}-1": False,
        f"sandbox-{os.getpid()}-of-a-living": True,
        f"sandboxes-{ended.pid}-1": True,
        f"other-{ended.pid}-1": True,
    }
    for name in names:
        (place / name).mkdir()
    try:
        cgroup.sweep(str(place))
        assert (place / f"sandbox-{ended.pid}-1").exists(), "it is new"
        time.sleep(0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cgroup, "_SWEEP_AFTER_S", 0.0)
            cgroup.sweep(str(place))
        assert {name: (place / name).exists() for name in names} == names
    finally:
        for name in names:
            if (place / name).exists():
                (place / name).rmdir()
