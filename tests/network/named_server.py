"""A sandbox-server that resolves some names to loopback, and no others.

Usage: python named_server.py NAME,NAME SERVER-ARGUMENT...
"""

from __future__ import annotations

import ipaddress
import runpy
import socket
import sys
from typing import Any

_REAL = socket.getaddrinfo


def resolve_as(names: list[str]) -> None:
    """Replace the resolver of this process."""

    def lookup(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name in names:
            return _REAL("127.0.0.1", port, *args, **options)
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise socket.gaierror(socket.EAI_NONAME, "no such name") from None
        return _REAL(host, port, *args, **options)

    socket.getaddrinfo = lookup


if __name__ == "__main__":
    resolve_as(sys.argv.pop(1).split(","))
    runpy.run_module("union.sandbox.server", run_name="__main__", alter_sys=True)
