"""One soak: workers with their sessions, the killer, and the measurements after each round."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any, Self, TypedDict

from scripts.soaking.excuses import Target
from scripts.soaking.kills import Killer
from scripts.soaking.load import JOBS, Scene
from scripts.soaking.server import OwnServer
from scripts.soaking.state import State, descendants, left_by, measure, started_at

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher
from union.sandbox._session import threads

if TYPE_CHECKING:
    import random
    from collections.abc import Coroutine

__all__ = ["Soak", "Summary"]

WAYS = (("userns", 6), ("bubblewrap", 3), ("remote", 3))
JOBS_EACH = (1, 6)
KILL_EVERY_S = (0.2, 1.2)
VICTIMS_EACH_ROUND = 2
READY_WITHIN_S = 5.0
# Limits that distinguish an end from a hang: the soak has the lowest priority on a loaded machine.
GONE_WITHIN_S = 60.0
SETTLED_WITHIN_S = 60.0
LOOK_WITHIN_S = 120.0
LOOK_ATTEMPTS = 3
CONNECT_WITHIN_S = 30.0
CLEANED_WITHIN_S = 60
LEVEL = ("descriptors", "threads", "processes", "mounts", "groups", "dirs")
WARM_ROUNDS = 2
WARM_S = 300.0
"""Memory is measured after a third of the rounds, or after this time if it is shorter."""
GROWTH_KIB_PER_1000 = 32.0
"""Limit of memory growth per 1,000 commands: less than one leaked object per command."""
STEPS_KIB = 4 * 1024
"""Growth that is ignored: Python reserves memory in steps of 1 MiB, and returns none that is still
used in part. What malloc holds without use is returned before each measurement."""
WARM_UP_SEED = 1
GIVEN_UP = "opening given up: server killed"
PATIENCE_S = 60
STUCK_S = 120.0


class Summary(TypedDict):
    """The result of a soak."""

    ok: bool
    problems: list[str]
    """Why it is not ok: wrong results, leftovers, growth."""
    seconds: float
    rounds: int
    runs: int
    sessions: int
    kills: int
    killed: dict[str, int]
    jobs: dict[str, int]
    errors: dict[str, int]
    wrong: list[str]
    before: State
    after: State
    resident_kib: list[int]
    runs_at: list[int]
    growth_per_1000_runs: dict[str, float]
    bounds: Bounds
    unknown: int
    left: list[str]


class Bounds(TypedDict):
    """The bounds of memory growth; set before the soak starts."""

    warm_rounds: int
    kib_per_1000_runs: float
    steps_kib: int


class Soak:
    """A running soak: ``round`` applies load for a while and then measures."""

    def __init__(self, chance: random.Random, *, workers: int, kills: bool) -> None:
        self._chance = chance
        self._workers = workers
        self._kills = kills
        self.killer = Killer(chance)
        self.runs = self.sessions = 0
        self.jobs: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.left: list[str] = []
        self.looks: list[State] = []
        self.reported_at = -1
        self._runs_at: list[int] = []
        self._round_s = 0.0
        self._hosts: list[int] = []
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._service = await asyncio.start_server(_answer, "127.0.0.1", 0)
        self.port = self._service.sockets[0].getsockname()[1]
        self.server = OwnServer()
        # Start every thread of the pools now: later ones would look like growth.
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(64)))
        for pool in (threads.files, threads.names, threads.outputs, threads.removal):
            # A call with a separate key gets a separate thread, up to the pool's limit.
            await asyncio.gather(*(pool.run(object(), time.sleep, 0.05) for _ in range(64)))
        await self._warm_up()
        return self

    async def _warm_up(self) -> None:
        """Do each job once, here and on the server: what it loads is not growth."""
        for way in ("userns", "bubblewrap", "remote"):
            async with self._session(way, self._options()) as session:
                scene = Scene(session, type(self._chance)(WARM_UP_SEED), self.port)
                for job in JOBS:
                    await _patiently(job.do(scene))

    async def __aexit__(self, *_: object) -> None:
        if not self.wrong:
            self.left += await self.server.left()
        self.server.stop()
        self._hosts += self.server.pids
        self._service.close()
        await self._service.wait_closed()

    # One round.

    async def round(self, seconds: float) -> None:
        """Apply load for some seconds; then close everything and measure."""
        self._stop.clear()
        self._round_s = seconds
        asyncio.get_running_loop().call_later(seconds, self._stop.set)
        # Each worker has its own generator, so that it does not depend on the order of events.
        tasks = [
            asyncio.create_task(self._work(self._own_chance()), name=f"worker {n}")
            for n in range(self._workers)
        ]
        if self._kills:
            tasks.append(asyncio.create_task(self._kill(), name="killer"))
            tasks.append(asyncio.create_task(self._victims(seconds), name="victims"))
        done, pending = await asyncio.wait(tasks, timeout=seconds + STUCK_S)
        for task in pending:
            self._note("stuck", "".join(map(str, task.get_stack())) + repr(task))
            task.cancel()
        for task in done:
            if task.exception() is not None:
                self._note(task.get_name(), _traceback(task.exception()))
        await self.killer.settle()
        await self._look()

    def _own_chance(self) -> random.Random:
        return type(self._chance)(self._chance.random())

    def _note(self, what: str, detail: str) -> None:
        if len(self.wrong) < 50:
            self.wrong.append(f"{what}: {detail}")

    async def _work(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            way = chance.choices(*zip(*WAYS, strict=True))[0]
            options = self._options()
            if chance.random() < 0.2:
                options["resources"] = sb.Resources(memory="256Mi")
            begun = time.monotonic()
            session, endpoint = self._session(way, options), self.server.endpoint
            target = Target(is_remote=way == "remote", place=endpoint if way == "remote" else None)
            try:
                if not await self._open(session, target):
                    continue
                if way != "remote":
                    name = os.path.basename(session.work_dir)
                    target = Target(is_remote=False, place=name)
                await self._use(session, way, chance, target)
            except Exception as exc:  # noqa: BLE001 - every error is classified
                self._judge(f"{way} session", exc, begun, target)
            finally:
                await self._close(session, way, target)

    def _options(self) -> dict[str, Any]:
        return {
            "network_mode": "allowlist",
            "network_allowlist": [f"127.0.0.1:{self.port}", "127.0.0.2"],
        }

    async def _open(self, session: sb.Session, target: Target) -> bool:
        """Open a session; return False if its server was killed, which it would wait for."""
        opening = asyncio.ensure_future(session.open())
        while not (await asyncio.wait([opening], timeout=1))[0]:
            if target.is_remote and target.place != self.server.endpoint:
                opening.cancel()
                await asyncio.wait([opening])
        if opening.cancelled():
            self.killer.excuses.used[GIVEN_UP] += 1
            return False
        await opening
        return True

    def _session(self, way: str, options: dict[str, Any]) -> sb.Session:
        if way == "remote":
            reach = {"endpoint": self.server.endpoint, "token": self.server.token}
            return sb.remote.session(
                **reach, connect_timeout_s=CONNECT_WITHIN_S, lazy=False, **options
            )
        return sb.on_device.session(backend=way, **options)

    async def _use(
        self, session: sb.Session, way: str, chance: random.Random, target: Target
    ) -> None:
        self.sessions += 1
        scene = Scene(session, chance, self.port)
        for _ in range(chance.randint(*JOBS_EACH)):
            if self._stop.is_set():
                return
            job = chance.choices(JOBS, [job.weight for job in JOBS])[0]
            before, begun = scene.runs, time.monotonic()
            try:
                await _patiently(job.do(scene))
                self.jobs[job.name] += 1
            except Exception as exc:  # noqa: BLE001 - every error is classified
                self._judge(f"{way} {job.name}", exc, begun, target)
            self.runs += scene.runs - before

    async def _close(self, session: sb.Session, way: str, target: Target) -> None:
        begun = time.monotonic()
        try:
            await _patiently(session.close())
        except Exception as exc:  # noqa: BLE001 - every error is classified
            self._judge(f"{way} close", exc, begun, target)

    def _judge(self, what: str, exc: Exception, begun: float, target: Target) -> None:
        """Record the error unless a kill that hit this session explains it."""
        if not self.killer.excuses.excuses(exc, target, begun):
            self._note(what, _traceback(exc))

    # Kills.

    async def _kill(self) -> None:
        chance = self._own_chance()
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), chance.uniform(*KILL_EVERY_S))
                return
            self.killer.strike(self.server.processes, self.server.endpoint)
            if not self.server.is_running():
                await self.server.start_again()

    async def _victims(self, seconds: float) -> None:
        """Kill whole host programs while they serve connections and use the server."""
        chance = self._own_chance()
        until = time.monotonic() + seconds
        for _ in range(VICTIMS_EACH_ROUND):
            if time.monotonic() > until - 1:
                return
            argv = [sys.executable, "-m", "scripts.soaking.victim"]
            argv += [self.server.endpoint, self.server.token, str(self.port)]
            program = await asyncio.create_subprocess_exec(
                *argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            assert program.stdout is not None
            ready = b""
            with contextlib.suppress(TimeoutError):  # Its server may be killed meanwhile.
                ready = await asyncio.wait_for(program.stdout.readline(), READY_WITHIN_S)
            await asyncio.sleep(chance.uniform(0, 0.5))
            below = {pid: started_at(pid) for pid in descendants(program.pid)}
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(signal.SIGKILL)
            self.killer.note("host program" if ready else "host program, at its start")
            await program.communicate()
            self._hosts.append(program.pid)
            gone = await _eventually(
                lambda below=below: all(started_at(p) != s for p, s in below.items() if s),
                GONE_WITHIN_S,
            )
            if not gone:
                left = [p for p, s in below.items() if s and started_at(p) == s]
                self._note("host program", f"outlived by {left}")

    # Measurements.

    def _launchers(self) -> set[int]:
        launcher = Launcher._current  # noqa: SLF001 - the soak needs internals
        mine = {launcher.pid} if launcher is not None else set()
        return mine | set(self.server.launchers())

    async def _look(self) -> None:
        """Check that all levels are as before; every session is closed."""
        async with asyncio.timeout(LOOK_WITHIN_S):
            await self.server.close_sessions()
            await self._use_launcher()
        first = self.looks[WARM_ROUNDS - 1] if len(self.looks) >= WARM_ROUNDS else None

        def is_level() -> bool:
            now = measure(self._launchers())
            if now["processes"] or now["groups"] or now["dirs"]:
                return False
            return first is None or all(now[name] <= first[name] for name in LEVEL)

        level = await _eventually(is_level, SETTLED_WITHIN_S)
        self.looks.append(measure(self._launchers()))
        self._runs_at.append(self.runs)
        if not level:
            self._note(f"round {len(self.looks)}", f"{self.looks[-1]} after {first}")

    async def _use_launcher(self) -> None:
        """Run one command: a launcher that was just restarted holds nothing yet."""
        for left in reversed(range(LOOK_ATTEMPTS)):
            begun = time.monotonic()
            try:
                async with sb.on_device.session(backend="userns", warm=0) as session:
                    await session.exec("true")
            except sb.SandboxError as exc:
                # The last kill of the round may have hit the launcher just now.
                everything = Target(is_remote=False, place=None)
                if not left or not self.killer.excuses.excuses(exc, everything, begun):
                    raise
            else:
                return

    def summary(self, seconds: float) -> Summary:
        """Return the summary, including leftovers of killed programs."""
        left = self.left + self._left()
        before = self.looks[self._warm()]
        after = self.looks[-1]
        growth = {name: round(self._slope(name), 2) for name in State.__annotations__}
        grown = after["resident_kib"] - before["resident_kib"]
        flat = grown < STEPS_KIB or growth["resident_kib"] < GROWTH_KIB_PER_1000
        problems = [*self.wrong, *(f"left: {path}" for path in left)]
        if not flat:
            problems.append(
                f"memory: {before['resident_kib']} KiB after the warm-up, {after['resident_kib']} "
                f"KiB at the end, {growth['resident_kib']} KiB per 1,000 runs"
            )
        return Summary(
            ok=not problems,
            problems=problems,
            seconds=round(seconds, 1),
            rounds=len(self.looks),
            runs=self.runs,
            sessions=self.sessions,
            kills=self.killer.kills,
            killed=dict(sorted(self.killer.done.items())),
            jobs=dict(sorted(self.jobs.items())),
            errors=dict(sorted(self.killer.excuses.used.items())),
            wrong=self.wrong,
            before=before,
            after=after,
            resident_kib=[look["resident_kib"] for look in self.looks],
            runs_at=self._runs_at,
            growth_per_1000_runs=growth,
            bounds=Bounds(
                warm_rounds=self._warm() + 1,
                kib_per_1000_runs=GROWTH_KIB_PER_1000,
                steps_kib=STEPS_KIB,
            ),
            unknown=self.killer.unknown,
            left=left,
        )

    def _left(self) -> list[str]:
        """Return leftovers that the next program of the same user did not clean up."""
        # A reused pid belongs to another process now, and so do its files.
        ended = [pid for pid in self._hosts if started_at(pid) is None]
        if found := [path for pid in ended for path in left_by(pid)]:
            time.sleep(6)  # New control groups are exempt from cleanup for a few seconds.
            # Work dirs are removed in the background, for as long as the program goes on.
            code = (
                "import asyncio, os, sys; from union import sandbox as sb\n"
                "async def main():\n"
                "    limits = sb.Resources(memory='64Mi')\n"
                "    async with sb.on_device.session(backend='userns', resources=limits):\n"
                f"        for _ in range({CLEANED_WITHIN_S}):\n"
                "            if not any(map(os.path.lexists, sys.argv[1:])): break\n"
                "            await asyncio.sleep(1)\n"
                "asyncio.run(main())"
            )
            subprocess.run([sys.executable, "-c", code, *found], check=True)
        return [path for path in found if os.path.lexists(path)]

    def _warm(self) -> int:
        """Return the index of the first measurement after the warm-up."""
        third = min(len(self.looks) // 3, int(WARM_S / self._round_s))
        return max(min(WARM_ROUNDS, len(self.looks)) - 1, third)

    def _slope(self, name: str) -> float:
        """Return the growth per 1,000 runs, by least squares over all rounds after the warm-up."""
        warm = self._warm()
        points = [
            (runs / 1000, float(look[name]))  # type: ignore[literal-required]  # its own keys
            for runs, look in zip(self._runs_at[warm:], self.looks[warm:], strict=True)
        ]
        if len(points) < 2:
            return 0.0
        x0 = sum(x for x, _ in points) / len(points)
        y0 = sum(y for _, y in points) / len(points)
        spread = sum((x - x0) ** 2 for x, _ in points)
        return sum((x - x0) * (y - y0) for x, y in points) / spread if spread else 0.0


def _traceback(exc: BaseException | None) -> str:
    return "".join(traceback.format_exception(exc))[-2000:] if exc is not None else ""


async def _patiently(work: Coroutine[Any, Any, None]) -> None:
    """Wait for a job, with a limit. A suspended machine costs only one second of it."""
    task = asyncio.ensure_future(work)
    for _ in range(PATIENCE_S):
        if (await asyncio.wait([task], timeout=1))[0]:
            return await task
    task.cancel()
    await asyncio.wait([task])
    raise TimeoutError(f"{work!r} is still not done")


async def _eventually(check: Any, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not check():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one request of a sandbox."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nserved")
        await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
