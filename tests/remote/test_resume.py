"""Runs survive broken connections: nothing is lost, duplicated, invented or left behind."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S, descendants, eventually
from tests.remote.conftest import GRACE_S, Proxy, is_idle, remote, sandboxes_of
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox._wire.frames import MAX_CHUNK, WINDOW

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024 * 1024
CUTS = 35
"""With twelve clients and three servers that are killed: fifty random moments."""

# Writes both streams with known content, slowly enough to be interrupted in the middle.
TALK = """
import os, random, sys, time
chance = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else SEED)
for n in range(60):
    os.write(1, bytes([n]) * chance.randrange(1, 60_000))
    os.write(2, b"%d\\n" % n)
    time.sleep(0.004)
sys.exit(SEED % 100)
"""


def expected(seed: int) -> tuple[bytes, bytes]:
    chance = random.Random(seed)
    out = b"".join(bytes([n]) * chance.randrange(1, 60_000) for n in range(60))
    return out, b"".join(b"%d\n" % n for n in range(60))


@pytest.mark.spec("I2")
@pytest.mark.slow
async def test_output_survives_any_number_of_cuts():
    seed = 0
    chance = random.Random(7)
    async with AsyncExitStack() as stack:
        # On a busy machine, many connections in a row are cut before anything was sent over them.
        server = stack.enter_context(ServerProcess("--grace", "60"))
        proxy = await stack.enter_async_context(Proxy(server))
        options = {"endpoint": proxy.endpoint, "lazy": False}
        session = await stack.enter_async_context(remote(server, **options))
        while proxy.cuts < CUTS:
            seed += 1
            runs = [
                asyncio.create_task(_talk(session, n)) for n in (100 * seed + 1, 100 * seed + 2)
            ]
            while not all(run.done() for run in runs):
                await asyncio.sleep(chance.uniform(0.0, 0.2))
                proxy.cut()
            for run in runs:
                n, code, out, err = await run
                assert code == n % 100
                assert hashlib.sha256(out).digest() == hashlib.sha256(expected(n)[0]).digest()
                assert err == expected(n)[1]
    assert proxy.cuts >= CUTS


async def _talk(session: sb.Session, seed: int) -> tuple[int, int, bytes, bytes]:
    proc = await session.run(
        TALK.replace("SEED", str(seed)), script_type="python", stdout=True, stderr=True
    )
    out, err = await proc.communicate()
    return seed, await proc.wait(), out, err


@pytest.mark.spec("I2", "D3")
async def test_stdin_and_signals_survive_cuts(quick: ServerProcess, proxy: Proxy):
    data = os.urandom(3 * MIB)
    async with remote(quick, endpoint=proxy.endpoint, lazy=False) as session:
        cat = await session.run("cat", stdin=sb.PIPE, stdout=True)
        trap = await session.run(
            "trap 'echo got' USR1; trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done",
            stdout=True,
        )
        lines = trap.iter_stdout_lines()
        assert await anext(lines) == "up"

        async def cut_often() -> None:
            for _ in range(10):
                await asyncio.sleep(0.03)
                proxy.cut()

        cutting = asyncio.create_task(cut_often())
        assert cat.stdin is not None

        async def feed() -> None:
            for at in range(0, len(data), 100_000):
                cat.stdin.write(data[at : at + 100_000])
                await cat.stdin.drain()
            cat.stdin.close()

        feeding = asyncio.create_task(feed())
        got = b"".join([chunk async for chunk in cat.iter_stdout()])
        await feeding
        assert got == data
        await cutting
        proxy.cut()
        trap.send_signal(signal.SIGUSR1)  # while there is no connection
        assert await anext(lines) == "got"
        proxy.cut()
        trap.terminate()
        rest = [line async for line in lines]
        assert rest == [], "a signal was obeyed twice"
        assert await trap.wait() == 7


@pytest.mark.spec("I2")
async def test_a_run_is_started_once(quick: ServerProcess, proxy: Proxy):
    """The connection is cut right after the request: it is sent again and must not run again."""
    before = quick.metric("sandbox_runs_started_total")
    async with remote(quick, endpoint=proxy.endpoint, lazy=False) as session:
        for number in range(12):
            run = asyncio.create_task(session.exec(f"echo {number} >> log"))
            for _ in range(number):
                await asyncio.sleep(0)
            if number % 3 == 2:
                await asyncio.sleep(0.002)
            proxy.cut()
            assert (await run).returncode == 0
        assert (await session.exec("cat log")).stdout.split() == [str(n) for n in range(12)]
    assert quick.metric("sandbox_runs_started_total") - before == 13


@pytest.mark.threat(126)
@pytest.mark.spec("I2", "D4")
async def test_a_connection_that_stays_down_is_an_error(quick: ServerProcess, proxy: Proxy):
    async with remote(quick, endpoint=proxy.endpoint, lazy=False) as session:
        proc = await session.run("echo up; sleep 60", stdout=True)
        chunks = proc.iter_stdout()
        assert await anext(chunks) == b"up\n"
        proxy.accepts = False
        proxy.cut()
        began = time.monotonic()
        with pytest.raises(sb.SandboxExecutionError) as caught:
            await proc.wait()
        assert time.monotonic() - began < SOON_S
        assert (caught.value.stage, caught.value.returncode) == ("transport", -1)
        assert proc.returncode is None
        with pytest.raises(sb.SandboxExecutionError):
            await anext(chunks)
        with pytest.raises(sb.errors.SandboxConnectionError) as caught:
            await session.run("true")
        assert caught.value.code == "session-lost"
    assert eventually(lambda: is_idle(quick), within_s=GRACE_S + 5)


@pytest.mark.threat(125)
@pytest.mark.spec("I2", "D4")
async def test_a_session_that_the_server_has_ended_is_lost(quick: ServerProcess, proxy: Proxy):
    async with remote(quick, endpoint=proxy.endpoint, lazy=False) as session:
        proc = await session.run("sleep 60", background=True)
        proxy.accepts = False
        proxy.cut()
        await asyncio.sleep(GRACE_S + 0.3)
        proxy.accepts = True
        with pytest.raises(sb.SandboxExecutionError) as caught:
            await proc.wait()
        assert caught.value.returncode == -1


@pytest.mark.spec("I2", "I3")
async def test_a_silent_connection_applies_back_pressure(quick: ServerProcess, proxy: Proxy):
    """No data flows and nothing is closed: the command is slowed, the server keeps little."""
    async with remote(quick, endpoint=proxy.endpoint, lazy=False) as session:
        proc = await session.run(f"head -c {64 * MIB} /dev/zero", stdout=True)
        chunks = proc.iter_stdout()
        size = len(await anext(chunks))
        proxy.stalled.clear()
        await asyncio.sleep(0.4)
        assert quick.metric("sandbox_buffer_bytes") < WINDOW + MAX_CHUNK + 1024
        proxy.stalled.set()
        async for chunk in chunks:
            size += len(chunk)
        assert size == 64 * MIB


@pytest.mark.spec("I2", "B2")
async def test_a_connection_that_is_cut_while_the_session_closes(
    quick: ServerProcess, proxy: Proxy
):
    for pause in (0, 0, 0.001, 0.003):
        session = await remote(quick, endpoint=proxy.endpoint, lazy=False).open()
        await session.run("sleep 60", background=True)
        proxy.cut()  # not noticed yet
        closing = asyncio.create_task(session.close())
        await asyncio.sleep(pause)
        proxy.cut()
        await asyncio.wait_for(closing, 40)
        assert is_idle(quick)


# Clients that are killed.

CLIENT = """
import asyncio, sys
from union import sandbox as sb
from union.sandbox._wire.frames import MAX_CHUNK, WINDOW
async def main():
    async with sb.remote.session(endpoint=sys.argv[1], token=sys.argv[2]) as sbx:
        print("up", flush=True)
        while True:
            await asyncio.gather(
                sbx.exec("setsid sleep 60 & echo x > f; head -c 300000 /dev/zero", timeout_s=0.3),
                sbx.put_bytes("g", bytes(1_000_000)),
                sbx.run_code("print(2 + 2)"),
            )
