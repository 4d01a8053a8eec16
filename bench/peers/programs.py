"""The programs that contenders run: the same commands and bytes for all of them."""

from __future__ import annotations

from typing import Final

MIB: Final = 1024 * 1024
SIZE: Final = 64 * MIB
"""Size of one file, and of one command's output."""
DOWNLOAD: Final = 256 * MIB
SNIPPET: Final = "print(2+2)"
ANSWER: Final = "4\n"
WRITE: Final = f"head -c {SIZE} /dev/zero"
NAME: Final = "bench.test"
"""A name that resolves to the server on loopback, where a contender supports that."""

_CLIENT: Final = """
import os, socket, time
host, port, size, by_proxy = {asked!r}
near = (host, port)
if by_proxy:
    near = os.environ["https_proxy"].split("//")[1].rstrip("/").rsplit(":", 1)

def ask(s, line):
    s.sendall(f"{{line}} HTTP/1.1\\r\\nHost: {{host}}:{{port}}\\r\\n\\r\\n".encode())
    head = b""
    while not head.endswith(b"\\r\\n\\r\\n"):
        head += s.recv(1) or exit("the connection was closed")
    if b" 200 " not in head.splitlines()[0]:
        exit(f"{{line}}: {{head!r}}")

socket.getaddrinfo("127.0.0.1", port)  # loads what looking up needs, which is not the request
begun = time.perf_counter()
with socket.create_connection(near) as s:
    if by_proxy:
        ask(s, f"CONNECT {{host}}:{{port}}")
    ask(s, f"GET /{{size}}")
    room, got = bytearray(1 << 20), 0
    while got < size and (read := s.recv_into(room)):
        got += read
print(got, time.perf_counter() - begun)
"""


def client(host: str, port: int, size: int, *, by_proxy: bool = False) -> str:
    """Return a program that fetches ``size`` bytes and prints the received size and its seconds.

    The program measures itself, because other measures cover the cost of starting it.
    """
    return _CLIENT.format(asked=(host, port, size, by_proxy))


def seconds_of(printed: str | bytes, size: int) -> float:
    """Return the seconds that a client has printed; raise if bytes are missing."""
    got, seconds = printed.split()
    expect(int(got) == size, f"{int(got)} bytes came through instead of {size}")
    return float(seconds)


def expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads like assert
    """Raise if a contender did not do the work, so that it is not measured."""
    if not holds:
        raise RuntimeError(otherwise)


def importing(module: str) -> str:
    """Return a program that prints the seconds of one import."""
    return f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
