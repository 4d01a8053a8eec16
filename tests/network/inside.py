"""Run programs inside a sandbox; return their output and the recorded decisions."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from union import sandbox as sb

_PRELUDE = """
import errno, json, os, socket, ssl, struct, sys, threading, time
out = {}
HTTP, SOCKS, DNS = ("127.0.0.1", 3128), ("127.0.0.1", 1080), ("127.0.0.53", 53)

def attempt(function, *args, **options):
    # Return [result or name of the error, duration in seconds].
    begun = time.monotonic()
    try:
        found = function(*args, **options)
    except OSError as exc:
        found = errno.errorcode.get(exc.errno, type(exc).__name__)
        if isinstance(exc, (socket.gaierror, ssl.SSLError)):
            found = type(exc).__name__
    except Exception as exc:
        found = type(exc).__name__
    return [found, time.monotonic() - begun]

def read_all(s):
    data = b""
    try:
        while piece := s.recv(65536):
            data += piece
    except ConnectionResetError:
        if not data:
            raise
    return data

def send_and_read(address, data=b"hello", end=True):
    # Connect once with one address family, send data, return all received data.
    with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as s:
        s.settimeout(10)
        s.connect(tuple(address))
        try:
            s.sendall(data)
            end and s.shutdown(socket.SHUT_WR)
        except OSError as exc:
            # A write after a reset fails with EPIPE or ENOTCONN.
            if exc.errno in (errno.EPIPE, errno.ENOTCONN):
                raise ConnectionResetError(errno.ECONNRESET, "reset") from exc
            raise
        return read_all(s).decode("latin-1")

def status(data):
    # Return the first status code of the HTTP proxy for these bytes.
    text = send_and_read(HTTP, data if isinstance(data, bytes) else data.encode("latin-1"))
    return int(text.split()[1]) if text else 0

def tunnel(host, port):
    # Return a socket through the HTTP proxy; raise PermissionError if it refuses.
    s = socket.create_connection(HTTP, timeout=10)
    s.sendall(f"CONNECT {host}:{port} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n".encode())
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        piece = s.recv(1)
        if not piece:
            break
        head += piece
    if b" 200 " not in head:
        raise PermissionError(13, head.decode("latin-1"))
    return s

def socks(name, port, command=1):
    # Return the reply code of the SOCKS proxy.
    raw = name if isinstance(name, bytes) else name.encode()
    with socket.create_connection(SOCKS, timeout=10) as s:
        place = bytes((3, len(raw))) + raw + struct.pack(">H", port)
        s.sendall(b"\\x05\\x01\\x00" + bytes((5, command, 0)) + place)
        s.recv(2)
        return s.recv(10)[1]
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report of the program and the handle of its run."""

    out: dict[str, Any]
    proc: sb.SandboxProcess

    @property
    def refusals(self) -> list[Any]:
        return [decision for decision in self.proc.network if not decision.allowed]

    @property
    def grants(self) -> list[Any]:
        return [decision for decision in self.proc.network if decision.allowed]


async def run_inside(
    session: sb.Session,
    code: str,
    *,
    allow: list[str] | None = None,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    """Run a program with an allow-list, or with the network of ``options`` if it is None."""
    if allow is not None:
        options |= {"network_mode": "allowlist", "network_allowlist": allow}
    options.setdefault("timeout_s", 30)
    proc = await session.run(program(code, given), script_type="python", **options)
    stdout, stderr = await proc.communicate_text()
    assert proc.returncode == 0, f"{proc.returncode} {proc.termination_reason}\n{stdout}\n{stderr}"
    return Outcome(json.loads(stdout.splitlines()[-1]), proc)


def program(code: str, given: dict[str, Any] | None = None) -> str:
    """Return the complete source of a program."""
    encoded = json.dumps(json.dumps(given or {}))
    return (
        f"{_PRELUDE}\ngiven = json.loads({encoded})\n{textwrap.dedent(code)}\n"
        "print(json.dumps(out), flush=True)\n"
    )
