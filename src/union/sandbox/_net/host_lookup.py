"""Look up a name with the host's resolver: the name itself first, then its search domains.

Kubernetes configures resolvers to try search domains first for names with fewer than five dots. A
public name then costs several queries, and a name of the cluster could take its place. A name with
a dot in it is therefore looked up as it is; the search domains follow only if it does not exist.
The hosts file comes before both.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Final

__all__ = ["look_up"]

_RESOLV_CONF: Final = Path("/etc/resolv.conf")
_HOSTS: Final = Path("/etc/hosts")
_MISSING: Final = (socket.EAI_NONAME, socket.EAI_NODATA)


def look_up(name: str) -> list[Any]:
    """Return what ``socket.getaddrinfo`` returns for a name; raise OSError if there is nothing."""
    if 0 < name.count(".") < _ndots() and not name.endswith(".") and not _is_in_hosts(name):
        try:
            return _getaddrinfo(f"{name}.")
        except socket.gaierror as exc:
            if exc.errno not in _MISSING:
                raise
    return _getaddrinfo(name)


def _getaddrinfo(name: str) -> list[Any]:
    return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # The host's resolver does without it, too.


def _ndots() -> int:
    """Return how many dots a name needs to be tried before the search domains; 1 by default."""
    found = 1
    for line in _lines(_RESOLV_CONF):
        words = line.split()
        for word in words[1:] if words[:1] == ["options"] else ():
            key, _, value = word.partition(":")
            if key == "ndots" and value.isdecimal():
                found = int(value)
    return found


def _is_in_hosts(name: str) -> bool:
    wanted = name.lower()
    return any(wanted in line.partition("#")[0].lower().split()[1:] for line in _lines(_HOSTS))
