"""The jobs of the soak: small tasks with known results."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from union import sandbox as sb

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

__all__ = ["JOBS", "Job", "Scene", "WrongError"]

OTHER_CAUSES = frozenset({"timeout", "oom", "limit", "closed"})
BURST = 40
BIG = 3 * 2**20
FETCH = """
import socket, sys
s = socket.create_connection(("127.0.0.1", 3128), timeout=20)
lines = b"GET http://127.0.0.1:%d/ HTTP/1.1", b"Host: 127.0.0.1:%d", b"Connection: close", b"", b""
s.sendall(b"\\r\\n".join(lines))
received = b""
while piece := s.recv(65536):
    received += piece
print(received.split(b" ", 2)[1].decode(), received.count(b"served"))
"""


class WrongError(Exception):
    """A result differs from the expected one."""

    is_killed = False
    """Whether the result is an end by SIGKILL, which a kill of the soak can cause."""
    is_lost = False
    """Whether an interpreter has ended, which a kill of the soak can cause."""


@dataclass(slots=True)
class Scene:
    """One session, and the resources that a job may use with it."""

    session: sb.Session
    chance: random.Random
    port: int
    """The port of an HTTP service on loopback."""
    number: int = 0
    runs: int = 0

    def next(self) -> int:
        """Return a number that no other job of this session uses."""
        self.number += 1
        return self.number

    def expect(self, found: object, wanted: object, what: str) -> None:
        """Raise unless the result is the expected one."""
        if found != wanted:
            wrong = WrongError(f"{what}: {str(found)[:300]!r} instead of {str(wanted)[:100]!r}")
            wrong.is_killed = (
                isinstance(found, tuple) and found[0] == 137 and OTHER_CAUSES.isdisjoint(found)
            )
            raise wrong


async def burst(scene: Scene) -> None:
    for _ in range(BURST):
        proc = await scene.session.run("true")
        scene.expect((await proc.wait(), proc.termination_reason), (0, ""), "true")
        scene.runs += 1


async def shell(scene: Scene) -> None:
    number, code = scene.next(), scene.chance.randrange(0, 120)
    done = await scene.session.exec(f"echo out {number}; echo err >&2; exit {code}")
    scene.expect(
        (done.returncode, done.stdout, done.stderr, done.termination_reason),
        (code, f"out {number}\n", "err\n", ""),
        "shell",
    )
    scene.runs += 1


async def python(scene: Scene) -> None:
    number = scene.next()
    result = await scene.session.exec(f"print({number} ** 2)", script_type="python")
    scene.expect(
        (result.returncode, result.stdout), (0, f"{number**2}\n"), f"python {result.stderr}"
    )
    scene.runs += 1


async def big_output(scene: Scene) -> None:
    proc = await scene.session.run(f"head -c {BIG} /dev/zero | tr '\\0' x", stdout=True)
    size, digest = 0, hashlib.sha256()
    async for chunk in proc.iter_stdout():
        size += len(chunk)
        digest.update(chunk)
    code = await proc.wait()
    wanted = hashlib.sha256(b"x" * BIG).hexdigest()
    scene.expect((code, size, digest.hexdigest()), (0, BIG, wanted), "big output")
    scene.runs += 1


async def standard_input(scene: Scene) -> None:
    data = scene.chance.randbytes(scene.chance.randrange(1, 300_000))
    proc = await scene.session.run("cat; exit 7", stdin=sb.PIPE, stdout=True)
    out, _ = await proc.communicate(data)
    scene.expect((proc.returncode, out == data), (7, True), "stdin")
    scene.runs += 1


async def time_out(scene: Scene) -> None:
    limit = scene.chance.uniform(0.02, 0.2)
    done = await scene.session.exec("sleep 30 & setsid sleep 30 & wait", timeout_s=limit)
    found = (done.returncode in {137, 143}, done.termination_reason)
    scene.expect(found, (True, "timeout"), f"time-out {done.returncode}")
    scene.runs += 1


async def cancelled(scene: Scene) -> None:
    task = asyncio.create_task(scene.session.exec("sleep 30"))
    await asyncio.sleep(scene.chance.uniform(0, 0.05))
    task.cancel()
    try:
        done = await task
    except asyncio.CancelledError:
        scene.runs += 1
    else:
        raise WrongError(f"a cancelled sleep returned {done}")


async def killed(scene: Scene) -> None:
    proc = await scene.session.run("echo on; sleep 30", stdout=True)
    line = await anext(proc.iter_stdout_lines(), None)
    if line is None:
        await proc.wait()  # Raises if there was no real exit.
    proc.kill()
    code = await proc.wait()
    scene.expect((line, code, proc.termination_reason), ("on", 137, "signal"), "kill")
    scene.runs += 1


async def files(scene: Scene) -> None:
    number = scene.next()
    data = scene.chance.randbytes(scene.chance.randrange(1, 100_000))
    await scene.session.put_bytes(f"in-{number}", data)
    done = await scene.session.exec(f"mkdir -p d && cp in-{number} d/out-{number}")
    scene.expect((done.returncode, done.stderr), (0, ""), "cp")
    back = await scene.session.get_bytes(f"d/out-{number}")
    scene.expect(back == data, wanted=True, what="file")
    await scene.session.remove(f"in-{number}")
    await scene.session.remove("d", recursive=True)
    scene.runs += 1


async def terminal(scene: Scene) -> None:
    rows, cols = scene.chance.randrange(2, 90), scene.chance.randrange(2, 300)
    proc = await scene.session.run(
        "stty size; read -r a; echo got $a", pty=(rows, cols), stdin=b"x\n"
    )
    out, _ = await proc.communicate()
    text = out.decode().replace("\r\n", "\n")
    found = (proc.returncode, f"{rows} {cols}\n" in text, "got x\n" in text)
    scene.expect(found, (0, True, True), f"terminal {text!r}")
    scene.runs += 1


async def network(scene: Scene) -> None:
    allow, wanted = scene.chance.choice(
        ((f"127.0.0.1:{scene.port}", "200 1\n"), ("127.0.0.2", "403 0\n"))
    )
    done = await scene.session.exec(
        FETCH % (scene.port, scene.port),
        script_type="python",
        network_mode="allowlist",
        network_allowlist=[allow],
    )
    scene.expect((done.returncode, done.stdout), (0, wanted), f"network {done.stderr}")
    scene.runs += 1


async def missing(scene: Scene) -> None:
    proc = await scene.session.run(["/no/such/program"])
    scene.expect(await proc.wait(), 127, "a program that is not there")
    scene.runs += 1


async def cells(scene: Scene) -> None:
    number = scene.next()
    try:
        async with scene.session.context(interrupt_grace_s=30) as ctx:
            await _cell(ctx, f"x = {number}")
            for step in range(1, 6):
                result = await _cell(ctx, "x += 1; print('a' * x); display(x); x")
                found = (result.stdout, [shown.text for shown in result.results])
                wanted = number + step
                scene.expect(found, ("a" * wanted + "\n", [str(wanted)] * 2), "cell")
            result = await _cell(ctx, "while True: pass", scene.chance.uniform(0.02, 0.1))
            scene.expect(result.ended, "timeout", "cell with a time-out")
            saved = await ctx.save()
            await _cell(ctx, "x = None")
            await ctx.restore(saved)
            scene.expect(await ctx.get("x"), number + 5, "restored variable")
            await ctx.restart()
            scene.expect((await _cell(ctx, "'x' in globals()")).text, "False", "restart")
    except sb.SandboxCellError as exc:
        raise _lost(exc.result) from exc
    scene.runs += 1


async def shell_cells(scene: Scene) -> None:
    number = scene.next()
    async with scene.session.context("bash", interrupt_grace_s=30) as shell:
        await _cell(shell, f"n={number}; cd /tmp")
        result = await _cell(shell, "echo $n $PWD; (exit 7)")
        scene.expect((result.stdout, result.exit_code), (f"{number} /tmp\n", 7), "shell cell")
        task = asyncio.create_task(shell.run("sleep 30"))
        await asyncio.sleep(scene.chance.uniform(0, 0.05))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        scene.expect((await _cell(shell, "echo $n")).stdout, f"{number}\n", "after a cancel")
    scene.runs += 1


async def _cell(ctx: sb.Context, code: str, timeout_s: float | None = None) -> sb.CellResult:
    """Run a cell; raise if its interpreter has ended."""
    result = await ctx.run(code, timeout_s=timeout_s)
    if result.state == "lost":
        raise _lost(result)
    return result


def _lost(result: sb.CellResult) -> WrongError:
    wrong = WrongError(f"cell: {result.ended} {result.reason} {result.error}")
    wrong.is_lost = result.state == "lost"
    return wrong


async def at_once(scene: Scene) -> None:
    async def one() -> None:
        number = scene.next()
        done = await scene.session.exec(f"echo {number}")
        scene.expect((done.returncode, done.stdout), (0, f"{number}\n"), "at once")
        scene.runs += 1

    found: list[Any] = await asyncio.gather(*(one() for _ in range(6)), return_exceptions=True)
    for each in found:
        if isinstance(each, WrongError):
            raise each
    for each in found:
        if isinstance(each, BaseException):
            raise each


@dataclass(frozen=True, slots=True)
class Job:
    """A task, and its weight relative to the others."""

    name: str
    do: Callable[[Scene], Awaitable[None]]
    weight: int


JOBS = (
    Job("burst", burst, 20),
    Job("shell", shell, 8),
    Job("python", python, 5),
    Job("big output", big_output, 2),
    Job("stdin", standard_input, 4),
    Job("time-out", time_out, 3),
    Job("cancel", cancelled, 4),
    Job("kill", killed, 4),
    Job("files", files, 5),
    Job("terminal", terminal, 3),
    Job("network", network, 4),
    Job("missing program", missing, 3),
    Job("at once", at_once, 3),
    Job("cells", cells, 4),
    Job("shell cells", shell_cells, 3),
)
