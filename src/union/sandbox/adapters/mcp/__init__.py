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

__all__ = ["make_server", "serve_gateway", "serve_http", "serve_stdio"]

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


def serve_gateway(
    *,
    endpoint: str,
    cert: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    is_child: bool = False,
    **options: Any,
) -> None:
    """Serve the clients of a sandbox server over streamable HTTP, each with its own key.

    The bearer token of a request is the key with which its sandboxes are opened on the server.

    Args:
        endpoint: the address of the sandbox server, as for ``remote.session()``.
        cert: as for ``remote.session()``; None (default) for the system's trust store.
        host: the address to listen on; 127.0.0.1 by default.
        port: the port; 8765 by default, 0 for a free one.
        tls_cert: file with the certificate for clients; None (default) for no encryption.
        tls_key: file with its key; None (default) if ``tls_cert`` contains it.
        is_child: whether to print the address on stdout and to end with stdin; False by default.
        **options: arguments of ``make_server()`` for each key; ``max_sandboxes`` is 8 by default.

    """
    import asyncio

    from union.sandbox._core.optional_deps import require
    from union.sandbox.adapters.mcp import _gateway

    require("aiohttp", extra="remote", what="a remote session")
    options.setdefault("max_sandboxes", 8)

    def make(key: str | None) -> Any:
        return make_server(endpoint=endpoint, cert=cert, token=key, **options)

    tls = {"ssl_certfile": tls_cert, "ssl_keyfile": tls_key}
    sock = _gateway.listen(host, port)

    async def run() -> None:
        app = _gateway.Gateway(endpoint=endpoint, cert=cert, host=host, make=make)
        given = {name: path for name, path in tls.items() if path is not None}
        await _gateway.serve(app, sock, is_child=is_child, tls=given)

    asyncio.run(run())
