"""Servers for these tests, and a proxy whose connections can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

import pytest
from tests.conftest import WAYS, _beyond_spares, children_of
from tests.servers import ServerProcess

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

GRACE_S = 6.0
"""Long enough for a client that was cut off to return on a busy machine."""


def sandboxes_of(server: ServerProcess) -> set[int]:
    """Return the processes of a server's sandboxes, without those kept ready."""
    spares = int(server.metric("sandbox_spares"))
    return {p for pid in children_of(server.pid) for p in _beyond_spares(pid, spares)}


def work_dirs_of(server: ServerProcess) -> list[str]:
    return sorted(path.name for path in server.work_dir.iterdir())


def is_idle(server: ServerProcess) -> bool:
    """Return whether nothing is left of any session."""
    return (
        server.metric("sandbox_sessions") == 0
        and not sandboxes_of(server)
        and not work_dirs_of(server)
    )


def remote(server: ServerProcess, *, endpoint: str = "", **options: object) -> sb.Session:
    reach = {"endpoint": endpoint or server.endpoint, "token": server.token}
    return sb.remote.session(**{**reach, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def quick() -> Iterator[ServerProcess]:
    """Provide a server with a short grace period; one per test worker."""
    backends = [word for way in WAYS for word in ("--backend", way)]
    with ServerProcess(*backends, "--grace", str(GRACE_S), "--drain", "2") as server:
        yield server


class Proxy:
    """A proxy whose connections can all be cut at once, without a close handshake."""

    def __init__(self, server: ServerProcess) -> None:
        self._target = server.address
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Server | None = None
        self.cuts = 0
        self.accepts = True
        self.stalled = asyncio.Event()
        self.stalled.set()

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listening is not None
        self._listening.close()
        self.stalled.set()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    @property
    def endpoint(self) -> str:
        assert self._listening is not None
        host, port = self._listening.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    @property
    def is_up(self) -> bool:
        return bool(self._writers)

    def cut(self) -> None:
        self.cuts += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not self.accepts:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._writers -= both

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            while data := await reader.read(65536):
                await self.stalled.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@pytest.fixture
async def proxy(quick: ServerProcess) -> AsyncIterator[Proxy]:
    async with Proxy(quick) as found:
        yield found
