"""Attacks on the descriptors in flight of the caller, which the kernel counts for each user id.

The kernel compares the count with the sender's limit before it copies the data of a message, and
adds the message to the count afterwards. Threads that wait for a page of that data have passed the
check, so a race exceeds every limit. The guard ends such a command.
"""

from __future__ import annotations

import array
import asyncio
import errno
import inspect
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import session_of

from union import sandbox as sb
from union.sandbox._linux import descriptors, epoll_watches, in_flight
from union.sandbox.on_device import _command, _counter_guard, _settings
from union.sandbox.on_device._counter_guard import CounterGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import OpenSession

_IS_ROOT = os.geteuid() == 0
pytestmark = [
    pytest.mark.spec("G2"),
    pytest.mark.threat(142),
    # The counter of an ordinary user is that of all tests.
    *([] if _IS_ROOT else [pytest.mark.alone]),
]
_SOFT, _ROOM = 1024, 8192
_HEAD = """
import array, ctypes, mmap, os, socket, threading, time
libc = ctypes.CDLL(None, use_errno=True)
null, kept = os.open("/dev/null", os.O_RDONLY), []
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 253))]
def take(messages=8, to=None):
    kept.append(socket.socketpair())
    try:
        for _ in range(messages): (to or kept[-1][0]).sendmsg([b"x"], rights)
    except OSError: pass  # the limit on open files
"""
_INVISIBLE = "in sockets that only a system call holds"
_WAYS = {
    "in one process": "take()",
    "in children": """
ready = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        take(2); os.write(ready[1], b"."); time.sleep(60); os._exit(0)
for _ in range(4): os.read(ready[0], 1)
""",
    "in a process that forbids inspection": "libc.prctl(4, 0, 0, 0, 0); take()",
    "in a message of its own": """
outer, (near, far) = socket.socketpair(), socket.socketpair()
socket.send_fds(outer[0], [b"x"], [far.fileno()]); far.close()
take(to=near); near.close()
""",
    _INVISIBLE: """
take(); near, far = (end.detach() for end in kept.pop())
class Poll(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]
both = (Poll * 2)(Poll(near, 0, 0), Poll(far, 0, 0))
threading.Thread(target=libc.poll, args=(both, 2, 60000), daemon=True).start()
time.sleep(0.2); os.close(near); os.close(far)
""",
}
_RACE = """
THREADS, SIZE = 16, 64 << 20
threading.stack_size(1 << 16)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
big = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
big.madvise(mmap.MADV_NOHUGEPAGE)
where = ctypes.addressof(ctypes.c_char.from_buffer(big))
for at in range(THREADS * 4096, SIZE, 4096): big[at] = 1
done, sent, until = False, [], time.monotonic() + 10
def lock():  # page faults wait while the protection of all pages is changed
    while not done:
        for protection in (1, 3): libc.mprotect(where, SIZE, protection)
def send(number):
    with memoryview(big)[number * 4096:number * 4096 + 1] as page:
        barrier.wait()
        try: pairs[number][0].sendmsg([page], rights); sent.append(1)
        except OSError: pass
locker = threading.Thread(target=lock); locker.start()
while len(sent) * 253 <= LIMIT and time.monotonic() < until:
    sent.clear(); big.madvise(mmap.MADV_DONTNEED, 0, THREADS * 4096)
    pairs, barrier = [socket.socketpair() for _ in range(THREADS)], threading.Barrier(THREADS)
    threads = [threading.Thread(target=send, args=(number,)) for number in range(THREADS)]
    for one in threads: one.start()
    for one in threads: one.join()
done = True; locker.join()
""".replace("LIMIT", str(_SOFT))
_HOLD = "\nprint('held', flush=True)\ntime.sleep(60)\n"


