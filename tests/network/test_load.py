"""Many connections, large transfers, and interrupted transfers leak nothing."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S, descriptors
from tests.network.inside import program, run_inside

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import OpenSession
    from tests.network.services import Services

    from union import sandbox as sb

pytestmark = pytest.mark.spec("F3", "F4")

ALLOW = ["allowed.test", "127.0.0.1"]
POLICY = {"network_mode": "allowlist", "network_allowlist": ALLOW}


@pytest.mark.parametrize("frontend", ["tcp", "http"])
async def test_two_hundred_connections_at_once(
    net: sb.Session, served: Services, frontend: str
) -> None:
    """All are open before the first byte is sent; each receives its own bytes."""
    code = """
    def opened():
        if given["frontend"] == "http":
            return tunnel("allowed.test", given["port"])
        return socket.create_connection(("allowed.test", given["port"]), timeout=20)
    held = [opened() for _ in range(200)]
    for number, s in enumerate(held):
        s.sendall(f"connection {number}".encode())
        s.shutdown(socket.SHUT_WR)
    out["right"] = sum(read_all(s) == f"connection {n}bye".encode() for n, s in enumerate(held))
    """
    given = {"port": served.echo.port, "frontend": frontend}
    begun = time.monotonic()
    seen = await run_inside(net, code, allow=ALLOW, given=given)
    assert seen.out == {"right": 200}
    assert len(seen.grants) == 200
    assert not seen.refusals
    assert served.echo.connections == 200
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("frontend", ["tcp", "http", "socks"])
async def test_a_half_closed_connection_still_receives_data(
    net: sb.Session, served: Services, frontend: str
) -> None:
    """The server receives the end of the stream, and its last data arrives."""
    code = """
    if given["frontend"] == "tcp":
        s = socket.create_connection(("allowed.test", given["port"]), timeout=5)
    elif given["frontend"] == "http":
        s = tunnel("allowed.test", given["port"])
    else:
        s = socket.create_connection(SOCKS, timeout=5)
        s.sendall(b"\\x05\\x01\\x00\\x05\\x01\\x00\\x03\\x0callowed.test" + struct.pack(">H", given["port"]))
        s.recv(2), s.recv(10)
    s.sendall(b"one")
    out["echo"] = s.recv(10).decode()
    s.shutdown(socket.SHUT_WR)
    out["rest"] = read_all(s).decode()
    """  # noqa: E501
    seen = await run_inside(
        net, code, allow=ALLOW, given={"port": served.echo.port, "frontend": frontend}
    )
    assert seen.out == {"echo": "one", "rest": "bye"}


@pytest.mark.parametrize("frontend", ["tcp", "http"])
async def test_64_mib_both_ways_arrive_intact(
    net: sb.Session, served: Services, frontend: str
) -> None:
    code = """
    import hashlib, random
    block = random.Random(7).randbytes(1 << 20)
    size = 64 << 20
    s = tunnel("allowed.test", given["port"]) if given["frontend"] == "http" else socket.create_connection(("allowed.test", given["port"]))
    def send():
        for number in range(64):
            s.sendall(number.to_bytes(4, "big") + block[4:])
        s.shutdown(socket.SHUT_WR)
    sent, got = hashlib.blake2b(), hashlib.blake2b()
    for number in range(64):
        sent.update(number.to_bytes(4, "big") + block[4:])
    sent.update(b"bye")
    threading.Thread(target=send).start()
    total = 0
    while piece := s.recv(1 << 18):
        got.update(piece)
        total += len(piece)
    out["total"], out["same"] = total, sent.digest() == got.digest()
    """  # noqa: E501
    given = {"port": served.echo.port, "frontend": frontend}
    seen = await run_inside(net, code, allow=ALLOW, given=given)
    assert seen.out == {"total": (64 << 20) + 3, "same": True}
    [decision] = seen.grants
    assert (decision.bytes_up, decision.bytes_down) == (64 << 20, (64 << 20) + 3)


async def test_a_program_that_does_not_read_slows_the_server_down(
    net: sb.Session, served: Services
) -> None:
    """Back-pressure: the host does not buffer data that the program leaves unread."""
    code = """
    s = socket.create_connection(("allowed.test", given["port"]))
    s.recv(1)
    time.sleep(1)
    """
    seen = await run_inside(net, code, allow=ALLOW, given={"port": served.endless.port})
    [decision] = seen.grants
    assert decision.bytes_down < 32 << 20


_TRANSFER = """
s = socket.create_connection(("allowed.test", given["port"]))
s.recv(1 << 20)
print("begun", flush=True)
while s.recv(1 << 20):
    pass
