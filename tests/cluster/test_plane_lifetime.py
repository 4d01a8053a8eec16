"""How a session on the stand-in ends: by its owner, its timeout, its pod, or a crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flyte.remote
import pytest
from tests.conftest import SOON_S, descendants
from tests.plane.sandboxes import LONG_S, live_runs, phase, sandbox_plane, settled, until

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Iterator

    from tests.plane.plane import Plane

pytestmark = [pytest.mark.timeout(120), pytest.mark.spec("I4")]

SOFT_S = 15.0
LEASE_S = 3.0
"""Long enough for a server to start on a busy machine."""
LATE_S = 25.0
"""How late an end may be on a busy machine."""


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with sandbox_plane() as plane:
        yield plane


@pytest.fixture(autouse=True)
def every_run_is_over(plane: Plane) -> Iterator[None]:
    yield
    settled(plane)


def server_of(plane: Plane, run: str) -> int:
    """Return the process id of the server in a pod."""
    for pid in descendants(plane.pod(run).pid):
        if b"--supervised" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no server")


async def over(plane: Plane, run: str, begun: float, *, by_s: float) -> float:
    """Wait for the end of a run; return the seconds since ``begun``."""
    await until(lambda: plane.action(run).is_over, within_s=by_s + LATE_S)
    return time.monotonic() - begun


async def was_ended(process: sb.SandboxProcess) -> None:
    """Check a command whose session has ended: its real exit code or an error, never 0."""
    with contextlib.suppress(sb.SandboxError):
        await process.communicate()
        outcome = (process.returncode, process.termination_reason)
        assert outcome in {(143, "timeout"), (143, "closed"), (137, "timeout"), (137, "closed")}


async def test_the_soft_timeout_ends_the_run_in_order(plane: Plane):
    begun = time.monotonic()
    sbx = await sb.session(name="soft", timeout=SOFT_S)
    async with asyncio.timeout(LONG_S):
        await sbx
        process = await sbx.run("sleep 60", stdout=True)
        ended = await over(plane, "soft", begun, by_s=SOFT_S)
        assert ended > SOFT_S - 1
        assert phase(plane, "soft") == "SUCCEEDED"
        assert plane.pod("soft").orphans == set()
        await was_ended(process)
        with pytest.raises(sb.SandboxError):
            await sbx.exec("true")
    await sbx.close()
    assert phase(plane, "soft") == "SUCCEEDED"


@pytest.mark.slow
async def test_a_server_that_does_not_end_is_killed_ten_seconds_later(plane: Plane):
    begun = time.monotonic()
    sbx = await sb.session(name="stuck", timeout=SOFT_S)
    async with asyncio.timeout(LONG_S):
        await sbx
        os.kill(server_of(plane, "stuck"), signal.SIGSTOP)
        ended = await over(plane, "stuck", begun, by_s=SOFT_S + 10)
    assert ended > SOFT_S + 9
    assert not plane.pod("stuck").processes()
    await sbx.close()


async def test_a_run_that_expires_before_it_has_a_pod_does_not_serve(plane: Plane):
    plane.faults.start_delay_s = 2
    begun = time.monotonic()
    sbx = await sb.session(name="late", timeout=1)
    with pytest.raises(sb.SandboxError):
        await asyncio.wait_for(sbx.open(), LONG_S)
    await over(plane, "late", begun, by_s=4)
    assert phase(plane, "late") == "SUCCEEDED"
    assert "union-sandbox-announcement" not in plane.pod("late").log
    await sbx.close()


async def test_a_restarted_pod_keeps_the_expiry_of_the_first(plane: Plane):
    begun = time.monotonic()
    sbx = await sb.session(name="again", timeout=SOFT_S)
    await asyncio.wait_for(sbx.open(), LONG_S)
    first = plane.pod("again")
    await asyncio.to_thread(plane.recreate_pod, "again")
    remade = time.monotonic() - begun
    assert plane.pod("again") is not first
    assert not first.processes()
    ended = await over(plane, "again", begun, by_s=SOFT_S)
    # Not when a second period would have ended, however busy the machine is.
    assert ended < remade + SOFT_S
    assert phase(plane, "again") == "SUCCEEDED", plane.pod("again").log
    await sbx.close()


OWNER = """
import asyncio, sys
import flyte
from union import sandbox as sb

