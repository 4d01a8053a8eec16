"""Messages between host and launcher that are truncated, malformed, too large, or missing."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from tests.conftest import SOON_S, descriptors, eventually, held_by_launcher, session_of

from union.sandbox._core.events import Exited, Failed, Started
from union.sandbox._linux import channel as channels
from union.sandbox._linux.channel import Channel
from union.sandbox._linux.descriptors import sealed_memfd
from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.machine_run import MachineRun
from union.sandbox._linux.prepared import Sandbox
from union.sandbox._linux.protocol import (
    EXEC,
    EXITED,
    PREPARE,
    SIMPLE,
    ExecFlag,
    Message,
    PrepareFlag,
)
from union.sandbox._linux.reader_set import ReaderSet
from union.sandbox._linux.run import LocalRun
from union.sandbox._plan import plan
from union.sandbox.on_device import _probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union import sandbox as sb

pytestmark = pytest.mark.spec("D8", "G4")

TOO_LARGE = 140_000
NOWHERE = 987_654


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def plan_of(content: bytes) -> int:
    return sealed_memfd("plan", content)


async def works(session: sb.Session) -> bool:
    async with asyncio.timeout(40):
        result = await session.exec("echo fine; exit 3")
        await asyncio.sleep(0)  # waiters are woken first, then the run is closed
        return result.returncode == 3


CONTROL = {
    "one byte": (b"x", 0),
    "cut": (SIMPLE.pack(Message.ATTACH, 0, 0, 0)[:-1], 1),
    "longer": (SIMPLE.pack(Message.ATTACH, 0, 0, 0) + b"x", 1),
    "too large": (bytes(TOO_LARGE), 0),
    "unknown": (SIMPLE.pack(NOWHERE, 0, 0, 0), 1),
    "attach without a socket": (SIMPLE.pack(Message.ATTACH, 0, 0, 0), 0),
    "attach with two": (SIMPLE.pack(Message.ATTACH, 0, 0, 0), 2),
    "attach with too many": (SIMPLE.pack(Message.ATTACH, 0, 0, 0), 100),
    "a cut request for a namespace": (PREPARE.pack(Message.USERNS, *[0] * 12)[:-4], 0),
}


def _kept() -> int:
    """Descriptors of the launcher, but for networks: how many it has depends on the moment."""
    held = held_by_launcher()
    return held.total() - held["net"]


@pytest.mark.parametrize("what", CONTROL)
async def test_nonsense_on_the_control_socket_harms_no_session(what: str) -> None:
    data, count = CONTROL[what]
    async with session_of("userns") as session:
        assert await works(session)
        launcher = Launcher.current()
        held = _kept()
        ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        send(launcher._control, data, [theirs.fileno() for _, theirs in ends])
        for ours, theirs in ends:
            theirs.close()
            ours.settimeout(5)
            assert ours.recv(100)[:4] in {b"", Message.FAILED.to_bytes(4, "little")}, (
                "closed, or refused"
            )
            ours.close()
        assert await works(session)
        assert launcher is Launcher.current()
        assert eventually(lambda: _kept() <= held), "nothing of it was kept"


def _prepare(flags: int = 0, cgroups: int = 0) -> bytes:
    return PREPARE.pack(Message.PREPARE, 7, 0, flags, 0, 0, 0, 0, cgroups, 0, 0, 0, 0)


REQUESTS: dict[str, tuple[bytes, int | bytes | None, int]] = {
    # The message, the plan (or what stands in its place), and further descriptors.
    "no plan": (_prepare(), None, 0),
    "an empty plan": (_prepare(), b"", 0),
    "a garbled plan": (_prepare(), b"\xff" * 64, 0),
    "a cut plan": (_prepare(), struct.pack("=II", plan.MAGIC, 3), 0),
    "a device for a plan": (_prepare(), -1, 0),
    "more groups than descriptors": (_prepare(cgroups=5), b"x" * 64, 1),
    "very many groups": (_prepare(cgroups=0xFFFFFFFF), b"x" * 64, 1),
    "a copy of nothing": (_prepare(PrepareFlag.COPY), b"x" * 64, 1),
    "a copy, and groups in place of namespaces": (_prepare(PrepareFlag.COPY, 2), b"x" * 64, 3),
    "too many descriptors": (_prepare(), b"x" * 64, 80),
    "cut": (_prepare()[:-1], b"x" * 64, 0),
    "longer": (_prepare() + b"x", b"x" * 64, 0),
    "too large": (_prepare() + bytes(TOO_LARGE), b"x" * 64, 0),
    "unknown": (SIMPLE.pack(NOWHERE, 0, 0, 0), b"x" * 64, 0),
}


@pytest.mark.parametrize("what", REQUESTS)
async def test_a_garbled_request_is_answered_and_costs_nothing(what: str) -> None:
    data, content, more = REQUESTS[what]
    async with session_of("userns") as bystander:
        assert await works(bystander)
        launcher = Launcher.current()
        channel = launcher.attach()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno()]
        if content is not None:
            fds.append(
                plan_of(content) if isinstance(content, bytes) else os.open("/dev/null", os.O_RDWR)
            )
        fds += [os.open("/dev/null", os.O_RDWR) for _ in range(more)]
        send(channel, data, fds)
        theirs.close()
        for fd in fds[1:]:
            os.close(fd)
        ours.settimeout(5)
        kind = int.from_bytes(ours.recv(100)[:4], "little")
        assert kind in {0, Message.FAILED}, "refused, or its socket closed; never silence"
        # The same channel still works, and so do all others.
        channel.settimeout(5)
        channel.send(SIMPLE.pack(Message.KILL, NOWHERE, 0, 0))
        channel.send(SIMPLE.pack(Message.KILL_ALL, 5, 0, 0))
        assert channel.recv(100) == SIMPLE.pack(Message.ALL_GONE, 5, 0, 0)
        channel.close()
        ours.close()
        assert await works(bystander)
        assert launcher is Launcher.current()


def _exec(flags: int = 0, *, programs: int = 1, argc: int = 1, envc: int = 0, **more: int) -> bytes:
    rlimits, slot, size = (more.get(name, 0) for name in ("rlimits", "slot", "size"))
    return EXEC.pack(Message.EXEC, flags, slot, rlimits, programs, argc, envc, size, 0, 0)


BODY = b"/\0/bin/true\0true\0"
COMMANDS = {
    "cut": (_exec()[:10], 0),
    "unknown": (SIMPLE.pack(NOWHERE, 0, 0, 0), 0),
    "no body": (_exec(), 0),
    "a cut body": (_exec() + BODY[:-1], 0),
    "a longer body": (_exec() + BODY + b"x\0", 0),
    "no program": (_exec(programs=0) + BODY, 0),
    "no arguments": (_exec(argc=0) + BODY, 0),
    "more arguments than there are": (_exec(argc=9) + BODY, 0),
    "very many arguments": (_exec(argc=0xFFFFFFFF) + BODY, 0),
    "very many limits": (_exec(rlimits=0xFFFFFFFF) + BODY, 0),
    "too large": (_exec() + BODY + bytes(TOO_LARGE), 0),
    "streams that are not there": (
        _exec(ExecFlag.STDIN | ExecFlag.STDOUT | ExecFlag.STDERR) + BODY,
        0,
    ),
    "a descriptor that is not announced": (_exec() + BODY, 1),
    "a slot that is not there": (_exec(ExecFlag.SCRIPT, slot=99) + BODY, 1),
    "a payload that is larger than its file": (_exec(ExecFlag.PAYLOAD, size=1 << 20), 1),
    "an empty payload": (_exec(ExecFlag.PAYLOAD, size=0), 1),
}


@pytest.mark.parametrize("what", COMMANDS)
async def test_a_garbled_command_is_a_failure_and_no_exit(what: str) -> None:
    data, count = COMMANDS[what]
    async with session_of("userns", warm=0) as session:
        assert await works(session)
        transport: Any = session._transport
        sandbox = transport.pool.sandboxes.prepare(transport.postures.get("blocked"))
        files = [sealed_memfd("file", b"/\0") for _ in range(count)]
        send(sandbox.sock, data, files)
        for fd in files:
            os.close(fd)
        sandbox.sock.settimeout(10)
        kinds = []
        while message := sandbox.sock.recv(512):
            kinds.append(int.from_bytes(message[:4], "little"))
        assert kinds == [Message.FAILED], "it reports a failure, and no exit code"
        sandbox.release()
        assert await works(session)


@pytest.mark.parametrize("stage", ["at once", "when it is ready", "when the command runs"])
async def test_a_socket_that_is_closed_ends_what_is_behind_it(stage: str) -> None:
    async with session_of("userns", warm=0) as session:
        assert await works(session)
        transport: Any = session._transport
        launcher = Launcher.current().pid
        children = f"/proc/{launcher}/task/{launcher}/children"
        pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        _, sock = transport.postures.get("blocked").prepare(transport.pool.channel(), pid=pid)
        if stage != "at once":
            sock.settimeout(10)
            assert int.from_bytes(sock.recv(512)[:4], "little") == Message.READY
        if stage == "when the command runs":
            send(sock, _exec(argc=2) + b"/\0/bin/sleep\0sleep\x0060\0")
            await asyncio.sleep(0.2)
        sock.close()
        with open(children) as file:
            assert eventually(lambda: not file.seek(0) and not file.read())
        assert await works(session)


# The other direction: messages that the host receives.


class Recorder:
    """A sink that only records events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def event(self, event: object) -> None:
        self.events.append(event)

    def output(self, fd: int, data: bytes) -> bool:
        return True

    def end_of_output(self, fd: int) -> None: ...

    def decision(self, decision: object) -> None: ...


