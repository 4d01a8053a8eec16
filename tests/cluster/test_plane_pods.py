"""Pods that do not start and pods that die, as real clusters report them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.conftest import SOON_S
from tests.plane import faults
from tests.plane.sandboxes import LONG_S, phase, sandbox_plane, settled, until

from union import sandbox as sb
from union.sandbox.cluster import _run_state
from union.sandbox.cluster._run_state import waiting_reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.plane.plane import Plane

pytestmark = [pytest.mark.timeout(120), pytest.mark.spec("I4")]


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with sandbox_plane() as plane:
        yield plane


@pytest.fixture(autouse=True)
def every_run_is_over(plane: Plane) -> Iterator[None]:
    yield
    settled(plane)


def kill_pod(plane: Plane, run: str) -> None:
    """Kill all processes of a pod at once, as the kernel and the kubelet do."""
    processes = plane.pod(run).processes()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Let every reason that ends a session do so at once."""
    short = tuple(
        reason if reason.patience_s is None else _with_patience(reason, 0.2)
        for reason in _run_state._REASONS
    )
    monkeypatch.setattr(_run_state, "_REASONS", short)


def _with_patience(reason: _run_state._Reason, seconds: float) -> _run_state._Reason:
    return type(reason)(reason.name, reason.signs, seconds, reason.hint, reason.ended_by)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "fault, name, part, remedy",
    [
        (faults.CONFIG_ERROR, "CreateContainerConfigError", "non-numeric user", "numeric USER"),
        (faults.IMAGE_ERROR, "ErrImagePull", "ImagePullBackOff", "check that the image exists"),
        (faults.CRASH_LOOP, "CrashLoopBackOff", "Back-off restarting", "log of the pod"),
    ],
)
async def test_a_pod_that_does_not_start_is_reported_with_its_reason(
    plane: Plane, fault, name, part, remedy
):
    plane.faults.waiting = fault
    run = f"waits-{name.lower()[:14]}"
    sbx = await sb.session(name=run)
    with pytest.raises(sb.SandboxExecutionError) as caught:
        await asyncio.wait_for(sbx.open(), LONG_S)
    assert (caught.value.code, caught.value.stage) == ("pod-waiting", "spawn")
    assert name in str(caught.value)
    assert part in str(caught.value)
    assert remedy in caught.value.hint
    assert phase(plane, run) == "ABORTED", "the owner ends a run that is of no use"


async def test_a_pod_without_a_node_is_logged_and_waited_for(plane: Plane, caplog):
    plane.faults.waiting = faults.UNSCHEDULABLE
    with caplog.at_level(logging.WARNING, "union.sandbox.cluster"):
        sbx = await sb.session(name="unschedulable")
        opening = asyncio.create_task(sbx.open())
        await until(lambda: "Insufficient memory" in caplog.text)
        assert not opening.done()
        plane.faults.waiting = None
        async with asyncio.timeout(LONG_S):
            await opening
            assert (await sbx.exec("echo hello")).stdout == "hello\n"
    assert caplog.text.count("Unschedulable") == 1, "once for each reason"
    await sbx.close()


def test_a_reason_that_is_over_is_no_reason():
    assert waiting_reason(faults.IMAGE_ERROR.events)[0] == "ErrImagePull"
    assert waiting_reason([*faults.IMAGE_ERROR.events, ("Pulled", "Successfully pulled")]) is None
    assert waiting_reason([*faults.UNSCHEDULABLE.events, ("Scheduled", "assigned")]) is None
    assert waiting_reason([*faults.CRASH_LOOP.events, ("Started", "Started")]) is not None
    assert waiting_reason([("Created", "created pod a0")]) is None


