"""Every spelling that opens a session."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.conftest import OpenSession


@pytest.mark.spec("A6", "B1")
async def test_await_opens(open_session: OpenSession) -> None:
    session = await open_session()
    try:
        assert isinstance(session, sb.Session)
        assert (await session.exec("echo open")).stdout == "open\n"
        assert await session is session
    finally:
        await session.close()
    with pytest.raises(sb.SessionClosedError):
        await session


@pytest.mark.spec("A6", "B2")
async def test_a_block_without_await(open_session: OpenSession) -> None:
    made = open_session()
    async with made as sbx:
        assert sbx is made
        assert (await sbx.exec("echo open")).stdout == "open\n"
    with pytest.raises(sb.SessionClosedError):
        await sbx.exec("true")


@pytest.mark.spec("A6", "B2")
async def test_a_block_after_open(open_session: OpenSession) -> None:
    async with await open_session().open() as sbx:
        assert (await sbx.exec("echo open")).stdout == "open\n"
    with pytest.raises(sb.SessionClosedError):
        await sbx.exec("true")


@pytest.mark.spec("A6")
async def test_async_with_await(open_session: OpenSession) -> None:
    async with await open_session() as sbx:
        assert (await sbx.exec("echo open")).stdout == "open\n"
    assert "closed" in repr(sbx)


@pytest.mark.spec("A6", "B2")
async def test_a_session_is_entered_once(open_session: OpenSession) -> None:
    async with open_session() as sbx:
        with pytest.raises(sb.SessionClosedError, match="another `async with` block"):
            async with sbx:
                pass
        assert (await sbx.exec("echo still")).stdout == "still\n"


@pytest.mark.spec("B8", "C10")
async def test_use_from_another_loop_or_thread(open_session: OpenSession) -> None:
    found: list[BaseException] = []

    def elsewhere(work: Coroutine[Any, Any, object]) -> None:
        try:
            asyncio.run(work)
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            found.append(exc)

    async with open_session() as sbx:
        for call in (lambda: sbx.exec("true"), sbx.close, lambda: sbx.put_bytes("f", b"")):
            thread = threading.Thread(target=lambda: elsewhere(call()), name="other-thread")  # noqa: B023
            thread.start()
            await asyncio.to_thread(thread.join)
        assert (await sbx.exec("echo still")).stdout == "still\n"
    assert len(found) == 3
    for exc in found:
        assert isinstance(exc, sb.SandboxUsageError)
        assert exc.code == "wrong-event-loop"
        assert "other-thread" in str(exc)
        assert "run_coroutine_threadsafe" in exc.hint


@pytest.mark.spec("C10")
def test_another_asynchronous_library(open_session: OpenSession) -> None:
    session = open_session()

    async def enter() -> None:
        async with session:
            raise AssertionError

    for work in (enter, session.open):
        with pytest.raises(sb.SandboxUsageError, match="trio") as caught:
            trio.run(work)
        assert caught.value.code == "no-event-loop"


@pytest.mark.spec("C10")
def test_no_loop_at_all(open_session: OpenSession) -> None:
    opening = open_session().open()
    with pytest.raises(sb.SandboxUsageError, match="no asyncio event loop") as caught:
        opening.send(None)
    assert "asyncio.run" in caught.value.hint