STOPPED = 0x137F
REPORTS: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 0),
    "a cut exit": (EXITED.pack(Message.EXITED, 0, 0, 0, 0)[:-1], 0),
    "an exit that is none": (EXITED.pack(Message.EXITED, STOPPED, 0, 0, 0), 0),
    "a cut failure": (SIMPLE.pack(Message.FAILED, 1, 1, 0)[:6], 0),
    "a failure of an unknown step": (SIMPLE.pack(Message.FAILED, NOWHERE, NOWHERE, 0), 0),
    "a cut start": (SIMPLE.pack(Message.STARTED, 0, 2, 0)[:7], 0),
    "unknown": (SIMPLE.pack(NOWHERE, 0, 0, 0), 0),
    "one byte": (b"\x2a", 0),
    "a start with descriptors": (SIMPLE.pack(Message.STARTED, 0, 2, 0), 3),
    "a terminal that was not requested": (SIMPLE.pack(Message.TERMINAL, 0, 0, 0), 2),
    "listeners that were not requested": (SIMPLE.pack(Message.READY, 0, 0, 0), 6),
}


@pytest.mark.parametrize("what", REPORTS)
@pytest.mark.filterwarnings("ignore")
async def test_a_malformed_report_of_a_sandbox_is_a_failure(what: str) -> None:
    data, count = REPORTS[what]
    # A fault of ours is logged by the loop as well; here only the run's end matters.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with session_of("userns", warm=0) as session:
        assert await works(session)
        isolation = session.isolation
        before = descriptors()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        run = LocalRun(
            Sandbox(1, ours, channel=session._transport.pool.channel(), owner=None),  # type: ignore[union-attr]
            isolation=isolation,
        )
        sink = Recorder()
        run.attach(sink, timeout_s=None)
        if data:
            files = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
            send(theirs, data, files)
            for fd in files:
                os.close(fd)
        theirs.close()
        async with asyncio.timeout(40):
            await run.finished
        ends = [event for event in sink.events if isinstance(event, Exited | Failed)]
        assert [type(end) for end in ends] == [Failed], sink.events
        assert descriptors() == before


