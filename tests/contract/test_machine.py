"""A session with ``persist="machine"``: scratch files and processes stay between commands."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S, session_of
from tests.network.conftest import PUBLIC, Dialled

from union import sandbox as sb
from union.sandbox._core.resolve import resolve_run
from union.sandbox._linux import cgroup
from union.sandbox._net import dialer
from union.sandbox._session.sink import ProcessSink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.spec("R1")
MACHINES = ("userns", "bubblewrap", "remote-userns")


@pytest.fixture(params=MACHINES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def machine(kind: str) -> AsyncIterator[sb.Session]:
    async with session_of(kind, persist="machine") as session:
        yield session


async def line_of(process: sb.SandboxProcess) -> str:
    """The first line of a piped command."""
    async with asyncio.timeout(SOON_S):
        async for line in process.iter_stdout_lines():
            return line
    raise AssertionError("the command wrote no line")


async def gone(machine: sb.Session, pid: int) -> bool:
    """Whether a process ends soon."""
    end = time.monotonic() + SOON_S
    while any(info.pid == pid for info in await machine.processes()):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


async def test_scratch_files_stay(machine: sb.Session) -> None:
    script = "for d in /tmp /var/tmp /dev/shm $HOME; do echo $d > $d/kept; done"
    assert (await machine.exec(script)).ok
    read = "for d in /tmp /var/tmp /dev/shm $HOME; do cat $d/kept; done"
    kept = ["/tmp", "/var/tmp", "/dev/shm", machine.work_dir]
    assert (await machine.exec(read)).stdout.split() == kept
    assert machine.isolation.persist == "machine"
    assert {"/tmp", "/var/tmp", "/dev/shm"} <= set(machine.fs_allowlist()["read_write"])


async def test_the_default_keeps_the_work_dir_alone(kind: str) -> None:
    async with session_of(kind) as session:
        assert session.isolation.persist == "workdir"
        await session.exec("echo x > /tmp/kept")
        assert not (await session.exec("cat /tmp/kept")).ok
        with pytest.raises(sb.SandboxUsageError, match="end with it"):
            await session.processes()


async def test_pids_do_not_repeat(machine: sb.Session) -> None:
    seen = [int((await machine.exec("echo $$")).stdout) for _ in range(6)]
    assert len(set(seen)) == len(seen)
    process = await machine.run("echo $$; read x", stdin=sb.PIPE, stdout=sb.PIPE)
    assert process.pid == int(await line_of(process))
    process.kill()
    await process.wait()
    ended = await machine.run("true")
    assert ended.pid not in {None, process.pid, *seen}


async def test_a_child_that_is_left_behind_goes_on(machine: sb.Session) -> None:
    """It does not hold up the result, and its later output does not end it."""
    script = "(while echo alive; do sleep 0.02; date > /tmp/beat; done) & echo $!"
    left = await machine.exec(script, timeout_s=10 * SOON_S)
    assert left.termination_reason == ""
    pid = int(next(line for line in left.stdout.split() if line.isdecimal()))
    waits = "rm -f /tmp/beat; while ! [ -e /tmp/beat ]; do sleep 0.01; done; echo seen"
    assert (await machine.exec(waits, timeout_s=SOON_S)).stdout == "seen\n"
    assert (await machine.exec(f"kill -0 {pid} && cat /proc/{pid}/stat")).ok
    [info] = [info for info in await machine.processes() if info.pid == pid]
    assert info.left_behind
    assert info.parent == 1
    assert abs(info.started_at - time.time()) < 10 * SOON_S
    assert info.memory_bytes > 0
    assert info.cpu_s >= 0
    assert "alive" in " ".join(info.command)
    assert (await machine.exec(f"kill -9 {pid}")).ok, "a later command may end it"
    assert await gone(machine, pid)


async def test_processes_are_listed_and_stopped(machine: sb.Session) -> None:
    process = await machine.run("trap '' TERM; echo; while :; do sleep 1; done", stdout=sb.PIPE)
    await line_of(process)
    assert process.pid is not None
    found = {info.pid: info for info in await machine.processes()}
    assert process.pid in found
    assert not found[process.pid].left_behind
    assert found[process.pid].parent == 0
    assert 1 not in found, "the product's own processes are not listed"
    assert all(info.name != "sandbox" for info in found.values())
    assert await machine.stop_process(process.pid)
    assert await process.wait() == 128 + signal.SIGKILL
    assert not await machine.stop_process(process.pid)
    for wrong in (0, 1, -1, True, "2"):
        with pytest.raises(sb.SandboxUsageError, match="pid"):
            await machine.stop_process(wrong)  # type: ignore[arg-type]


async def test_a_timeout_ends_all_that_the_command_started(machine: sb.Session) -> None:
    """Neither setsid nor a double fork nor an ignored SIGTERM escapes; other commands go on."""
    other = int((await machine.exec("sleep 600 & echo $!")).stdout)
    script = (
        "trap '' TERM; setsid sh -c 'trap \"\" TERM; (sleep 600 & echo $! > /tmp/away); "
        "sleep 600' & while ! [ -s /tmp/away ]; do sleep 0.01; done; echo ready; sleep 600"
    )
    result = await machine.exec(script, timeout_s=3)
    assert result.termination_reason == "timeout"
    assert [info.pid for info in await machine.processes()] == [other]
    assert (await machine.exec("echo usable")).ok


async def test_killing_a_handle_ends_its_whole_tree(machine: sb.Session) -> None:
    process = await machine.run("setsid sleep 600 & echo $!; wait", stdout=sb.PIPE)
    child = int(await line_of(process))
    process.kill()
    assert await process.wait() == 128 + signal.SIGKILL
    assert child not in {info.pid for info in await machine.processes()}


async def test_cancelling_ends_the_tree(machine: sb.Session) -> None:
    task = asyncio.create_task(machine.exec("(setsid sleep 600 &) ; echo > /tmp/on; sleep 600"))
    waits = "while ! [ -e /tmp/on ]; do sleep 0.01; done"
    assert (await machine.exec(waits, timeout_s=SOON_S)).ok
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    end = time.monotonic() + SOON_S
    while await machine.processes():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_cancelling_while_a_sandbox_is_made_leaves_nothing() -> None:
    async with session_of("userns", persist="machine") as session:
        for turn in range(24):
            task = asyncio.create_task(session.exec("sleep 600; true"))
            await asyncio.sleep(0.001 * (turn % 6))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        end = time.monotonic() + SOON_S
        while await session.processes():
            assert time.monotonic() < end
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("backend", ["userns", "bubblewrap"])
async def test_a_command_that_begins_is_not_killed_with_another(backend: str) -> None:
    """Also between its request and its exec, where its namespaces cannot be inspected."""
    async with session_of(backend, persist="machine") as session:

        async def begin_all() -> list[int | None]:
            return [(await session.exec("true")).returncode for _ in range(100)]

        begun = asyncio.create_task(begin_all())
        while not begun.done():
            victim = await session.run("sleep 600", background=True)
            victim.kill()
            assert await victim.wait() == 137
        assert await begun == [0] * 100


@pytest.mark.parametrize("backend", ["userns", "bubblewrap"])
async def test_a_context_ends_with_its_processes(backend: str) -> None:
    async with session_of(backend, persist="machine") as session:
        async with session.context() as context:
            left = "import subprocess; _ = subprocess.Popen(['setsid', 'sleep', '600'])"
            assert (await context.run(left)).error is None
            assert len(await session.processes()) >= 2
        assert await session.processes() == ()


async def test_zombies_are_reaped(machine: sb.Session) -> None:
    await machine.exec("for i in 1 2 3 4 5; do (true &) ; done")
    counts = "while grep -qs '^State:.Z' /proc/[0-9]*/status; do sleep 0.01; done"
    assert (await machine.exec(counts, timeout_s=SOON_S)).ok


async def test_killing_everything_inside_harms_no_later_command(machine: sb.Session) -> None:
    """Also of sandboxes that were prepared for the next commands, and stopped ones."""
    for signum in ("KILL", "STOP"):
        await machine.exec(f"kill -{signum} -1; true", timeout_s=SOON_S)
        for _ in range(6):
            assert (await machine.exec("echo on", timeout_s=SOON_S)).stdout == "on\n"


async def test_close_ends_everything(tmp_path: Path) -> None:
    beat = "while :; do date +%s%N > beat; sleep 0.02; done"
    async with session_of("userns", persist="machine", host_work_dir=str(tmp_path)) as session:
        await session.exec(f"(setsid sh -c '{beat}' &) ; while ! [ -s beat ]; do sleep 0.01; done")
    before = (tmp_path / "beat").read_text()
    await asyncio.sleep(0.2)
    assert (tmp_path / "beat").read_text() == before


async def test_scratch_is_limited_over_the_whole_session() -> None:
    resources = sb.Resources(tmp="1Mi")
    async with session_of("userns", persist="machine", resources=resources) as session:
        write = "head -c 700000 /dev/zero > /tmp/{}"
        assert (await session.exec(write.format("a"))).ok
        assert not (await session.exec(write.format("b"))).ok


async def test_the_work_dir_stays_in_its_place(tmp_path: Path) -> None:
    """A directory above it in /tmp is scratch, but cannot be renamed."""
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("the test directories are not below /tmp")
    async with session_of("userns", persist="machine", host_work_dir=str(tmp_path)) as session:
        assert not (await session.exec(f"mv {tmp_path.parent} /tmp/away")).ok
        assert not (await session.exec(f"mv {tmp_path} /tmp/away")).ok
        assert (await session.exec("pwd")).stdout.strip() == str(tmp_path)


@pytest.fixture
def greeter() -> Iterator[int]:
    """A TCP server on the loopback of the host that greets each connection; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            peer.sendall(b"hello\n")
            peer.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


