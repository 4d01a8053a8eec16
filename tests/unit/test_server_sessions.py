"""Sessions of a server whose cleanup is incomplete."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from union.sandbox._core.spec import RunSpec, SessionSpec
from union.sandbox._wire.frames import parse_json
from union.sandbox._wire.values import encode_session
from union.sandbox.errors import SandboxExecutionError, SessionClosedError
from union.sandbox.server._auth import Grant
from union.sandbox.server._config import config_from_arguments
from union.sandbox.server._metrics import Metrics
from union.sandbox.server._sessions import Sessions

if TYPE_CHECKING:
    from pathlib import Path

NAME = "n" * 32


@pytest.fixture
async def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    config = config_from_arguments(["--work-dir", str(tmp_path / "w")], {})
    (tmp_path / "w").mkdir(mode=0o700)
    found = Sessions(config, Metrics())
    session = await found.open(NAME, encode_session(SessionSpec(backend="userns")))
    real = session.transport.aclose

    async def incomplete() -> None:
        await real()
        raise SandboxExecutionError("still there", stage="stream", code="close-incomplete")

    monkeypatch.setattr(session.transport, "aclose", incomplete)
    return found


async def test_the_client_gets_the_error_and_the_session_is_removed(sessions: Sessions) -> None:
    with pytest.raises(SandboxExecutionError, match="still there"):
        await sessions.close_by_name(NAME)
    assert len(sessions) == 0
    with pytest.raises(SessionClosedError):
        sessions.get(NAME)


async def test_shutdown_logs_the_error_and_completes(
    sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    await sessions.drain(0)
    assert len(sessions) == 0
    assert "cleanup is incomplete" in caplog.text


async def test_a_command_for_a_closing_session_is_refused(sessions: Sessions) -> None:
    session = sessions.get(NAME)
    closing = sessions.close_soon(session, "lease")
    await asyncio.sleep(0)
    run = session.launch(1, RunSpec(kind="shell", text="true"), Grant())
    (event,) = (parse_json(data) for _, data in run.log.events.unsent(1 << 20))
    assert event["refused"]["code"] == "session-lost"
    await asyncio.wait({closing})
