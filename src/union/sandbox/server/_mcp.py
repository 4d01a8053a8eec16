"""The MCP endpoint of a server: a process of its own that is a client of the server.

It opens sessions with the keys that its own clients send, so it has no rights of its own, and a
defect in it or in the MCP SDK is outside the server's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
from typing import TYPE_CHECKING, Final

from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from union.sandbox.server._config import Config

__all__ = ["McpEndpoint", "serving_mcp"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_MODULE: Final = "union.sandbox.adapters.mcp"
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0


class McpEndpoint:
    """The process of the MCP endpoint."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self._process = process
        self._is_ending = False
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: Config, sockets: Sequence[socket.socket], fingerprint: str | None
    ) -> McpEndpoint:
        """Start the process and wait until it listens.

        Raises:
            SandboxUsageError: it has ended, such as without the packages that it needs.

        """
        bind = config.mcp
        if bind is None:
            raise AssertionError("the server has no MCP endpoint")
        command = [
            *(sys.executable, "-P", "-m", _MODULE),
            *("--endpoint", _own_endpoint(sockets, fingerprint)),
            *("--host", bind.host, "--port", str(bind.port)),
        ]
        for entry in config.mcp_allow:
            command += ["--allow", entry]
        if config.tls_cert is not None and config.tls_key is not None:
            command += ["--tls-cert", config.tls_cert, "--tls-key", config.tls_key]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                assert process.stdout is not None  # noqa: S101 - it is a pipe
                line = await process.stdout.readline()
        if not line:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise SandboxUsageError(
                "the MCP endpoint did not start", argument="--mcp", hint="its message is above"
            )
        return cls(process, json.loads(line)["ready"])

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call ``on_end`` if the process ends by itself."""

        async def wait() -> None:
            code = await self._process.wait()
            if not self._is_ending:
                _LOGGER.error("the MCP endpoint has ended", extra={"exit_code": code})
                on_end()

        self._watch = asyncio.get_running_loop().create_task(wait())

    async def close(self) -> None:
        """End the process."""
        self._is_ending = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._watch is not None:
            await self._watch


@contextlib.asynccontextmanager
async def serving_mcp(
    config: Config,
    sockets: Sequence[socket.socket],
    fingerprint: str | None,
    on_end: Callable[[], None],
) -> AsyncIterator[str | None]:
    """Run the endpoint, if the server has one; yield its URL. ``on_end``: it ended by itself."""
    if config.mcp is None:
        yield None
        return
    endpoint = await McpEndpoint.start(config, sockets, fingerprint)
    endpoint.watch(on_end)
    try:
        yield endpoint.url
    finally:
        await endpoint.close()


def _own_endpoint(sockets: Sequence[socket.socket], fingerprint: str | None) -> str:
    """Return an address at which this machine reaches the server."""
    for sock in sockets:
        if sock.family == socket.AF_UNIX:
            return f"unix://{sock.getsockname()}"
    host, port = sockets[0].getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared only
    shown = f"[{host}]" if ":" in host else host
    if fingerprint is None:
        return f"http://{shown}:{port}"
    return f"https://{shown}:{port}#{fingerprint.replace(':', '=')}"
