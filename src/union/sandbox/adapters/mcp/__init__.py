"""An MCP server for a sandbox: commands, cells, files and packages as tools.

``sbx mcp`` starts it on stdin and stdout, ``sbx mcp --http PORT`` on a port. ``make_server()``
returns the server object of the SDK, to mount it elsewhere. Works with the SDK ``mcp`` 1.x and 2.x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from union.sandbox.adapters._common import require_framework

require_framework("mcp", extra="mcp")

from union.sandbox._version import __version__  # noqa: E402 - the check comes first
from union.sandbox.adapters.mcp import _sdk  # noqa: E402 - the check comes first
from union.sandbox.adapters.mcp._sandboxes import Sandboxes  # noqa: E402 - the check comes first
from union.sandbox.adapters.mcp._tools import register  # noqa: E402 - the check comes first
from union.sandbox.errors import SandboxUsageError  # noqa: E402 - the check comes first

if TYPE_CHECKING:
    from union.sandbox._core.literals import NetworkMode

__all__ = ["make_server", "serve_http", "serve_stdio"]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def make_server(
    *,
    session: object = None,
    max_sandboxes: int = 1,
    max_timeout_s: float | None = None,
    network_mode: NetworkMode = "blocked",
    **options: Any,
) -> Any:
    """Return an MCP server: ``MCPServer`` of the SDK 2.x, ``FastMCP`` of 1.x.

    The sandbox is opened by the first tool call. Its options are the ceiling: no tool has an
    argument that extends them.

    Args:
        session: a session to use instead of a new one; None (default) for a new one.
        max_sandboxes: the most sandboxes open at a time. With more than 1 (default), each tool has
            an argument ``sandbox``, a name that selects one.
        max_timeout_s: the longest time of one command or cell in seconds, whatever a call requests;
            None (default) for no limit.
        network_mode: as for ``on_device.session()``; ``"blocked"`` by default.
        **options: further arguments of ``on_device.session()``, or of ``remote.session()`` if
            ``endpoint`` is among them.

    """
    if session is not None and max_sandboxes != 1:
        raise SandboxUsageError(
            "session= serves one sandbox; max_sandboxes must be 1", argument="max_sandboxes"
        )
    given = {} if session is not None else {"network_mode": network_mode, **options}
    sandboxes = Sandboxes(session, given, limit=max_sandboxes, max_timeout_s=max_timeout_s)
    server = _sdk.make_server(
        "union-sandbox",
        version=__version__,
        instructions=sandboxes.instructions(),
        on_end=sandboxes.close,
    )
    register(server, sandboxes)
    return server


def serve_stdio(**options: Any) -> None:
    """Serve one client on stdin and stdout until it closes them.

    Args:
        **options: arguments of ``make_server()``.

    """
    _sdk.serve_stdio(make_server(**options))


def serve_http(
    *, host: str = "127.0.0.1", port: int = 8765, token: str = "", **options: Any
) -> None:
    """Serve clients over streamable HTTP at ``http://HOST:PORT/mcp``.

    Args:
        host: the address to listen on; 127.0.0.1 by default.
        port: the port; 8765 by default.
        token: the bearer token that each request must carry. Empty (default) for none, which is
            accepted on a loopback address only.
        **options: arguments of ``make_server()``; ``max_sandboxes`` is 8 by default.

    """
    if not token and host not in _LOOPBACK:
        raise SandboxUsageError(
            f"an MCP server on {host} needs a token",
            argument="token",
            hint="set SANDBOX_SERVER_TOKEN or --token-file, or listen on 127.0.0.1",
        )
    options.setdefault("max_sandboxes", 1 if options.get("session") is not None else 8)
    _sdk.serve_http(make_server(**options), host=host, port=port, token=token)
