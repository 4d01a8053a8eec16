"""A session that is used from other event loops and threads, and attached to by its id."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import REMOTE, SERVED, eventually, host_dir, sandbox_processes
from tests.servers import shared_server

from union import sandbox as sb

if TYPE_CHECKING:
    from tests.conftest import OpenSession

Work = "Callable[[], Coroutine[Any, Any, Any]]"


async def elsewhere(work: Work) -> Any:
    """Run a coroutine in an event loop of its own, in another thread."""
    return await asyncio.to_thread(lambda: asyncio.run(work()))


@pytest.mark.spec("R3")
async def test_calls_from_another_loop(sbx: sb.Session) -> None:
    async def work() -> tuple[Any, ...]:
        result = await sbx.exec("echo exec")
        text = await sbx.run_code("print('code')")
        await sbx.put_bytes("f", b"data")
        names = [entry.path for entry in await sbx.list_dir()]
        assert sbx.fs_allowlist()["read_write"]
        return result.stdout, text, await sbx.get_bytes("f"), names

    assert await elsewhere(work) == ("exec\n", "code\n", b"data", ["f"])
    assert (await sbx.exec("cat f")).stdout == "data"


@pytest.mark.spec("R3")
async def test_a_process_from_another_loop(sbx: sb.Session) -> None:
    async def work() -> tuple[Any, ...]:
        process = await sbx.run("echo up; cat; echo end >&2", stdin=True, stdout=True, stderr=True)
        lines = process.iter_stdout_lines()
        first = await anext(lines)
        assert process.stdin is not None
        process.stdin.write(b"typed\n")
        await process.stdin.drain()
        process.stdin.close()
        rest = [line async for line in lines]
        errors = [chunk async for chunk in process.iter_stderr()]
        return first, rest, b"".join(errors), await process.wait()

    assert await elsewhere(work) == ("up", ["typed"], b"end\n", 0)


@pytest.mark.spec("R3", "D3")
async def test_signals_from_a_thread_without_a_loop(sbx: sb.Session) -> None:
    process = await sbx.run("echo up; sleep 60", stdout=True)
    assert await anext(process.iter_stdout_lines()) == "up"
    thread = threading.Thread(target=process.kill)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert await asyncio.wait_for(process.wait(), 40) == 137


@pytest.mark.spec("R3", "D7")
async def test_cancelling_a_call_from_another_loop_kills_the_command(sbx: sb.Session) -> None:
    async def work() -> str:
        task = asyncio.create_task(sbx.exec("touch up; sleep 60"))
        while not await sbx.exists("up"):
            await asyncio.sleep(0.02)
        task.cancel()
        found = await asyncio.gather(task, return_exceptions=True)
        return type(found[0]).__name__

    assert await elsewhere(work) == "CancelledError"
    assert await asyncio.to_thread(lambda: eventually(lambda: not sandbox_processes()))
    assert (await sbx.exec("echo usable")).stdout == "usable\n"


@pytest.mark.spec("R3", "D5")
async def test_errors_reach_the_caller_in_its_loop(sbx: sb.Session) -> None:
    async def work() -> None:
        with pytest.raises(sb.SandboxCommandError):
            await sbx.exec("false", check=True)
        with pytest.raises(FileNotFoundError):
            await sbx.get_bytes("missing")
        with pytest.raises(sb.UnknownArgumentError):
            await sbx.exec("true", timeout=3)  # type: ignore[arg-type]  # the mistake

    await elsewhere(work)


@pytest.mark.spec("R3", "B2")
async def test_closing_from_another_loop(open_session: OpenSession) -> None:
    session = await open_session().open()
    work = host_dir(session)
    await session.run("sleep 60", background=True)
    await elsewhere(session.close)
    assert not sandbox_processes()
    with pytest.raises(sb.SessionClosedError):
        await session.exec("true")
    assert work


@pytest.mark.spec("R3", "B8")
def test_a_loop_that_does_not_run_is_named(open_session: OpenSession) -> None:
    with asyncio.Runner() as first, asyncio.Runner() as second:
        session = first.run(open_session().open())
        with pytest.raises(sb.SandboxUsageError, match="does not run now") as caught:
            second.run(session.exec("true"))
        assert caught.value.code == "wrong-event-loop"
        first.run(session.close())


@pytest.mark.spec("R3")
async def test_attaching_by_id(open_session: OpenSession, way: str) -> None:
    async with open_session() as session, open_session() as other:
        assert session.id != other.id
        assert session.id == session.id
        await session.put_bytes("f", b"shared")

        async def work() -> tuple[bytes, str]:
            found = attached(way, session.id)
            if found is not session:
                await found.open()
            assert found.id == session.id
            data = await found.get_bytes("f")
            out = (await found.exec("cat f; echo more >> f")).stdout
            if found is not session:
                await found.close()
            return data, out

        assert await elsewhere(work) == (b"shared", "shared")
        assert await session.get_bytes("f") == b"sharedmore\n", "the owner's session goes on"
        gone = session.id
    if not way.startswith(REMOTE):
        with pytest.raises(sb.SessionClosedError, match="no session with the id") as caught:
            sb.on_device.attach(gone)
        assert caught.value.code == "no-such-session"
    else:
        late = await attached(way, gone).open()
        with pytest.raises(sb.SandboxError):
            await late.exec("true")
        await late.close()


def attached(way: str, session_id: str) -> sb.Session:
    if not way.startswith(REMOTE):
        return sb.on_device.attach(session_id)
    server = shared_server(SERVED)
    return sb.remote.attach(session_id, endpoint=server.endpoint, token=server.token)


@pytest.mark.spec("R3", "C10")
@pytest.mark.parametrize("value", [None, 3, b"x", "../x", ""])
def test_what_is_no_id(value: Any) -> None:
    with pytest.raises((sb.SandboxUsageError, sb.SessionClosedError)):
        sb.on_device.attach(value)


@pytest.mark.spec("R3", "C10")
@pytest.mark.parametrize("value", [None, 3, b"x", "../x", ""])
def test_what_is_no_id_of_a_remote_session(value: Any) -> None:
    with pytest.raises(sb.SandboxUsageError):
        sb.remote.attach(value, endpoint="http://127.0.0.1:1")