@pytest.mark.parametrize(
    "end, meaning, remedy",
    [
        (faults.OOM_KILLED, "out of memory", "raise the memory"),
        (faults.EVICTED, "evicted", "request the resources"),
        (faults.DELETED, "killed", "events of the cluster"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_the_end_of_a_pod_is_noticed_soon_and_explained(plane: Plane, end, meaning, remedy):
    run = f"dies-{end.reason.lower()}"
    plane.faults.pod_end = end
    sbx = await sb.session(name=run, timeout=timedelta(minutes=5))
    async with asyncio.timeout(LONG_S):
        await sbx
        process = await sbx.run("sleep 60", stdout=True)
        kill_pod(plane, run)
        await until(lambda: plane.action(run).is_over)
        begun = time.monotonic()
        with pytest.raises(sb.SandboxError) as caught:
            await process.wait()
        # Below the half minute for which an address is tried otherwise.
        assert time.monotonic() - begun < SOON_S
        assert caught.value.code == "pod-ended"
        assert meaning in str(caught.value)
        assert end.reason in str(caught.value)
        assert remedy in caught.value.hint
        with pytest.raises(sb.SandboxConnectionError, match="has ended") as later:
            await sbx.exec("true")
        assert later.value.code == "session-lost"
    await sbx.close()
    assert phase(plane, run) == "FAILED"


async def test_a_pod_that_dies_before_the_first_call_is_noticed_soon(plane: Plane):
    plane.faults.pod_end = faults.OOM_KILLED
    sbx = await sb.session(name="dies-unused", timeout=timedelta(minutes=5))
    async with asyncio.timeout(LONG_S):
        await sbx
        kill_pod(plane, "dies-unused")
        begun = time.monotonic()
        with pytest.raises(sb.SandboxConnectionError, match="out of memory"):
            await sbx.exec("true")
        assert time.monotonic() - begun < SOON_S
    await sbx.close()


def open_clients() -> set[int]:
    found = [one for one in gc.get_objects() if isinstance(one, aiohttp.ClientSession)]
    return {id(one) for one in found if not one.closed}


@pytest.mark.parametrize("used", [True, False])
async def test_a_reference_to_an_ended_session_leaves_nothing_open(plane: Plane, used):
    before = open_clients()
    sbx = await sb.session(name=f"ended-{used}".lower(), timeout=timedelta(minutes=5))
    async with asyncio.timeout(LONG_S):
        await sbx
        reference = pickle.loads(pickle.dumps(sbx))
        if used:
            assert (await reference.exec("echo hello")).stdout == "hello\n"
        # Not closed in order, so that the reference is not notified.
        kill_pod(plane, sbx.name)
        await until(lambda: plane.action(sbx.name).is_over)
        with pytest.raises(sb.SandboxError) as caught:
            await reference.exec("true")
        assert " object at 0x" not in str(caught.value)
        # The receiver need not close it, so nothing may be left for that.
        await until(lambda: open_clients() <= before)
        assert not reference.is_owner
    with contextlib.suppress(sb.SandboxError):
        await sbx.close()


async def test_a_permission_that_root_lacks_is_explained(plane: Plane):
    plane.faults.no_pod = faults.NoPod(
        code="PermissionError", message="[Errno 13] Permission denied: '/root/.config'", events=()
    )
    sbx = await sb.session(name="no-capability")
    with pytest.raises(sb.SandboxExecutionError) as caught:
        await asyncio.wait_for(sbx.open(), LONG_S)
    assert caught.value.code == "launch-failed"
    assert "runAsUser: 1000" in caught.value.hint
    assert "SETFCAP" in caught.value.hint


def test_a_pod_without_a_writable_directory_is_refused_with_the_remedy(monkeypatch):
    from union.sandbox.cluster import _task

    def read_only() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    monkeypatch.setattr(_task.tempfile, "gettempdir", read_only)
    with pytest.raises(sb.SandboxExecutionError, match="no writable directory") as caught:
        _task._scratch()
    assert caught.value.code == "no-scratch"
    assert "emptyDir at /tmp" in caught.value.hint
    assert "[" not in str(caught.value.args[0]), "no list of Python"