"""


async def _state() -> tuple[int, int]:
    # The event loop needs a moment to close ended connections.
    for _ in range(20):
        await asyncio.sleep(0.01)
    held = descriptors()
    return sum(count for name, count in held.items() if "pytest" not in name), len(
        asyncio.all_tasks()
    )


async def _begun(session: sb.Session) -> None:
    """Return when the session has the template that it keeps, with its socket."""
    template = session._transport.pool.template  # type: ignore[union-attr]  # on this machine
    async with asyncio.timeout(SOON_S):
        while not (template.is_ready or template.refusal):
            await session.run_code("pass", **POLICY)
            await asyncio.sleep(0.02)


async def _settles(before: tuple[int, int]) -> bool:
    # Server threads of the test keep descriptors until they detect the disconnect.
    for _ in range(50):
        now = await _state()
        if now[0] <= before[0] and now[1] <= before[1]:
            return True
    return False


async def _started(session: sb.Session, served: Services) -> sb.SandboxProcess:
    proc = await session.run(
        program(_TRANSFER, {"port": served.endless.port}),
        script_type="python",
        stdout=True,
        **POLICY,
    )
    assert await anext(proc.iter_stdout_lines()) == "begun"
    return proc


async def _kill(session: sb.Session, served: Services) -> None:
    proc = await _started(session, served)
    proc.kill()
    assert await proc.wait() == 137
    assert [d.host for d in proc.network] == ["allowed.test"]
    assert proc.network[0].bytes_down > 1 << 16


async def _cancel(session: sb.Session, served: Services) -> None:
    code = program(_TRANSFER, {"port": served.endless.port})
    task = asyncio.create_task(session.exec(code, script_type="python", **POLICY))
    await asyncio.sleep(0.5)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _time_out(session: sb.Session, served: Services) -> None:
    code = program(_TRANSFER, {"port": served.endless.port})
    result = await session.exec(code, script_type="python", timeout_s=0.5, **POLICY)
    assert result.termination_reason == "timeout"


@pytest.mark.spec("D7", "G4")
@pytest.mark.parametrize("end", [_kill, _cancel, _time_out])
async def test_a_run_that_ends_during_a_transfer_leaks_nothing(
    net: sb.Session, served: Services, end: Callable
) -> None:
    """No descriptor and no task is left, and the next call works."""
    await _begun(net)
    await end(net, served)
    before = await _state()
    for _ in range(3):
        await end(net, served)
    assert await _settles(before), (before, await _state(), descriptors())
    code = 'out["x"] = send_and_read(("allowed.test", given["port"]))'
    seen = await run_inside(net, code, allow=ALLOW, given={"port": served.echo.port})
    assert seen.out == {"x": "hellobye"}


@pytest.mark.spec("B6", "G4")
async def test_closing_during_a_transfer_leaks_nothing(
    open_isolated: OpenSession, served: Services
) -> None:
    async with open_isolated() as session:
        await _started(session, served)
    before = await _state()
    for _ in range(3):
        async with open_isolated() as session:
            proc = await _started(session, served)
            begun = time.monotonic()
        assert time.monotonic() - begun < SOON_S
        assert proc.termination_reason == "closed"
    assert await _settles(before), (before, await _state(), descriptors())


@pytest.mark.spec("G4")
async def test_a_server_that_never_ends_does_not_keep_a_run_or_its_listeners(
    net: sb.Session, served: Services
) -> None:
    """The program has exited; the server sends nothing and stays connected."""
    code = """
    held = [socket.create_connection(("allowed.test", given["port"])) for _ in range(3)]
    for s in held:
        s.sendall(b"x")
    time.sleep(0.1)
    """
    given = {"port": served.mute.port}
    await _begun(net)
    await run_inside(net, code, allow=ALLOW, given=given)
    before = await _state()
    begun = time.monotonic()
    for _ in range(3):
        seen = await run_inside(net, code, allow=ALLOW, given=given)
        assert [d.bytes_up for d in seen.grants] == [1, 1, 1]
    assert time.monotonic() - begun < SOON_S
    assert await _settles(before), (before, await _state(), descriptors())


@pytest.mark.spec("G4")
async def test_many_runs_leak_nothing(net: sb.Session, served: Services) -> None:
    """Repeat runs with refused, allowed, unused and still open connections."""
    code = """
    held = [socket.create_connection(("allowed.test", given["port"])) for _ in range(3)]
    held.append(socket.create_connection(HTTP))
    attempt(send_and_read, ("other.test", 80)), attempt(send_and_read, ("10.0.0.1", 80))
    os._exit(0)
    """
    text = program(code, {"port": served.echo.port})

    async def rounds(number: int) -> None:
        for _ in range(number):
            await asyncio.gather(
                *(net.run(text, script_type="python", **POLICY) for _ in range(2)),
                net.run("true", **POLICY),
            )

    await rounds(2)
    before = await _state()
    await rounds(6)
    assert await _settles(before), (before, await _state(), descriptors())
