"""Attacks on the end of a run's output: another run of the session holds the pipe."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from union import sandbox as sb

if TYPE_CHECKING:
    from tests.conftest import OpenSession

HOLDER = """
import os, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind("sock")
listener.listen()
print("ready", flush=True)
kept = []
while True:
    connection, _ = listener.accept()
    fds = socket.recv_fds(connection, 1, 2)[1]
    kept.append(fds)
    connection.send(b"x")
    connection.close()
    if ACTION == "write" and os.fork() == 0:
        while True:
            os.write(fds[0], b"forged\\n" * 1000)
"""
GIVER = """
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect("sock")
print("given", flush=True)
sys.stdout.write("x" * SIZE)
sys.stdout.flush()
socket.send_fds(connection, [b"x"], [1, 2])
connection.recv(1)
"""


async def _holder(session: sb.Session, action: str) -> sb.SandboxProcess:
    code = HOLDER.replace("ACTION", repr(action))
    proc = await session.run(code, script_type="python", background=True, stdout=sb.PIPE)
    async for line in proc.iter_stdout_lines():
        assert line.strip() == "ready"
        break
    return proc


@pytest.mark.threat(147)
@pytest.mark.parametrize("size", [0, 50_000, 900_000])
async def test_a_run_returns_although_a_sibling_holds_its_output(
    jailed: OpenSession, size: int
) -> None:
    async with jailed() as jail:
        holder = await _holder(jail, "hold")
        async with asyncio.timeout(30):
            result = await jail.exec(
                GIVER.replace("SIZE", str(size)), script_type="python", timeout_s=20
            )
        assert (result.returncode, result.termination_reason) == (0, ""), result.stderr
        assert result.stdout == "given\n" + "x" * size, "no byte of its own is lost"
        assert holder.returncode is None, "the control: the sibling still holds the pipe"


@pytest.mark.threat(147)
async def test_a_run_returns_although_a_sibling_writes_to_its_output_for_ever(
    jailed: OpenSession,
) -> None:
    async with jailed() as jail:
        await _holder(jail, "write")
        async with asyncio.timeout(30):
            result = await jail.exec(
                GIVER.replace("SIZE", "10"), script_type="python", timeout_s=20
            )
        assert result.stdout.startswith("given\n" + "x" * 10)
        assert "forged" in result.stdout, "the control: the sibling wrote to it"
        assert (await jail.exec("echo works")).stdout == "works\n"


@pytest.mark.threat(147)
async def test_a_slow_reader_gets_all_of_a_held_output(jailed: OpenSession) -> None:
    """The output waits for its reader in the pipe; that a sibling holds it changes nothing."""
    async with jailed() as jail:
        await _holder(jail, "hold")
        size = 3_000_000
        code = GIVER.replace("SIZE", str(size))
        proc = await jail.run(code, script_type="python", background=True, stdout=sb.PIPE)
        read = 0
        async with asyncio.timeout(60):
            async for chunk in proc.iter_stdout():
                read += len(chunk)
                if read < 1_000_000:
                    await asyncio.sleep(0.02)
            await proc.wait()
        assert read == len("given\n") + size
        assert proc.returncode == 0


@pytest.mark.threat(147)
async def test_a_timeout_returns_although_a_sibling_holds_the_output(jailed: OpenSession) -> None:
    async with jailed() as jail:
        await _holder(jail, "hold")
        code = GIVER.replace("SIZE", "10") + "import time; time.sleep(600)"
        async with asyncio.timeout(30):
            result = await jail.exec(code, script_type="python", timeout_s=2)
        assert result.termination_reason == "timeout"
        assert result.stdout == "given\n" + "x" * 10


@pytest.mark.threat(147)
async def test_a_reader_that_comes_late_gets_all_of_a_held_output(jailed: OpenSession) -> None:
    async with jailed() as jail:
        await _holder(jail, "hold")
        code = GIVER.replace("SIZE", "600000")
        proc = await jail.run(code, script_type="python", background=True, stdout=sb.PIPE)
        await asyncio.sleep(1.0)  # longer than a held pipe is waited for
        async with asyncio.timeout(30):
            out, _ = await proc.communicate()
        assert len(out) == 600_006
