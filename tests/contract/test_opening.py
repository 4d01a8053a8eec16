"""Every spelling that opens a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from union import sandbox as sb

if TYPE_CHECKING:
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
