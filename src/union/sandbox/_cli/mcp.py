"""``sbx mcp``: an MCP server for a sandbox with the options of the command line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from union.sandbox._cli.options import session_arguments, variables
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["mcp"]


def mcp(options: argparse.Namespace) -> int:
    """Serve until the client disconnects, or with ``--http`` until the process is interrupted."""
    from union.sandbox.adapters import mcp as adapter

    given: dict[str, Any] = {
        **session_arguments(options),
        "env": variables(options) or None,
        "max_timeout_s": options.timeout,
    }
    if options.max_sandboxes is not None:
        given["max_sandboxes"] = options.max_sandboxes
    if options.http is None:
        adapter.serve_stdio(**given)
        return 0
    host, port = _address(options.http)
    shown = f"[{host}]" if ":" in host else host
    sys.stderr.write(f"sbx: serving MCP at http://{shown}:{port}/mcp\n")
    adapter.serve_http(host=host, port=port, token=_token(options.token_file), **given)
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise SandboxUsageError(
            f"--http must be PORT or HOST:PORT, not {text!r}", argument="--http"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def _token(path: str | None) -> str:
    if path is None:
        return os.environ.get("SANDBOX_SERVER_TOKEN", "")
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except OSError as exc:
        raise SandboxUsageError(
            f"--token-file {path}: {exc.strerror}", argument="--token-file"
        ) from exc
    if not token:
        raise SandboxUsageError(f"--token-file {path}: the file is empty", argument="--token-file")
    return token
