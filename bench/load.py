"""Load on one server: ``python -m bench.load``.

Three figures, each with its limit:

- concurrent runs: 2,000 `exec()` at once in one session; all complete.
- first result: a client with the token opens a session and runs a command, while 512 connections
  without a token are held open; 2 s.
- slow names: `put_bytes()` of one session, while four runs of another one look up names that are
  not answered; 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

RUNS, CONNECTIONS, SLOW_RUNS = 2000, 512, 4
MAX_FIRST_S, MAX_PUT_S = 2.0, 0.1
PUTS = 100
WAIT_S = 120.0
SLOW = "slow.example"
SERVER = f"""
import socket, sys, time
real = socket.getaddrinfo
def slow(host, *arguments, **options):
    if isinstance(host, str) and host.rstrip(".").endswith({SLOW!r}):
        time.sleep(10)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")
    return real(host, *arguments, **options)
socket.getaddrinfo = slow  # instead of a name server that does not answer
from union.sandbox.server import main
sys.exit(main())
"""
LOOK_UP = f"""
import socket, threading
def look_up(thread):
    for number in range(40):
        try:
            socket.create_connection((f"n{{thread}}-{{number}}.{SLOW}", 443), timeout=30)
        except OSError:
            pass
for thread in range(16):
    threading.Thread(target=look_up, args=(thread,)).start()
print("looking up", flush=True)
"""


class Address(NamedTuple):
    """A running server."""

    endpoint: str
    token: str


@contextlib.contextmanager
def server() -> Iterator[Address]:
    """Run a server on loopback."""
    token = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(prefix="bench-load-") as place:
        Path(place, "token").write_text(token, encoding="ascii")
        Path(place, "token").chmod(0o600)
        argv = [sys.executable, "-c", SERVER, "--bind", "127.0.0.1:0"]
        argv += ["--work-dir", f"{place}/work", "--token-file", f"{place}/token"]
        argv += ["--max-connections", str(CONNECTIONS)]
        with (
            Path(place, "log").open("w+b") as log,
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log) as process,
        ):
            try:
                if process.stdout is None or not (line := process.stdout.readline()):
                    log.seek(0)
                    raise RuntimeError(f"the server did not start: {log.read().decode()}")
                yield Address(json.loads(line)["ready"][0], token)
            finally:
                process.terminate()


def session(where: Address, *, names: str = "") -> sb.Session:
    """Return a session of the server that may look up ``names``; entering it opens it."""
    return sb.remote.session(
        endpoint=where.endpoint,
        token=where.token,
        lazy=False,
        network_mode="allowlist" if names else "blocked",
        network_allowlist=[names] if names else None,
    )


async def concurrent_runs(where: Address, runs: int) -> tuple[Counter[str], float]:
    """Return how the runs ended, and the seconds until the last one did."""
    async with session(where) as sbx:
        await sbx.exec("true")

        async def one(number: int) -> str:
            try:
                result = await sbx.exec(f"echo {number}")
            except sb.SandboxError as exc:
                return f"{type(exc).__name__}: {exc.code}"
            return "ok" if result.stdout == f"{number}\n" else "wrong output"

        begun = time.perf_counter()
        async with asyncio.timeout(WAIT_S):
            ends = await asyncio.gather(*(one(number) for number in range(runs)))
        return Counter(ends), time.perf_counter() - begun


@contextlib.asynccontextmanager
async def hostile_connections(where: Address, number: int) -> AsyncIterator[Counter[str]]:
    """Hold connections without a token: half of them silent, half with an unfinished request.

    One that the server closes is opened again.
    """
    address = urlsplit(where.endpoint)
    counted: Counter[str] = Counter()
    all_opened = asyncio.Event()

    async def hold(nth: int) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            counted["opened"] += 1
            counted["open"] += 1
            if counted["opened"] >= number:
                all_opened.set()
            try:
                if nth % 2:
                    writer.write(b"GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
                    await writer.drain()
                while await reader.read(4096):
                    pass
            except OSError:
                pass
            finally:
                counted["open"] -= 1
                writer.close()
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(hold(nth)) for nth in range(number)]
    try:
        async with asyncio.timeout(WAIT_S):
            await all_opened.wait()
        yield counted
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_results(where: Address, number: int, rounds: int) -> tuple[list[float], int]:
    """Return the seconds until each new client has its first result, and the connections held."""
    taken = []
    async with hostile_connections(where, number) as counted:
        for _ in range(rounds):
            begun = time.perf_counter()
            async with asyncio.timeout(WAIT_S), session(where) as sbx:
                await sbx.exec("true")
                taken.append(time.perf_counter() - begun)
        return taken, counted["open"]


async def puts_beside_slow_names(where: Address, puts: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each `put_bytes()` without and with the slow names of others."""
    async with session(where) as sbx, session(where, names=f"*.{SLOW}") as other:

        async def measured() -> list[float]:
            taken = []
            for _ in range(puts):
                begun = time.perf_counter()
                await sbx.put_bytes("a", b"x")
                taken.append(time.perf_counter() - begun)
            return taken

        before = await measured()
        runs = [
            await other.run(LOOK_UP, script_type="python", background=True, stdout=sb.PIPE)
            for _ in range(SLOW_RUNS)
        ]
        for run in runs:
            await anext(aiter(run.iter_stdout_lines()))
        await asyncio.sleep(1)  # until the lookups occupy the server's threads
        during = await measured()
        for run in runs:
            run.kill()
        return before, during


async def measure(options: argparse.Namespace) -> bool:
    """Print the figures; return whether each is within its limit."""
    with server() as where:
        ends, taken = await concurrent_runs(where, options.runs)
    is_complete = ends == {"ok": options.runs}
    shown = ", ".join(f"{count} {end}" for end, count in ends.items())
    print(f"concurrent runs  {shown} of {options.runs} in {taken:.1f} s")
    with server() as where:
        firsts, held = await first_results(where, options.connections, 5)
    print(
        f"first result     {max(firsts):.3f} s at most, {statistics.median(firsts):.3f} s median, "
        f"with {held} hostile connections (limit {MAX_FIRST_S:g} s)"
    )
    with server() as where:
        before, during = await puts_beside_slow_names(where, PUTS)
    print(
        f"slow names       put_bytes {max(during) * 1000:.1f} ms at most, "
        f"{statistics.median(during) * 1000:.1f} ms median (limit {MAX_PUT_S * 1000:g} ms; without "
        f"slow names {max(before) * 1000:.1f} and {statistics.median(before) * 1000:.1f} ms)"
    )
    return is_complete and max(firsts) <= MAX_FIRST_S and max(during) <= MAX_PUT_S


def main(arguments: list[str] | None = None) -> int:
    """Measure; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=RUNS, help="default: %(default)s")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="default: %(default)s")
    return 0 if asyncio.run(measure(parser.parse_args(arguments))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