@pytest.fixture(autouse=True)
def soft_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The usual limit of a caller, in sessions that are watched also if the caller is root."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_SOFT, before[1]), before[1]))
    monkeypatch.setattr(_settings, "_epoll_limit", lambda _: "watch")
    monkeypatch.setattr(_counter_guard, "_EVERY_S", 0.05)
    monkeypatch.setattr(CounterGuard, "_last_end", 0.0)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes with as many open files as their caller, as after a race that was won."""
    monkeypatch.setattr(_command, "_beside", lambda soft: soft)


def _pass_descriptor() -> str:
    near, far = socket.socketpair()
    with near, far:
        try:
            near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
        except OSError as exc:
            return errno.errorcode[exc.errno or 0]
    return "ok"


async def _pass_descriptor_as_user_of(session: sb.Session) -> str:
    """Try it in a process with the id of the session: the caller's, or one of root's own."""
    sandbox = next(iter(session._transport.runner.running())).sandbox
    first = await sandbox.channel.locate(sandbox.number)
    status = Path(f"/proc/{first}/status").read_text()
    uid = status.split("Uid:")[1].split()[0]
    source = f"{inspect.getsource(_pass_descriptor)}print(_pass_descriptor())"
    program = f"import array, errno, os, socket\nos.setresuid({uid}, {uid}, {uid})\n{source}"
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", program, stdout=subprocess.PIPE
    )
    return (await done.communicate())[0].decode().strip()


async def _run(session: sb.Session, body: str) -> sb.SandboxProcess:
    return await session.run(
        _HEAD + body + _HOLD, script_type="python", background=True, stdout=sb.PIPE
    )


async def _holds(proc: sb.SandboxProcess) -> bool:
    """Wait until the program holds all that it wants, or has been ended."""
    async with asyncio.timeout(60):
        return await anext(aiter(proc.iter_stdout_lines()), "") == "held"


async def _passes_again() -> None:
    async with asyncio.timeout(60):
        while _pass_descriptor() != "ok":
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize("name", list(_WAYS))
async def test_a_command_that_holds_too_many_is_ended(
    jailed: OpenSession,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller can pass descriptors again, and sessions work all the time."""
    caplog.set_level(logging.WARNING, "union.sandbox")
    monkeypatch.setattr(_counter_guard, "_GRACE_S", 0.3)
    holding: list[sb.SandboxProcess] = []
    kernel_refuses = in_flight.is_exhausted

    def is_exhausted() -> bool:
        if _IS_ROOT:  # its sessions have counters of their own: the shortage is simulated
            return any(proc.returncode is None for proc in holding)
        return bool(holding) and kernel_refuses()

    monkeypatch.setattr(in_flight, "is_exhausted", is_exhausted)
    async with jailed() as session, jailed() as other:
        # Time in the kernel is no reason to end a command that can hide nothing.
        honest = await _run(other, "for _ in range(100000): os.stat('/')")
        assert await _holds(honest)
        greedy = await _run(session, _WAYS[name])
        assert await _holds(greedy)
        holding.append(greedy)
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= _ROOM:
            assert (await other.exec("echo fine")).stdout == "fine\n"
        async with asyncio.timeout(60):
            await greedy.wait()
        assert greedy.termination_reason == "limit"
        assert "descriptors in flight" in caplog.text
        await _passes_again()
        assert honest.returncode is None
        async with jailed() as later:
            assert (await later.exec("echo fine")).stdout == "fine\n"