DIAL = """
import socket
try:
    reply = socket.create_connection(("{address}", {port}), 5).recv(100).decode().strip()
except OSError as exc:
    reply = type(exc).__name__
"""
WAITER = """
import os, time
if os.fork() == 0:
    while not os.path.exists("/tmp/{go}"):
        time.sleep(0.01)
    exec({dial!r})
    with open("/tmp/{go}.new", "w") as file:
        file.write(reply)
    os.rename("/tmp/{go}.new", "/tmp/{go}.out")
    os._exit(0)
"""


@pytest.mark.parametrize("backend", ["userns", "bubblewrap"])
async def test_network_is_per_command(
    backend: str, greeter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is left behind loses its network, unless its command was in background."""
    dialled = Dialled(dialer.connect_any)
    dialled.to_loopback.add(PUBLIC)
    monkeypatch.setattr(dialer, "connect_any", dialled)
    dial = DIAL.format(address=PUBLIC, port=greeter)
    async with session_of(backend, persist="machine") as session:
        opened = await session.exec(
            dial + "print(reply)", script_type="python", network_mode="open"
        )
        assert opened.stdout == "hello\n"
        assert (await session.run_code(dial + "print(reply)")) != "hello\n"
        for go, background in (("cut", False), ("kept", True)):
            code = WAITER.format(go=go, dial=dial)
            process = await session.run(
                code, script_type="python", network_mode="open", background=background
            )
            assert await process.wait() == 0
            wait = f"touch /tmp/{go}; while ! [ -e /tmp/{go}.out ]; do sleep 0.01; done"
            result = await session.exec(f"{wait}; cat /tmp/{go}.out", timeout_s=SOON_S)
            assert (result.stdout == "hello") is background, (go, result)


async def test_each_command_has_its_own_network_namespace(machine: sb.Session) -> None:
    script = "readlink /proc/self/ns/net; readlink /proc/self/ns/user; sleep 600 &"
    seen = [tuple((await machine.exec(script)).stdout.split()) for _ in range(3)]
    assert len({net for net, _ in seen}) == len({user for _, user in seen}) == 3
    shared = "readlink /proc/self/ns/pid /proc/self/ns/ipc /proc/self/ns/uts"
    assert (await machine.exec(shared)).stdout == (await machine.exec(shared)).stdout


@pytest.mark.parametrize("backend", ["none", "landlock", "sandbox-exec"])
def test_other_backends_refuse(backend: str) -> None:
    with pytest.raises(sb.SandboxUsageError, match="needs namespaces"):
        session_of(backend, persist="machine")


def test_unknown_values_are_refused() -> None:
    with pytest.raises(sb.SandboxUsageError, match="'workdir', 'machine'"):
        session_of("userns", persist="disk")


@pytest.mark.parametrize("backend", ["userns", "bubblewrap"])
async def test_a_machine_that_ended_is_reported(backend: str) -> None:
    """Its files are gone, so no new one takes its place in silence."""
    async with session_of(backend, persist="machine") as session:
        await session.exec("echo x > /tmp/kept")
        session._transport.postures.machine.end()  # type: ignore[union-attr, attr-defined]
        with pytest.raises(sb.SandboxExecutionError, match="machine of the session has ended"):
            await session.exec("cat /tmp/kept")


async def test_commands_leak_no_descriptor() -> None:
    async with session_of("userns", persist="machine", warm=0) as session:
        for _ in range(3):
            await session.exec("true")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await session.exec("true")
        assert len(os.listdir("/proc/self/fd")) <= before + 4


@pytest.mark.spec("G3")
@pytest.mark.parametrize("backend", ["userns", "bubblewrap"])
async def test_memory_is_limited_over_the_whole_session(backend: str) -> None:
    """The command that runs out of memory reports it; what others left behind counts."""
    session = session_of(backend, persist="machine", resources=sb.Resources(memory="256Mi"))
    if cgroup.hierarchy() is None:
        with pytest.raises(sb.BackendUnavailableError, match="control group"):
            await session.open()
        return
    hold = "import os, time\nif os.fork() == 0:\n    held = b'x' * (150 << 20)\n"
    hold += "    open('/tmp/held', 'w').close()\n    time.sleep(600)"
    async with session:
        await session.run_code(hold)
        waits = "while ! [ -e /tmp/held ]; do sleep 0.01; done"
        assert (await session.exec(waits, timeout_s=SOON_S)).ok
        big = await session.exec("x = b'x' * (200 << 20); print(len(x))", script_type="python")
        left = [info for info in await session.processes() if info.left_behind]
        assert not (big.ok and left), "both together are more than the session may have"
        if not big.ok:
            assert big.termination_reason == "oom"
        after = await session.exec("echo usable")
        assert (after.stdout, after.termination_reason) == ("usable\n", "")


async def test_one_call_cannot_have_a_sandbox_of_its_own(machine: sb.Session) -> None:
    for own in ({"resources": sb.Resources(processes=9)}, {"read_only_paths": ["/srv"]}):
        with pytest.raises(sb.PolicyError, match="share one"):
            await machine.exec("true", **own)
    assert (await machine.exec("true")).ok


async def test_a_helper_has_a_socket_and_is_not_listed() -> None:
    """The product's own programs in a machine, which file calls use."""
    near, far = socket.socketpair()
    near.settimeout(SOON_S)
    code = "import socket; s = socket.socket(fileno=0); s.sendall(s.recv(9).upper())"
    async with session_of("userns", persist="machine") as session:
        sink = ProcessSink(resolve_run(session._spec, "true"), lambda: None)
        run = await session._transport.start_helper(("python", "-c", code), far, sink)  # type: ignore[union-attr, attr-defined]
        far.close()
        assert await session.processes() == ()
        near.sendall(b"hello")
        assert await asyncio.to_thread(near.recv, 9) == b"HELLO"
        near.close()
        await run.finished
