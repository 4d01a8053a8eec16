"""The stand-in, driven by the unmodified SDK with trivial tasks."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import flyte
import flyte.errors
import flyte.remote
import pytest
from flyte.models import ActionPhase
from tests.conftest import SOON_S, eventually
from tests.plane.client import standing_in
from tests.plane.faults import NoPod
from tests.plane.plane import DOMAIN, PROJECT

if TYPE_CHECKING:
    from tests.plane.plane import Plane

LONG_S = 40
"""A limit that only a hang reaches."""


async def task(name: str) -> flyte.remote.TaskDetails:
    found = flyte.remote.TaskDetails.get(
        f"plane_tasks.{name}", project=None, domain=None, auto_version="latest"
    )
    return await found.fetch.aio()


async def submit(what: Any, *, name: str | None = None, **inputs: Any) -> flyte.remote.Run:
    """Start a run of a task, given as an object or by its name."""
    found = await task(what) if isinstance(what, str) else what
    return await flyte.with_runcontext(mode="remote", name=name).run.aio(found, **inputs)


async def finished(run: flyte.remote.Run) -> flyte.remote.Run:
    async with asyncio.timeout(LONG_S):
        await run.wait.aio(quiet=True)
    return run


async def running(plane: Plane, run: flyte.remote.Run, line: str = "asleep") -> None:
    """Wait until the task itself has written to its log."""
    assert await asyncio.to_thread(
        eventually, lambda: plane.action(run.name).pod is not None, within_s=LONG_S
    )
    assert await asyncio.to_thread(
        eventually, lambda: line in plane.pod(run.name).log, within_s=LONG_S
    )


async def test_deployed_tasks_are_found_and_others_are_not(plane: Plane):
    names = {task.task_id.name for task in plane.state.tasks}
    assert {"plane_tasks.double", "plane_tasks.parent"} <= names
    found = await task("double")
    assert found.name == "plane_tasks.double"
    with pytest.raises(flyte.errors.RemoteTaskNotFoundError):
        await task("nonesuch")


async def test_a_run_by_reference_has_phases_a_pod_a_log_and_outputs(plane: Plane):
    run = await submit("double", name="by-reference", n=21)
    assert run.name == "by-reference"
    assert run.url == (f"{plane.endpoint}/v2/domain/{DOMAIN}/project/{PROJECT}/runs/by-reference")
    async with asyncio.timeout(LONG_S):
        seen = [details async for details in run.action.watch()]
    phases = [str(details.phase.name) for details in seen]
    assert phases[-1] == "SUCCEEDED"
    assert phases == sorted(phases, key=["QUEUED", "INITIALIZING", "RUNNING", "SUCCEEDED"].index)
    pod = seen[-1].pb2.attempts[-1].log_context.pods[0]
    assert (pod.namespace, pod.pod_name) == (f"{PROJECT}-{DOMAIN}", "by-reference-a0-0")
    assert (await run.outputs.aio())[0] == 42
    lines = [line async for line in run.get_logs.aio()]
    assert "doubling 21\n" in "".join(lines)
    assert plane.pod("by-reference").orphans == set()


async def test_a_name_is_used_once(plane: Plane):
    run = await submit("nap", name="only-one", seconds=60.0)
    with pytest.raises(flyte.errors.RuntimeUserError) as caught:
        await submit("nap", name="only-one", seconds=60.0)
    assert caught.value.code == "RunAlreadyExistsError"
    await run.abort.aio(reason="enough")


async def test_an_abort_reports_its_reason_and_ends_the_pod(plane: Plane):
    quick = (await task("nap")).override(timeout=timedelta(minutes=5))
    run = await submit(quick, name="aborted", seconds=60.0)
    await running(plane, run)
    begun = time.monotonic()
    await run.abort.aio(reason="not needed any more")
    await finished(run)
    assert time.monotonic() - begun < SOON_S
    assert run.phase == ActionPhase.ABORTED
    details = await run.details.aio()
    assert details.action_details.abort_info.reason == "not needed any more"
    with pytest.raises(flyte.errors.ActionAbortedError):
        await run.raise_for_status.aio()
    assert await asyncio.to_thread(
        eventually, lambda: not plane.pod("aborted").processes(), within_s=LONG_S
    )
    # The task has no SIGTERM handler, so it is killed after the grace, like PID 1 of a pod.
    assert plane.pod("aborted").term_s is None


async def test_aborting_an_ended_run_is_no_error(plane: Plane):
    run = await finished(await submit("double", name="done-before", n=1))
    await run.abort.aio(reason="late")
    assert (await flyte.remote.Run.get.aio(name="done-before")).phase == ActionPhase.SUCCEEDED


async def test_a_failed_task_reports_its_error(plane: Plane):
    run = await finished(await submit("failing", name="fails"))
    assert run.phase == ActionPhase.FAILED
    with pytest.raises(flyte.errors.RuntimeUserError, match="no good"):
        await run.raise_for_status.aio()


async def test_retries_are_attempts(plane: Plane):
    again = (await task("failing")).override(retries=flyte.RetryStrategy(count=1))
    run = await finished(await submit(again, name="fails-twice"))
    assert run.phase == ActionPhase.FAILED
    attempts = plane.action("fails-twice").details.attempts
    assert [attempt.attempt for attempt in attempts] == [1, 2]


async def test_a_timeout_is_enforced_also_through_an_override(plane: Plane):
    short = (await task("nap")).override(timeout=timedelta(seconds=1))
    run = await submit(short, name="timed-out", seconds=60.0)
    await finished(run)
    assert run.phase == ActionPhase.TIMED_OUT
    with pytest.raises(flyte.errors.TaskTimeoutError):
        await run.raise_for_status.aio()
    assert await asyncio.to_thread(
        eventually, lambda: not plane.pod("timed-out").processes(), within_s=LONG_S
    )


async def test_overridden_resources_reach_the_pod(plane: Plane):
    plane.faults.start_delay_s = 0.5
    wide = (await task("nap")).override(resources=flyte.Resources(cpu=(1, 2), memory="300Mi"))
    run = await submit(wide, name="wide", seconds=60.0)
    await running(plane, run, line="")
    container = plane.pod("wide").manifest["spec"]["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "300Mi"},
        "limits": {"cpu": "2"},
    }
    await run.abort.aio()


async def test_a_pod_does_not_inherit_this_environment(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OF_THE_CALLER", "must not be seen")
    names = ["OF_THE_CALLER", "OF_THE_ENVIRONMENT", "OF_THE_RUN", "RUN_NAME", "HOME", "HOSTNAME"]
    context = flyte.with_runcontext(
        mode="remote", name="variables", env_vars={"OF_THE_RUN": "yes"}, labels={"colour": "red"}
    )
    run = await finished(await context.run.aio(await task("variables"), names=names))
    seen = (await run.outputs.aio())[0]
    assert seen == {
        "OF_THE_CALLER": "-",
        "OF_THE_ENVIRONMENT": "yes",
        "OF_THE_RUN": "yes",
        "RUN_NAME": "variables",
        "HOME": str(plane.pod("variables").place / "home"),
        "HOSTNAME": "variables-a0-0",
    }
    assert seen["HOME"] != os.environ["HOME"]
    found = [run.name async for run in flyte.remote.Run.listall.aio(with_labels={"colour": "red"})]
    assert found == ["variables"]


async def test_a_task_has_sub_actions(plane: Plane):
    run = await finished(await submit("parent", name="family", n=3))
    assert (await run.outputs.aio())[0] == 14
    actions = plane.run("family").actions
    assert [a.details.metadata.parent for a in actions.values()] == ["", "a0", "a0"]
    assert {a.phases[-1] for a in actions.values()} == {"SUCCEEDED"}


async def test_a_task_starts_a_run_of_its_own(plane: Plane):
    run = await finished(await submit("spawns", name="outer", name_of_run="inner"))
    assert (await run.outputs.aio())[0] == "inner"
    inner = await flyte.remote.Run.get.aio(name="inner")
    assert (await inner.outputs.aio())[0] == 8
    assert plane.action("inner").details.metadata.relation.related_to.name == "outer"


async def test_a_run_can_fail_before_it_has_a_pod(plane: Plane):
    plane.faults.no_pod = NoPod()
    run = await finished(await submit("double", name="no-image", n=1))
    assert run.phase == ActionPhase.FAILED
    details = (await run.details.aio()).action_details
    assert details.error_info is not None
    assert details.error_info.code == "ImagePullBackOff"
    attempt = details.pb2.attempts[-1]
    assert not attempt.log_context.pods
    assert [event.reason for event in attempt.cluster_events] == ["Scheduled", "Failed", "BackOff"]
    assert plane.action("no-image").pods == []


@pytest.mark.parametrize("how", ["watches", "connections"])
async def test_an_interrupted_watch_resumes(plane: Plane, how: str):
    run = await submit("nap", name=f"cut-{how}", seconds=1.0)
    waiting = asyncio.create_task(finished(run))
    await running(plane, run)
    await asyncio.to_thread(plane.faults.cut_watches if how == "watches" else plane.cut_connections)
    await waiting
    assert run.phase == ActionPhase.SUCCEEDED


async def test_logs_can_lag_and_fail(plane: Plane):
    run = await submit("nap", name="logs", seconds=30.0)
    await running(plane, run)
    plane.faults.logs_down = True
    with pytest.raises(Exception, match="no logs today"):
        _ = [line async for line in run.get_logs.aio()]
    plane.faults.logs_down = False
    plane.faults.log_lag_s = time.monotonic() - plane.pod("logs").born + 0.7
    begun = time.monotonic()
    async with asyncio.timeout(LONG_S):
        async for _line in run.get_logs.aio():
            break
    assert time.monotonic() - begun >= 0.6
    await run.abort.aio()


async def test_a_pod_can_be_restarted_for_the_same_attempt(plane: Plane):
    run = await submit("nap", name="again", seconds=30.0)
    await running(plane, run)
    first = plane.pod("again")
    await asyncio.to_thread(plane.recreate_pod, "again")
    await running(plane, run)
    second = plane.pod("again")
    assert second is not first
    assert second.name == first.name
    assert not first.processes()
    assert plane.action("again").attempt.attempt == 1
    assert plane.action("again").phase == plane.action("again").attempt.phase
    assert not plane.action("again").is_over
    await run.abort.aio()


def test_stopping_leaves_nothing_behind():
    with standing_in() as plane:
        import plane_tasks

        flyte.deploy(plane_tasks.env)
        run = flyte.with_runcontext(mode="remote").run(plane_tasks.nap, seconds=60.0)
        assert eventually(lambda: plane.action(run.name).pod is not None, within_s=LONG_S)
        pod = plane.pod(run.name)
        assert pod.processes()
        endpoint = plane.endpoint
    assert not pod.processes()
    assert not plane.place.exists()
    flyte.init(endpoint=endpoint, insecure=True, project=PROJECT, domain=DOMAIN, rpc_retries=0)
    try:
        with pytest.raises(Exception, match=r"(?i)connect|unavailable|refused"):
            flyte.remote.Run.get(name=run.name)
    finally:
        flyte._initialize._init_config = None
