"""Attacks on counters that the kernel keeps for a user, not for a sandbox."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.escape.inside import attack, outside, outside_is_filtered

from union import sandbox as sb
from union.sandbox._linux import ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.conftest import OpenSession

_HOLD = """
import ctypes, errno, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
{body}
print(errno.errorcode[ctypes.get_errno()], flush=True)
time.sleep(60)
"""
_INOTIFY = "while libc.inotify_init1(0) >= 0: pass"
_SIGNALS = """
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
while libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(0)) == 0: pass
"""
_IN_FLIGHT = """
import array, socket
null, pairs = os.open("/dev/null", os.O_RDONLY), []
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 253))]
try:
    while True:
        pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        pairs[-1][0].setblocking(False)
        for _ in range(4):
            pairs[-1][0].sendmsg([b"x"], rights)
except OSError as exc:
    ctypes.set_errno(exc.errno)
"""
_WAITING_SENDERS = """
import array, socket, threading
null, receivers, sent = os.open("/dev/null", os.O_RDONLY), [], []
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 253))]
def send(sender):
    sender.sendmsg([b"x"], rights)  # past the kernel's check, it waits for the full queue
    sent.append(1)
try:
    for number in range(12):
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind(f"receiver-{number}")
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sender.connect(f"receiver-{number}")
        sender.setblocking(False)
        try:
            while True: sender.send(b"y")
        except BlockingIOError: pass
        sender.setblocking(True)
        receivers.append(receiver)
        threading.Thread(target=send, args=(sender,), daemon=True).start()
    time.sleep(0.5)
    for receiver in receivers: receiver.recv(1)
    deadline = time.monotonic() + 20
    while len(sent) < 12 and time.monotonic() < deadline: time.sleep(0.01)
    ctypes.set_errno(errno.ETOOMANYREFS if len(sent) == 12 else errno.EAGAIN)  # all in flight
except OSError as exc:
    ctypes.set_errno(exc.errno)