class Resetting:
    """A socket whose peer died with a message unread, as gVisor reports it: data, then errors."""

    def __init__(self, sock: socket.socket, messages: list[bytes], *, most: int = 10) -> None:
        self._sock, self._messages, self._most = sock, messages, most

    def recv(self, _size: int) -> bytes:
        if self._messages:
            return self._messages.pop(0)
        self._most -= 1
        if self._most < 0:
            raise AssertionError("the loop does not end")
        raise ConnectionResetError

    def recvmsg(self, size: int, *_: int) -> tuple[bytes, list[Any], int, None]:
        return self.recv(size), [], 0, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("exited", [True, False])
async def test_a_run_ends_when_its_socket_reports_a_reset_for_ever(*, exited: bool) -> None:
    async with session_of("userns", warm=0) as session:
        assert await works(session)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        messages = [EXITED.pack(Message.EXITED, 3 << 8, 0, 0, 0)] if exited else []
        sock: Any = Resetting(ours, messages)
        run = LocalRun(
            Sandbox(1, sock, channel=session._transport.pool.channel(), owner=None),  # type: ignore[union-attr]
            isolation=session.isolation,
        )
        sink = Recorder()
        run.attach(sink, timeout_s=None)
        theirs.close()
        async with asyncio.timeout(40):
            await run.finished
        ends = [event for event in sink.events if isinstance(event, Exited | Failed)]
        assert [type(end) for end in ends] == [Exited if exited else Failed], sink.events


