"""Sessions of a server whose cleanup is incomplete."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from union.sandbox._core.spec import RunSpec, SessionSpec
from union.sandbox._wire.frames import parse_json
from union.sandbox._wire.values import encode_session
from union.sandbox.errors import SandboxExecutionError, SandboxUsageError, SessionClosedError
from union.sandbox.server._auth import Grant
from union.sandbox.server._config import config_from_arguments
from union.sandbox.server._metrics import Metrics
from union.sandbox.server._server_session import ServerSession
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


def test_a_template_imports_only_modules_that_the_server_lists(tmp_path: Path) -> None:
    argv = ["--work-dir", str(tmp_path), "--preload", "json", "--preload", "ast"]
    server = Sessions(config_from_arguments(argv, {}), Metrics())

    def opened(**options: object) -> tuple[tuple[str, ...] | None, bool]:
        spec = server._spec(encode_session(SessionSpec(backend="userns", **options)))  # type: ignore[arg-type]
        return spec.preload, spec.trusts_preload

    assert opened() == (("json", "ast"), True)
    assert opened(preload=("json",)) == (("json",), True)
    assert opened(preload=("json", "decimal")) == (("json", "decimal"), False)
    assert opened(preload=None) == (None, True)


@pytest.mark.spec("N1")
async def test_a_module_that_only_the_client_names_is_imported_inside(tmp_path: Path) -> None:
    config = config_from_arguments(["--work-dir", str(tmp_path / "w"), "--preload", "json"], {})
    (tmp_path / "w").mkdir(mode=0o700)
    server = Sessions(config, Metrics())
    found = {}
    for name, preload in (("a" * 32, ("json",)), ("b" * 32, ("decimal",))):
        spec = SessionSpec(backend="userns", preload=preload)
        session = await server.open(name, encode_session(spec))
        found[preload] = session.transport.isolation.python
    await server.drain(0)
    assert found == {("json",): "forked", ("decimal",): "started"}


def test_preload_of_a_server_is_checked() -> None:
    with pytest.raises(SandboxUsageError, match="preload"):
        config_from_arguments(["--preload", "a b"], {})


async def test_a_session_that_has_just_opened_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_from_arguments(["--work-dir", str(tmp_path)], {})
    server = Sessions(config, Metrics())
    counts: list[int] = []

    async def opened(_: ServerSession) -> None:
        """Open at once."""

    monkeypatch.setattr(ServerSession, "open", opened)
    monkeypatch.setattr(ServerSession, "hold", lambda _: counts.append(len(server)))
    monkeypatch.setattr(ServerSession, "release", lambda _: None)
    arguments = encode_session(SessionSpec(backend="userns"))
    await asyncio.gather(*(server.open(letter * 32, arguments) for letter in "abc"))
    assert counts == [3, 3, 3], "others still open, or have opened"
    assert len(server) == 3