"""


@contextlib.asynccontextmanager
async def holding(session: sb.Session, body: str, *, until: set[str]) -> AsyncIterator[None]:
    """While sandboxed code holds all that it can get; ``until`` are the errnos at the end."""
    text = _HOLD.format(body=body)
    proc = await session.run(text, script_type="python", background=True, stdout=sb.PIPE)
    async with asyncio.timeout(60):
        line = await anext(aiter(proc.iter_stdout_lines()))
    assert line in until
    try:
        yield
    finally:
        proc.kill()
        await proc.wait()


def _inotify() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(0)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    os.close(fd)


def _timer() -> None:
    rt = ctypes.CDLL("librt.so.1", use_errno=True)
    timer = ctypes.c_void_p()
    assert rt.timer_create(1, None, ctypes.byref(timer)) == 0, os.strerror(ctypes.get_errno())
    rt.timer_delete(timer)


def _pass_descriptor() -> None:
    left, right = socket.socketpair()
    with left, right:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
        left.sendmsg([b"x"], rights)
        _, control, _, _ = right.recvmsg(1, socket.CMSG_LEN(4))
        os.close(array.array("i", control[0][2])[0])


_IN_SANDBOX = """
out["inotify"] = "ok" if libc.inotify_init1(0) >= 0 else errno.errorcode[ctypes.get_errno()]
timer = ctypes.c_void_p()
rt = ctypes.CDLL("librt.so.1", use_errno=True)
out["timer"] = "ok" if rt.timer_create(1, None, ctypes.byref(timer)) == 0 else errno.errorcode[ctypes.get_errno()]
"""


@pytest.mark.spec("G2")
@pytest.mark.threat(142, 143)
@pytest.mark.parametrize(
    "body, until, works",
    [
        pytest.param(_INOTIFY, {"EMFILE"}, _inotify, id="inotify"),
        pytest.param(_SIGNALS, {"EAGAIN"}, _timer, id="signals"),
        pytest.param(_IN_FLIGHT, {"ETOOMANYREFS"}, _pass_descriptor, id="descriptors in flight"),
        pytest.param(
            _WAITING_SENDERS,
            {"ETOOMANYREFS", "EPROTONOSUPPORT"},  # the latter with the id of the caller
            _pass_descriptor,
            id="waiting senders",
        ),
    ],
)
async def test_a_counter_used_up_inside_is_not_the_callers(
    jailed: OpenSession, body: str, until: set[str], works: Callable[[], None]
) -> None:
    """The attack reaches the end of a counter: neither the caller nor another session is there."""
    works()
    async with jailed() as one:
        counted = one.isolation.to_dict()["limits"].get("inotify")
    if works is _inotify and counted == "none":
        pytest.skip("inotify is reported as not limited here: unmask /proc of the container")
    async with jailed() as one, jailed() as other, holding(one, body, until=until):
        works()
        assert await attack(other, _IN_SANDBOX) == {"inotify": "ok", "timer": "ok"}
        assert (await other.exec("echo fine")).stdout == "fine\n"
        async with jailed() as later:
            assert (await later.exec("echo fine")).stdout == "fine\n"


@pytest.mark.spec("G2")
@pytest.mark.threat(142)
async def test_native_aio_is_refused(jailed: OpenSession) -> None:
    """One pool for the whole machine, which the first to ask takes."""
    code = """
    context = ctypes.c_ulong(0)
    out["setup"] = call("io_setup", 8, ctypes.pointer(context))
    out["submit"] = call("io_submit", context.value, 0, None)
    out["destroy"] = call("io_destroy", context.value)
    """
    async with jailed() as session:
        found = await attack(session, code)
    assert set(found.values()) == {"ENOSYS"}
    if not outside_is_filtered():
        assert (await outside(code))["setup"] == "ok"


@pytest.mark.needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one id: run the tests as root")
@pytest.mark.threat(143)
async def test_each_session_of_root_has_its_own_id(jailed: OpenSession) -> None:
    """Seen from the host, in the command and as the owner of its user namespace."""
    found = []
    async with jailed() as one, jailed() as other:
        if one.isolation.ids != "unprivileged":
            pytest.skip("root may not map ids here: grant SYS_ADMIN to the container")
        for session in (one, other, one):
            proc = await session.run(["sleep", "60"], background=True)
            found.append(_owner_of_sleep())
            proc.kill()
            await proc.wait()
    assert found[0] == found[2] != found[1]
    assert 0 not in found
    assert all(number in (ids.id_range() or ()) for number in found)


def _owner_of_sleep() -> int:
    from tests.conftest import sandbox_processes

    for pid in sandbox_processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                return os.stat(f"/proc/{pid}").st_uid
    raise AssertionError("no command was found")


@pytest.mark.threat(143)
def test_blocks_of_ids_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table stands for a process: a block that one has reserved is no other's."""
    first = 1_999_000_000 + os.getpid() * 1024 % 900_000
    monkeypatch.setattr(ids, "id_range", lambda: range(first, first + 2 * ids._BLOCK))
    tables = [ids.HostIds(), ids.HostIds(), ids.HostIds()]
    try:
        one, other = (set(), set())
        for _ in range(ids._BLOCK):
            one.add(tables[0].take())
            other.add(tables[1].take())
        assert len(one) == len(other) == ids._BLOCK
        assert not one & other
        with pytest.raises(OSError, match="no free block") as caught:
            tables[2].take()
        assert caught.value.errno == errno.EADDRINUSE
        tables[1].forget()
        assert tables[2].take() in other, "the block of a process that ended is free"
        number = one.pop()
        tables[0].release(number)
        assert tables[0].take() == number
        tables[2].release(number)
        assert tables[2].take() != number, "an id of another process is not taken over"
    finally:
        for table in tables:
            table.forget()


@pytest.mark.threat(143)
@pytest.mark.parametrize(
    "mapped, wanted",
    [
        ([range(2**32 - 1)], range(2_000_000_000, 2_100_000_000)),
        ([range(65536)], range(30_000, 60_000)),
        ([range(1), range(1, 200_000)], range(65536, 200_000)),
        ([range(1)], None),
        ([range(1000)], None),
    ],
)
def test_only_ids_that_exist_in_a_container_are_used(
    monkeypatch: pytest.MonkeyPatch, mapped: list[range], wanted: range | None
) -> None:
    monkeypatch.setattr(ids, "_mapped", lambda _: mapped)
    assert ids.id_range.__wrapped__() == wanted
