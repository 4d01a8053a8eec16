"""Helpers of the local process mode tests: servers and their processes."""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import descendants, eventually

if TYPE_CHECKING:
    from union import sandbox as sb

LONG_S = 30.0
"""A limit that only a hang reaches."""


def server_of(sbx: sb.SandboxSession) -> int:
    """Return the process id of an owner's server."""
    handle: Any = sbx._handle
    assert handle.pid is not None
    return handle.pid


def home_of(sbx: sb.SandboxSession) -> str:
    return os.path.dirname(sbx.endpoint.removeprefix("unix://"))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def family(pid: int) -> set[int]:
    return {pid, *descendants(pid)}


def all_gone(pids: set[int], *, within_s: float = LONG_S) -> bool:
    return eventually(lambda: not any(map(is_alive, pids)), within_s=within_s)


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=LONG_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def request(
    sbx: sb.SandboxSession, method: str, path: str, *, token: str | None, body: object = None
) -> tuple[int, dict[str, Any]]:
    """Send one plain request to the server of a local session."""
    connection = _Unix(sbx.endpoint.removeprefix("unix://"))
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text.startswith(b"{") else {}
    finally:
        connection.close()
