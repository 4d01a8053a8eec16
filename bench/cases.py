"""The benchmarks: what is compared, and with what. The first contender of each is the bare one."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.measure import Operation, Row, rows, sustained, take_turns
from bench.network import allowlisted_run, door_throughput

from union import sandbox as sb

BARE = "bare"
OURS = "userns"
PEER = "bwrap"
MIB = 1024 * 1024
SIZE = 64 * MIB
WORKERS = 4
SUSTAINED_S = 5.0
WRITE_64_MIB = f"head -c {SIZE} /dev/zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every benchmark may use."""

    session: sb.Session
    scale: float
    """Multiplies rounds and seconds; less than 1 for a quick look."""

    def rounds(self, number: int) -> int:
        """Rounds after scaling; at least three."""
        return max(3, round(number * self.scale))


@asynccontextmanager
async def bench_session() -> AsyncIterator[sb.Session]:
    """The session that all benchmarks but ``open`` share."""
    async with sb.on_device.session(backend=OURS) as session:
        yield session


async def _spawn(*argv: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {process.returncode}")
    return out


async def _shell(command: str) -> bytes:
    process = await asyncio.create_subprocess_shell(
        command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{command!r} ended with {process.returncode}")
    return out


async def _peer(*command: str) -> dict[str, Operation]:
    """``bwrap`` with the least it can do: a mount and a user namespace, the host's own root.

    Left out where it is not installed or not allowed to work.
    """
    program = shutil.which("bwrap")
    if program is None:
        return {}

    async def operation() -> None:
        await _spawn(program, "--ro-bind", "/", "/", *command)

    try:
        await operation()
    except RuntimeError as exc:
        print(f"no row for {PEER}: {exc}", file=sys.stderr)
        return {}
    return {PEER: operation}


async def open_session(bench: Bench) -> list[Row]:
    """Opening a session with a usable venv, against a bare Python start."""

    async def bare() -> None:
        await _spawn(sys.executable, "-c", "pass")

    async def ours() -> None:
        session = await sb.on_device.session(backend=OURS).open()
        opened.append(session)

    opened: list[sb.Session] = []

    async def ours_then_close() -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await ours()
        taken = loop.time() - begun
        await opened.pop().close()
        return taken

    taken = await take_turns({BARE: bare, OURS: ours_then_close}, rounds=bench.rounds(40))
    return rows("open a session (bare: python -c pass)", taken, unit="ms")


async def run_true(bench: Bench) -> list[Row]:
    """The smallest command, its output captured."""
    contenders = await _true(bench.session)
    taken = await take_turns(contenders, rounds=bench.rounds(200))
    return rows("run('true')", taken, unit="ms")


async def _true(session: sb.Session) -> dict[str, Operation]:
    async def bare() -> None:
        await _shell("true")

    async def ours() -> None:
        process = await session.run("true", stdout=True)
        await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"true ended with {process.returncode}")

    return {BARE: bare, OURS: ours, **await _peer("true")}


async def run_code(bench: Bench) -> list[Row]:
    """Python source."""
    source = "print(2+2)"

    async def bare() -> None:
        if await _spawn(sys.executable, "-c", source) != b"4\n":
            raise RuntimeError("a wrong answer")

    async def ours() -> None:
        if await bench.session.run_code(source) != "4\n":
            raise RuntimeError("a wrong answer")

    contenders = {BARE: bare, OURS: ours, **await _peer(sys.executable, "-c", source)}
    taken = await take_turns(contenders, rounds=bench.rounds(40))
    return rows("run_code('print(2+2)')", taken, unit="ms")


async def many_at_once(bench: Bench) -> list[Row]:
    """How many commands a second, four at a time."""
    rates = await sustained(
        await _true(bench.session), workers=WORKERS, seconds=max(1.0, SUSTAINED_S * bench.scale)
    )
    return rows(f"run('true'), {WORKERS} at once", rates, unit="runs/s")


async def throughput(bench: Bench) -> list[Row]:
    """64 MiB of output read in chunks."""

    async def bare() -> None:
        process = await asyncio.create_subprocess_shell(
            WRITE_64_MIB, stdout=asyncio.subprocess.PIPE, limit=MIB
        )
        if process.stdout is None:
            raise RuntimeError("no pipe")
        size = 0
        while chunk := await process.stdout.read(256 * 1024):
            size += len(chunk)
        await process.wait()
        _expect(size)

    async def ours() -> None:
        process = await bench.session.run(WRITE_64_MIB, stdout=True)
        size = 0
        async for chunk in process.iter_stdout():
            size += len(chunk)
        await process.wait()
        _expect(size)

    taken = await take_turns({BARE: bare, OURS: ours}, rounds=bench.rounds(12), warm_up=1)
    return rows("64 MiB of stdout", taken, unit="MiB/s", mib=SIZE / MIB)


def _expect(size: int) -> None:
    if size != SIZE:
        raise RuntimeError(f"{size} bytes came through instead of {SIZE}")


async def put_file(bench: Bench) -> list[Row]:
    """64 MiB into the work dir, against a plain file in the same file system."""
    data = os.urandom(MIB) * (SIZE // MIB)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(bench.session.work_dir)) as place:
        path = os.path.join(place, "plain")

        async def bare() -> None:
            await asyncio.to_thread(_write, path, data)

        async def ours() -> None:
            await bench.session.put_bytes("big", data)

        taken = await take_turns({BARE: bare, OURS: ours}, rounds=bench.rounds(12), warm_up=1)
    return rows("put 64 MiB", taken, unit="MiB/s", mib=SIZE / MIB)


async def get_file(bench: Bench) -> list[Row]:
    """64 MiB out of the work dir."""
    data = os.urandom(MIB) * (SIZE // MIB)
    await bench.session.put_bytes("big", data)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(bench.session.work_dir)) as place:
        path = os.path.join(place, "plain")
        _write(path, data)

        async def bare() -> None:
            _expect(len(await asyncio.to_thread(_read, path)))

        async def ours() -> None:
            _expect(len(await bench.session.get_bytes("big")))

        taken = await take_turns({BARE: bare, OURS: ours}, rounds=bench.rounds(12), warm_up=1)
    return rows("get 64 MiB", taken, unit="MiB/s", mib=SIZE / MIB)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


async def import_time(bench: Bench) -> list[Row]:
    """Importing the package, against importing asyncio; each by a fresh interpreter's own clock."""

    def importing(module: str) -> Operation:
        source = (
            f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
        )

        async def operation() -> float:
            return float(await _spawn(sys.executable, "-I", "-c", source))

        return operation

    contenders = {
        BARE: importing("asyncio"),
        "union.sandbox": importing("union.sandbox"),
        "on_device": importing("union.sandbox.on_device"),
    }
    taken = await take_turns(contenders, rounds=bench.rounds(20), warm_up=1)
    return rows("import (bare: import asyncio)", taken, unit="ms")


Case = Callable[[Bench], Awaitable[list[Row]]]
CASES: tuple[Case, ...] = (
    open_session,
    run_true,
    run_code,
    many_at_once,
    throughput,
    put_file,
    get_file,
    import_time,
    allowlisted_run,
    door_throughput,
)