@pytest.mark.parametrize("waited", [(5,), (5, 6), (5, 6, 7)], ids=len)
@pytest.mark.parametrize("reports", [False, True])
async def test_a_command_of_a_machine_starts_once(
    waited: tuple[int, ...], *, reports: bool
) -> None:
    """Also when the process that waits for it was killed and replaced, before or after a read."""
    async with session_of("userns", persist="machine") as session:
        assert await works(session)
        pool = session._transport.pool  # type: ignore[union-attr]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        sandbox = Sandbox(1, ours, channel=pool.channel(), owner=None)
        run = MachineRun(sandbox, Mock(), isolation=session.isolation)
        sink = Recorder()
        before, late = waited[:2], waited[2:]
        for pid in before:
            send(theirs, SIMPLE.pack(Message.WAITING, 0, pid, 0))
        assert sandbox.read_waiting() == before[-1]
        run.attach(sink, timeout_s=None)
        run.announce()
        for pid in late:
            send(theirs, SIMPLE.pack(Message.WAITING, 0, pid, 0))
        if reports:
            send(theirs, SIMPLE.pack(Message.STARTED, 0, waited[-1], 0))
        send(theirs, EXITED.pack(Message.EXITED, 3 << 8, 0, 0, 0))
        async with asyncio.timeout(40):
            await run.finished
        theirs.close()
        assert [type(event) for event in sink.events] == [Started, Exited]
        assert sink.events[0] == Started(before[-1])


async def test_a_channel_is_lost_when_its_socket_reports_a_reset_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with session_of("userns"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        sock = Resetting(ours, [SIMPLE.pack(Message.PID, 1, 77, 0)])
        monkeypatch.setattr(channels, "_attach", lambda _: (Launcher.current(), sock))
        readers = ReaderSet()
        channel = Channel(readers)
        pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        channel._pids[1] = pid
        theirs.close()
        async with asyncio.timeout(SOON_S):
            assert await pid == 77
            await channel.drain()
        assert channel.lost
        channel.close()
        readers.close()


@pytest.mark.parametrize("data", [b"", b"x", SIMPLE.pack(Message.READY, 0, 0, 0)[:8], b"\xff" * 16])
async def test_a_malformed_report_of_a_new_sandbox_raises(data: bytes) -> None:
    for wait in (_probe.wait_until_ready, _probe.wait_for_shared):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with ours, theirs:
            if data:
                theirs.send(data)
            theirs.close()
            with pytest.raises(OSError):
                await wait(ours)  # type: ignore[operator]


@pytest.mark.parametrize("count", [0, 1])
async def test_a_shared_view_without_its_namespaces(count: int) -> None:
    before = descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        send(theirs, SIMPLE.pack(Message.SHARED, 0, 0, 0), [0] * count)
        with pytest.raises(OSError, match="invalid message"):
            await _probe.wait_for_shared(ours)
    assert descriptors() == before


@pytest.mark.parametrize("data", [b"x", b"x" * 15, b""])
async def test_a_malformed_message_closes_the_channel_and_wakes_every_waiter(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with session_of("userns"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        monkeypatch.setattr(channels, "_attach", lambda _: (Launcher.current(), ours))
        readers = ReaderSet()
        channel = Channel(readers)
        gone: list[int] = []
        pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        channel._gone[1] = lambda: gone.append(1)
        channel._pids[1] = pid
        if data:
            theirs.send(data)
        theirs.close()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(OSError):
                await pid
            await channel.drain()
        assert (channel.lost, gone) == (True, [1])
        channel.kill(1)
        channel.close()
        readers.close()