async def main():
    flyte.init(endpoint=sys.argv[1], insecure=True, org="stand-in", project="testing",
               domain="development")
    lease = float(sys.argv[3]) if sys.argv[3:] else None
    name = "orphaned" if lease is None else "leased"
    sbx = await sb.session(name=name, timeout=float(sys.argv[2]), owner_lease=lease)
    await sbx
    process = await sbx.run("sleep 60", background=True)
    print("serving", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_an_owner_that_is_killed_leaves_a_run_that_ends_by_itself(plane: Plane):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, plane.endpoint, str(SOFT_S)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as owner:
        assert owner.stdout is not None
        try:
            line = await asyncio.wait_for(asyncio.to_thread(owner.stdout.readline), LONG_S)
            assert line == b"serving\n"
        finally:
            owner.kill()
    assert not plane.action("orphaned").is_over
    await over(plane, "orphaned", time.monotonic(), by_s=SOFT_S + 2)
    assert not plane.pod("orphaned").processes()


async def test_a_killed_owner_with_a_lease_leaves_no_run_after_the_lease(plane: Plane):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, plane.endpoint, "3600", str(LEASE_S)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as owner:
        assert owner.stdout is not None
        try:
            line = await asyncio.wait_for(asyncio.to_thread(owner.stdout.readline), LONG_S)
            assert line == b"serving\n"
            await asyncio.sleep(2 * LEASE_S)
            assert not plane.action("leased").is_over, "it says nothing, and renews its lease"
        finally:
            owner.kill()
    await over(plane, "leased", time.monotonic(), by_s=LEASE_S + 2)
    assert not plane.pod("leased").processes()


async def test_a_killed_pod_ends_its_server(plane: Plane):
    sbx = await sb.session(name="shot", timeout=timedelta(minutes=5))
    async with asyncio.timeout(LONG_S):
        await sbx
        pod = plane.pod("shot")
        process = await sbx.run("sleep 60", stdout=True)
        os.kill(pod.pid, signal.SIGKILL)
        await until(lambda: plane.action("shot").is_over)
        assert pod.orphans == set()
        await was_ended(process)
    await sbx.close()
    assert phase(plane, "shot") == "FAILED"


async def test_an_abort_from_elsewhere_is_not_reported_as_an_exit_code(plane: Plane):
    sbx = await sb.session(name="elsewhere", timeout=timedelta(minutes=5))
    async with asyncio.timeout(LONG_S):
        await sbx
        process = await sbx.run("sleep 60", stdout=True)
        run = await flyte.remote.Run.get.aio(name="elsewhere")
        await run.abort.aio(reason="by an operator")
        await was_ended(process)
    await sbx.close()
    pod = plane.pod("elsewhere")
    # SIGTERM was handled: nothing had to wait for the end of the grace.
    await until(lambda: pod.term_s is not None)
    assert pod.term_s is not None
    assert pod.term_s < SOON_S
    assert phase(plane, "elsewhere") == "ABORTED"


class CancelledAt:
    """Run a coroutine in a task that is cancelled at its n-th suspension, and nowhere else."""

    def __init__(self, work: Coroutine[Any, Any, object], at: int) -> None:
        self._work, self._at, self.suspensions = work, at, 0

    async def run(self) -> None:
        await asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        await self._steps()

    @types.coroutine
    def _steps(self) -> Generator[Any, Any, object]:
        steps = self._work.__await__()
        throw: BaseException | None = None
        while True:
            try:
                waited = steps.send(None) if throw is None else steps.throw(throw)
            except StopIteration as done:
                return done.value
            self.suspensions += 1
            if self.suspensions == self._at:
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield waited
            except BaseException as exc:  # noqa: BLE001  # Raised again by the caller.
                throw = exc
            else:
                throw = None


@pytest.mark.parametrize("held", ["async with", "await and close"])
async def test_an_owner_cancelled_at_any_moment_leaves_no_run(plane: Plane, held: str):
    plane.faults.start_delay_s = LONG_S

    async def with_block() -> None:
        async with await sb.session(ready_timeout=0.5):
            pass

    async def by_hand() -> None:
        sbx = await sb.session(ready_timeout=0.5)
        try:
            await sbx
        finally:
            await sbx.close()

    at = 0
    while True:
        at += 1
        attempt = CancelledAt(with_block() if held == "async with" else by_hand(), at)
        with contextlib.suppress(asyncio.CancelledError, sb.SandboxError):
            await asyncio.wait_for(attempt.run(), LONG_S)
        await until(lambda: not live_runs(plane))
        if attempt.suspensions < at:
            break
    assert at > 2, "it was never suspended"


@pytest.mark.parametrize("stage", ["submitted", "pod started", "command running"])
async def test_a_cancelled_owner_leaves_no_pod(plane: Plane, stage: str):
    name = f"cancelled-{stage.replace(' ', '-')}"
    running = asyncio.Event()

    async def owner() -> None:
        async with await sb.session(name=name) as sbx:
            proc = await sbx.run("echo begun; sleep 30", stdout=True)
            assert await anext(aiter(proc.iter_stdout())) == b"begun\n"
            running.set()
            await proc.wait()

    def reached() -> bool:
        if stage == "command running":
            return running.is_set()
        if name not in live_runs(plane):
            return False
        return stage == "submitted" or plane.action(name).pod is not None

    task = asyncio.create_task(owner())
    await until(reached)
    if plane.action(name).pod is not None:
        plane.pod(name).manifest["spec"]["terminationGracePeriodSeconds"] = 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 40)
    assert plane.action(name).is_over
    await until(lambda: not any(pod.processes() for pod in plane.action(name).pods))