@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize("name", list(_WAYS))
async def test_without_the_guard_the_caller_can_pass_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs do what they claim; messages of the library are sent under the hard limit."""
    monkeypatch.setattr(in_flight, "is_exhausted", lambda: False)
    async with session_of("userns") as session, session_of("userns") as other:
        greedy = await _run(session, _WAYS[name])
        assert await _holds(greedy)
        assert await _pass_descriptor_as_user_of(session) == "ETOOMANYREFS"
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= _ROOM:
            assert (await other.exec("echo fine")).stdout == "fine\n"
        greedy.kill()
        await greedy.wait()


async def test_a_race_past_the_limit_leaves_the_caller_able_to_pass_descriptors(
    jailed: OpenSession,
) -> None:
    """Whether the race is won depends on the moment; the caller and other sessions go on if so."""
    async with jailed() as session, jailed() as other:
        greedy = await _run(session, _RACE)
        await _holds(greedy)  # it may be ended before
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= _ROOM:
            assert (await other.exec("echo fine")).stdout == "fine\n"
        await _passes_again()
        async with jailed() as later:
            assert (await later.exec("echo fine")).stdout == "fine\n"
        greedy.kill()
        await greedy.wait()


async def test_commands_that_hold_none_are_ended_only_if_the_shortage_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process of the user may have the session that is to blame, and ends its command."""
    guard = CounterGuard(running=lambda: (), waiting=lambda: (), machine=lambda: None)
    holds_one = _counter_guard._Suspicion(1, 0.0)
    holds_none = _counter_guard._Suspicion(0, 9.0)
    hides_none = _counter_guard._Suspicion(0, 0.0)
    monkeypatch.setattr(CounterGuard, "_since", time.monotonic())
    assert guard._is_suspect("descriptors in flight", holds_one)
    assert not guard._is_suspect("descriptors in flight", holds_none)
    monkeypatch.setattr(CounterGuard, "_since", time.monotonic() - _counter_guard._GRACE_S - 1)
    assert guard._is_suspect("descriptors in flight", holds_none)
    assert not guard._is_suspect("descriptors in flight", hides_none), "in a network of its own"


async def test_sockets_that_no_table_lists_are_found() -> None:
    near, far = socket.socketpair()  # of the caller's network
    with near, far:
        assert in_flight.unlisted_sockets([os.getpid()]) is None
    async with session_of("userns") as session:
        for body, found in (("", 0), (_WAYS[_INVISIBLE], 2), (_WAYS["in one process"], 0)):
            proc = await _run(session, body)
            assert await _holds(proc)
            sandbox = next(iter(session._transport.runner.running())).sandbox
            first = await sandbox.channel.locate(sandbox.number)
            pids = {table.pid for table in epoll_watches.descriptor_tables(first)}
            assert in_flight.unlisted_sockets(pids, seconds=20) == found
            shown = in_flight.unlisted_sockets(pids, seconds=-1)
            assert shown == (2 if body else 0), "tables that take too long hide nothing"
            proc.kill()
            await proc.wait()


class _Refusing(socket.socket):
    """Refuses descriptors as the kernel does, if the soft limit is below ``needed``."""

    needed = 0
    limits: list[int]

    def sendmsg(self, *args: object) -> int:  # type: ignore[override]
        self.limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if self.limits[-1] < self.needed:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return super().sendmsg(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "needed, tries",
    [
        pytest.param(lambda soft, _: soft, 1, id="enough"),
        pytest.param(lambda soft, _: soft + 1, 2, id="too many for the soft limit"),
        pytest.param(lambda _, hard: hard + 1, 2, id="too many for the hard limit"),
    ],
)
def test_the_library_sends_under_the_hard_limit(
    needed: Callable[[int, int], int], tries: int
) -> None:
    """Only for the message that is refused; afterwards the limit of the caller is as before."""
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed(soft, hard) <= hard and hard == soft < needed(soft, hard):
        pytest.skip("the hard limit is the soft limit: raise it with ulimit -Hn")
    ours, theirs = socket.socketpair()
    sender = _Refusing(fileno=ours.detach())
    sender.needed, sender.limits = needed(soft, hard), []
    with sender, theirs:
        if sender.needed > hard:
            with pytest.raises(OSError, match=os.strerror(errno.ETOOMANYREFS)):
                descriptors.send_with_fds(sender, b"x", [theirs.fileno()])
        else:
            descriptors.send_with_fds(sender, b"x", [theirs.fileno()])
            data, fds = descriptors.receive(theirs, 1, 1)
            descriptors.close_all(fds)
            assert data == b"x"
    assert sender.limits == [soft, hard][:tries]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_a_refusal_by_the_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the errno of this counter counts as exhausted."""
    assert not in_flight.is_exhausted()
    for number, expected in ((errno.ETOOMANYREFS, True), (errno.ENOBUFS, False)):

        def refuse(*_: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(in_flight.socket, "send_fds", refuse)
        assert in_flight.is_exhausted() is expected
