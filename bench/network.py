"""What a network policy costs: a run under an allow-list, and bytes through its doors."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.measure import Row, rows, take_turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.cases import Bench
    from bench.measure import Operation

NAME = "bench.test"
MIB = 1024 * 1024
SIZE = 256 * MIB
SERVER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
data = bytes(1 << 20)
while True:
    with listener.accept()[0] as s:
        try:
            for _ in range(int(sys.argv[1]) >> 20):
                s.sendall(data)
        except OSError:
            pass
"""
CLIENT = """
import socket, time
with socket.create_connection(({host!r}, {port})) as s:
    room, size = bytearray(1 << 20), 0
    begun = time.perf_counter()
    while got := s.recv_into(room):
        size += got
    print(size, time.perf_counter() - begun)
"""


@contextmanager
def _server() -> Iterator[int]:
    """A process of its own, so that it does not share this one's lock."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(SIZE)], stdout=subprocess.PIPE)
    try:
        if process.stdout is None:
            raise RuntimeError("no pipe")
        with process.stdout as stdout:
            yield int(stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextmanager
def _name_on_loopback() -> Iterator[None]:
    """Lead NAME to 127.0.0.1 in this process, which is where the doors resolve."""
    real = socket.getaddrinfo

    def lookup(host: Any, *args: Any, **options: Any) -> Any:
        return real("127.0.0.1" if host in {NAME, NAME.encode()} else host, *args, **options)

    socket.getaddrinfo = lookup
    try:
        yield
    finally:
        socket.getaddrinfo = real


async def allowlisted_run(bench: Bench) -> list[Row]:
    """The smallest command under an allow-list, against the same command blocked."""

    def running(**options: Any) -> Operation:
        async def operation() -> None:
            process = await bench.session.run("true", stdout=True, **options)
            await process.communicate()
            if process.returncode != 0:
                raise RuntimeError(f"true ended with {process.returncode}")

        return operation

    contenders = {
        "blocked": running(),
        "allowlist": running(network_mode="allowlist", network_allowlist=[NAME]),
    }
    taken = await take_turns(contenders, rounds=bench.rounds(300), warm_up=5)
    found = rows("run('true') by network (bare: blocked)", taken, unit="ms")
    blocked, listed = (row.samples for row in found)
    print(f"an allow-list adds {_median_difference(blocked, listed):.2f} ms at the median")
    return found


def _median_difference(before: tuple[float, ...], after: tuple[float, ...]) -> float:
    # By pairs of neighbours in time, so that what disturbed both cancels out.
    pairs = sorted(b - a for a, b in zip(before, after, strict=True))
    return pairs[len(pairs) // 2]


async def door_throughput(bench: Bench) -> list[Row]:
    """256 MiB from a server on loopback: with the host's network, and through each door."""
    through_proxy = CLIENT.replace(
        "begun =",
        's.sendall(b"CONNECT {name}:{port} HTTP/1.1\\r\\n\\r\\n"); s.recv(39, socket.MSG_WAITALL)\n'
        "    begun =",
    )

    def loading(source: str, **options: Any) -> Operation:
        async def operation() -> float:
            size, seconds = (await bench.session.run_code(source, **options)).split()
            if int(size) != SIZE:
                raise RuntimeError(f"{size} bytes came through instead of {SIZE}")
            return float(seconds)

        return operation

    policy = {"network_mode": "allowlist", "network_allowlist": [NAME, "127.0.0.1"]}
    with _server() as port, _name_on_loopback():
        contenders = {
            "direct": loading(CLIENT.format(host="127.0.0.1", port=port), network_mode="open"),
            "door": loading(CLIENT.format(host=NAME, port=port), **policy),
            "http proxy": loading(
                through_proxy.replace("{port})", "3128)").format(
                    host="127.0.0.1", port=port, name=NAME
                ),
                **policy,
            ),
        }
        taken = await take_turns(contenders, rounds=bench.rounds(12), warm_up=1)
    return rows("256 MiB from loopback (bare: open)", taken, unit="MiB/s", mib=SIZE / MIB)