asyncio.run(main())
"""


@pytest.mark.threat(125)
@pytest.mark.spec("I2", "G4")
@pytest.mark.slow
def test_killed_clients_leave_nothing_behind(quick: ServerProcess):
    chance = random.Random(11)
    assert quick.token is not None
    for _ in range(3):
        argv = [sys.executable, "-c", CLIENT, quick.endpoint, quick.token]
        clients = [subprocess.Popen(argv, stdout=subprocess.PIPE) for _ in range(4)]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == b"up\n"
        for client in clients:
            time.sleep(chance.uniform(0, 0.25))
            client.kill()
            client.wait()
            assert client.stdout is not None
            client.stdout.close()
    assert eventually(lambda: is_idle(quick), within_s=GRACE_S + 10), sandboxes_of(quick)
    assert quick.metric("sandbox_buffer_bytes") == 0


# Servers that are killed.


@pytest.mark.threat(126)
@pytest.mark.spec("I2", "D4", "G4")
@pytest.mark.slow
async def test_a_killed_server_leaves_errors_and_nothing_else(tmp_path: Path):
    chance = random.Random(13)
    work = tmp_path / "work"
    for _ in range(3):
        server = ServerProcess("--grace", "1", "--work-dir", str(work))
        try:
            async with remote(server, lazy=False) as session:
                runs = [
                    asyncio.create_task(session.exec("head -c 200000 /dev/zero; sleep 60"))
                    for _ in range(4)
                ]
                await asyncio.sleep(chance.uniform(0.0, 0.4))
                family = descendants(server.pid)
                server.process.kill()
                server.process.wait()
                for run in runs:
                    with pytest.raises(sb.SandboxExecutionError) as caught:
                        await run
                    assert caught.value.returncode == -1
            assert eventually(functools.partial(_are_gone, family)), family
        finally:
            server.stop()
    # The next server removes the leftovers of a killed one.
    assert list(work.iterdir())
    with ServerProcess("--work-dir", str(work)) as server:
        async with remote(server) as session:
            await session.run("true")
    assert list(work.iterdir()) == []


def _are_gone(pids: set[int]) -> bool:
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                if file.read().rsplit(")", 1)[1].split()[0] != "Z":
                    return False
        except OSError:
            continue
    return True


def test_the_programs_of_this_file_compile():
    for text in (TALK.replace("SEED", "1"), CLIENT):
        compile(textwrap.dedent(text), "program", "exec")
