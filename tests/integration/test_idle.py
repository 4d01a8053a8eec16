"""``LocalTransport.idle()`` waits until no command of the session runs."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
from tests.conftest import WAYS, host_dir, marked, session_of

from union.sandbox.on_device._transport import LocalTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb

WITHIN_S = 30


@pytest.fixture(params=marked(*WAYS))
async def sbx(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    async with session_of(request.param) as session:
        yield session


def transport_of(session: sb.Session) -> LocalTransport:
    transport = session._transport
    assert isinstance(transport, LocalTransport)
    return transport


def runs_of(session: sb.Session) -> int:
    return len(transport_of(session)._opened().runner._runs)


async def idle(session: sb.Session) -> None:
    async with asyncio.timeout(WITHIN_S):
        await transport_of(session).idle()


async def test_a_session_without_commands_is_idle(sbx: sb.Session):
    await idle(sbx)
    assert runs_of(sbx) == 0


async def test_a_command_that_exec_returned_from_is_released(sbx: sb.Session):
    for _ in range(5):
        assert (await sbx.exec("true")).ok
        await idle(sbx)
        assert runs_of(sbx) == 0


async def test_a_running_command_is_waited_for(sbx: sb.Session):
    process = await sbx.run("cat", stdin=True, background=True)
    waiting = asyncio.create_task(idle(sbx))
    # Another command starts and ends meanwhile, so the event loop has had many turns.
    assert (await sbx.exec("true")).ok
    assert not waiting.done()
    assert runs_of(sbx) >= 1
    assert process.stdin is not None
    process.stdin.close()
    await waiting
    assert process.returncode == 0
    assert runs_of(sbx) == 0


async def test_a_command_that_starts_meanwhile_is_waited_for(sbx: sb.Session):
    first = await sbx.run("cat", stdin=True, background=True)
    waiting = asyncio.create_task(idle(sbx))
    await asyncio.sleep(0)
    second = await sbx.run("cat", stdin=True, background=True)
    assert first.stdin is not None
    first.stdin.close()
    await first.wait()
    assert (await sbx.exec("true")).ok
    assert not waiting.done()
    second.kill()
    await waiting
    assert second.termination_reason == "signal"
    assert runs_of(sbx) == 0


async def test_cancelling_the_wait_does_not_end_the_command(sbx: sb.Session):
    process = await sbx.run("cat", stdin=True, background=True)
    waiting = asyncio.create_task(idle(sbx))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert process.returncode is None
    assert await process.communicate(b"alive") == (b"alive", b"")
    assert process.returncode == 0
    await idle(sbx)


async def test_nothing_inside_writes_to_the_work_dir_of_an_idle_session(sbx: sb.Session):
    path = os.path.join(host_dir(sbx), "written")

    async def grows() -> bool:
        before = os.path.getsize(path)
        assert (await sbx.exec("true")).ok
        return os.path.getsize(path) > before

    loop = "while :; do echo more >> written; done"
    writer = await sbx.run(f"{loop} & echo ready; wait", stdout=True, background=True)
    async for _ in writer.iter_stdout_lines():
        break
    async with asyncio.timeout(WITHIN_S):
        while not os.path.exists(path) or not await grows():
            await asyncio.sleep(0.01)
    writer.kill()
    await idle(sbx)
    assert not await grows()

    # The end of the command is the end of the children that it leaves behind.
    assert (await sbx.exec(f"{loop} & true")).ok
    await idle(sbx)
    assert not await grows()


def _open_in_venv(session: sb.Session) -> int:
    """Count the descriptors of this process for directories of the session's venv."""
    venv, found = os.path.join(host_dir(session), ".sandbox-venv"), 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(venv)
        except FileNotFoundError:  # the descriptor of this listing
            continue
    return found


async def test_a_session_without_commands_for_long_keeps_no_directory_of_its_venv_open(
    sbx: sb.Session,
):
    sandboxes = transport_of(sbx).pool.sandboxes
    for _ in range(2):
        assert (await sbx.exec("echo works")).stdout == "works\n"
        assert await sbx.run_code("print('works')") == "works\n"
        assert 0 < _open_in_venv(sbx) < 8
        await idle(sbx)
        sandboxes._expires_at = 0.0  # as if the time had passed
        sandboxes._expire()
        assert _open_in_venv(sbx) == 0
