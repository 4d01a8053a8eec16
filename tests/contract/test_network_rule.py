"""One network rule on every transport: a session's mode is the ceiling of its calls."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import ISOLATED, REMOTE, session_of

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spec("C9"), pytest.mark.threat(172)]

CELLS = [*ISOLATED, *(REMOTE + way for way in ISOLATED)]

ASK = """
import os, socket, sys
proxy = os.environ.get("HTTP_PROXY")
host, port = "127.0.0.1", PORT
if proxy is None:
    where = (host, port)
else:
    where = ("127.0.0.1", int(proxy.rpartition(":")[2]))
try:
    with socket.create_connection(where, timeout=10) as s:
        if proxy is not None:
            s.sendall(f"CONNECT {host}:{port} HTTP/1.1\\r\\n\\r\\n".encode())
        answer = s.makefile("rb").read()
        if proxy is not None and b" 200 " not in answer:
            sys.exit(print("refused"))
        print(answer.rpartition(b"\\n")[2].decode())
except OSError:
    print("unreachable")
"""


@pytest.fixture(scope="module")
def service() -> Iterator[int]:
    """A service of this machine that greets; returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                with accepted:
                    accepted.sendall(b"hello")

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def allow(*entries: str) -> dict[str, Any]:
    return {"network_mode": "allowlist", "network_allowlist": list(entries)}


async def reached(session: sb.Session, port: int, **network: Any) -> str:
    return (await session.run_code(ASK.replace("PORT", str(port)), **network)).strip()


@pytest.mark.parametrize("cell", CELLS)
async def test_without_a_mode_a_call_may_ask_for_any(cell: str, service: int) -> None:
    entry = f"127.0.0.1:{service}"
    async with session_of(cell) as session:
        assert await reached(session, service) == "unreachable", "blocked by default"
        assert await reached(session, service, **allow(entry)) == "hello"
        assert await reached(session, service, **allow("127.0.0.1:1")) == "refused"
        # On-device this is the host's network; a server with a TCP port lends its own to no run.
        answer = await reached(session, service, network_mode="open")
        assert answer == ("refused" if cell.startswith(REMOTE) else "hello")
        assert await reached(session, service, network_mode="blocked") == "unreachable"
        assert await reached(session, service) == "unreachable", "and blocked again"


@pytest.mark.parametrize("cell", CELLS)
async def test_a_mode_is_the_default_and_the_ceiling(cell: str, service: int) -> None:
    entry = f"127.0.0.1:{service}"
    async with session_of(cell, **allow(entry, "a.example")) as session:
        assert await reached(session, service) == "hello"
        assert await reached(session, service, **allow("a.example")) == "refused"
        assert await reached(session, service, network_mode="blocked") == "unreachable"
        for wider in ({"network_mode": "open"}, allow("127.0.0.1"), allow("b.example")):
            for call in (session.run, session.exec):
                with pytest.raises(sb.PolicyError, match="network"):
                    await call("touch started", **wider)
            with pytest.raises(sb.PolicyError, match="network"):
                await session.run_code("open('started', 'w')", **wider)
        assert not await session.exists("started")
        assert await reached(session, service) == "hello", "the session goes on"


@pytest.mark.parametrize("cell", CELLS)
async def test_blocked_is_a_ceiling_when_it_was_asked_for(cell: str, service: int) -> None:
    async with session_of(cell, network_mode="blocked") as session:
        for wider in ({"network_mode": "open"}, allow(f"127.0.0.1:{service}")):
            with pytest.raises(sb.PolicyError, match="wider than the session") as caught:
                await session.run("touch started", **wider)
            assert "without network_mode" in caught.value.hint
        assert await reached(session, service) == "unreachable"
        assert not await session.exists("started")


@pytest.mark.parametrize("cell", CELLS)
async def test_a_deny_list_holds_in_every_call(cell: str, service: int) -> None:
    entry = f"127.0.0.1:{service}"
    for options in ({}, {"network_mode": "open"}, allow(entry)):
        async with session_of(cell, network_denylist=[entry], **options) as session:
            assert await reached(session, service, **allow(entry)) == "refused"
            if "network_allowlist" not in options:
                assert await reached(session, service, network_mode="open") == "refused"


@pytest.mark.parametrize("cell", ["none", REMOTE + "none"])
@pytest.mark.bare
@pytest.mark.threat(174)
async def test_a_backend_that_isolates_nothing_refuses_lists(cell: str) -> None:
    with pytest.raises(sb.PolicyError, match="cannot be enforced"):
        async with session_of(cell, **allow("a.example")):
            pass
    with pytest.raises(sb.PolicyError, match="cannot be enforced"):
        async with session_of(cell, network_denylist=["a.example"]):
            pass
    async with session_of(cell) as session:
        with pytest.raises(sb.PolicyError, match="cannot be enforced"):
            await session.run("touch started", **allow("a.example"))
        assert not await session.exists("started")
        assert (await session.exec("true", network_mode="open")).ok
