"""The life of an action: phases, time limits, attempts, abort, and a restarted pod.

What a pod is, is not known here: see `processes` and `pods`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Protocol

from flyteidl2.common import phase_pb2
from flyteidl2.core import execution_pb2
from flyteidl2.workflow import run_definition_pb2
from tests.plane.podspec import MissingSecretError, Surroundings, pod_of
from tests.plane.state import now

if TYPE_CHECKING:
    from tests.plane.faults import Faults, NoPod
    from tests.plane.state import Action, State
    from tests.plane.store import Store

GRACE_S = 30.0
"""The default grace period of Kubernetes."""


class Pod(Protocol):
    """One pod, from its creation to its end."""

    name: str
    namespace: str
    manifest: dict[str, Any]
    born: float
    """A value of `time.monotonic`."""
    notes: list[tuple[str, str]]
    """Reason and message of what happened to it, in order."""

    async def running(self) -> None:
        """Return when its container has a process."""

    async def ended(self) -> int:
        """Return the exit code when there is one."""

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM, SIGKILL after the grace; return when nothing of the pod is left."""

    async def log_from(self, offset: int) -> bytes:
        """Return the log from an offset on."""

    @property
    def is_over(self) -> bool: ...


class Pods(Protocol):
    """Creates pods."""

    async def start(self, manifest: dict[str, Any]) -> Pod: ...


class Executor:
    """Runs actions in pods, and records their state."""

    def __init__(
        self,
        state: State,
        store: Store,
        pods: Pods,
        faults: Faults,
        around: Surroundings,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self._grace_s = grace_s
        self._state, self._store, self._pods = state, store, pods
        self._faults, self._around = faults, around
        self._lives: dict[Action, asyncio.Task[None]] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._again: set[Action] = set()

    def start(self, action: Action) -> None:
        self._state.begin_attempt(action)
        self._lives[action] = asyncio.create_task(self._live(action))

    def abort(self, action: Action, reason: str) -> None:
        """End the action at once; its pod gets its grace in the background."""
        if action.is_over:
            return
        action.details.abort_info.reason = reason
        self._close(action, phase_pb2.ACTION_PHASE_ABORTED, "Aborted", reason)
        self._end_pod(action)

    async def recreate(self, action: Action) -> None:
        """Kill the pod and restart it for the same attempt, as a lost node does."""
        assert action.pod is not None
        before = action.pod
        self._again.add(action)
        await before.end(0)
        while action.pod is before and not action.is_over:
            await self._state.next_change().wait()

    async def stop(self) -> None:
        """End everything, without grace."""
        for task in self._lives.values():
            task.cancel()
        await asyncio.gather(*self._lives.values(), return_exceptions=True)
        known = [p for action in self._lives for p in action.pods]
        await asyncio.gather(*(pod.end(0) for pod in known))
        await asyncio.gather(*self._ends, return_exceptions=True)

    async def _live(self, action: Action) -> None:
        left = action.details.task.task_template.metadata.retries.retries
        try:
            while await self._attempt(action) and left > 0:
                left -= 1
                self._state.begin_attempt(action)
            if not action.is_over:
                self._state.move(action, phase_pb2.ACTION_PHASE_FAILED)
        except TimeoutError:
            limit = "the action took longer than its time limit"
            self._close(action, phase_pb2.ACTION_PHASE_TIMED_OUT, "TimedOut", limit)
            self._end_pod(action)
        except Exception as problem:  # noqa: BLE001  # A test must see it instead of waiting for it.
            message = f"{type(problem).__name__}: {problem}"
            self._close(action, phase_pb2.ACTION_PHASE_FAILED, "StandInError", message)
            self._end_pod(action)
        if action is action.run.root:
            for child in action.run.actions.values():
                self.abort(child, "the run is over")

    async def _attempt(self, action: Action) -> bool:
        """Run one attempt; return whether another may follow."""
        limits = action.details.task.task_template.metadata
        waits = limits.timeouts.queued_timeout.ToTimedelta().total_seconds()
        deadline = limits.timeouts.deadline.ToTimedelta().total_seconds()
        runtime = limits.timeout.ToTimedelta().total_seconds()
        async with asyncio.timeout_at(_moment(action.run.begun, deadline)):
            async with asyncio.timeout(waits or None):
                await asyncio.sleep(self._faults.start_delay_s)
                if self._faults.no_pod is not None:
                    await self._fail_without_pod(action, self._faults.no_pod)
                    return False
            code = await self._in_pods(action, runtime)
        return self._judge(action, code)

    async def _in_pods(self, action: Action, runtime_s: float) -> int:
        """Run one pod to its end, and again for each restart by a test."""
        while True:
            try:
                manifest = pod_of(action, self._around)
            except MissingSecretError as missing:
                action.attempt.cluster_events.add(
                    occurred_at=now(), reason="FailedCreate", message=f"no secret {missing}"
                )
                raise
            pod = action.pod = await self._pods.start(manifest)
            action.pods.append(pod)
            self._identify(action, pod)
            self._state.move(action, phase_pb2.ACTION_PHASE_INITIALIZING)
            await self._wait_while_faulty(action)
            await asyncio.sleep(self._faults.pod_delay_s)
            await self._until_running(action, pod)
            self._state.move(action, phase_pb2.ACTION_PHASE_RUNNING)
            async with asyncio.timeout(runtime_s or None):
                code = await pod.ended()
            self._pass_on_notes(action, pod)
            # Nothing of a pod outlives its first process.
            await pod.end(0)
            if action not in self._again:
                return code
            self._again.discard(action)

    async def _until_running(self, action: Action, pod: Pod) -> None:
        """Wait until a pod runs; meanwhile its notes become events, as on a real cluster."""
        running = asyncio.ensure_future(pod.running())
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=0.5)
                self._pass_on_notes(action, pod)
            running.result()
        finally:
            running.cancel()

    def _pass_on_notes(self, action: Action, pod: Pod) -> None:
        known = {(event.reason, event.message) for event in action.attempt.cluster_events}
        for reason, message in pod.notes:
            if (reason, message) not in known:
                self._warn(action, reason, message)

    async def _wait_while_faulty(self, action: Action) -> None:
        """Keep a pod waiting with the events that a cluster would show, until the fault is over."""
        waiting = self._faults.waiting
        for reason, message in waiting.events if waiting is not None else ():
            self._warn(action, reason, message)
        while self._faults.waiting is not None:
            await asyncio.sleep(0.05)

    def _warn(self, action: Action, reason: str, message: str) -> None:
        action.attempt.cluster_events.add(
            occurred_at=now(),
            reason=reason,
            message=message,
            type=run_definition_pb2.ClusterEvent.TYPE_WARNING,
            source_component="kubelet",
        )
        self._state.changed()

    def _identify(self, action: Action, pod: Pod) -> None:
        context = action.attempt.log_context
        context.Clear()
        context.primary_pod_name = pod.name
        container = context.pods.add(
            namespace=pod.namespace, pod_name=pod.name, primary_container_name="primary"
        ).containers.add(container_name="primary")
        container.process.container_start_time.CopyFrom(now())
        action.attempt.logs_available = True
        action.attempt.cluster_events.add(
            occurred_at=now(), reason="Created", message=f"created pod {pod.name}"
        )

    async def _fail_without_pod(self, action: Action, fault: NoPod) -> None:
        self._state.move(action, phase_pb2.ACTION_PHASE_INITIALIZING)
        for reason, message in fault.events:
            self._warn(action, reason, message)
        await asyncio.sleep(fault.after_s)
        self._close(action, phase_pb2.ACTION_PHASE_FAILED, fault.code, fault.message)

    def _judge(self, action: Action, code: int) -> bool:
        """Record the outcome of the pod; return whether another attempt may follow."""
        if action.is_over:
            return False
        document = self._store.read(f"{action.output_prefix}/error.pb")
        if document is not None:
            payload = execution_pb2.ErrorDocument.FromString(document).error
            again = payload.kind == execution_pb2.ContainerError.RECOVERABLE
            if not again or self._was_last(action):
                self._close(action, phase_pb2.ACTION_PHASE_FAILED, payload.code, payload.message)
            return again
        if code == 0:
            self._state.move(action, phase_pb2.ACTION_PHASE_SUCCEEDED)
            return False
        if self._was_last(action):
            message = f"the container ended with {code if code >= 0 else 128 - code}"
            if code != 0 and (end := self._faults.pod_end) is not None:
                self._warn(action, end.reason, end.message)
                message = f"the container ended with {end.code}: {end.reason}"
            self._close(action, phase_pb2.ACTION_PHASE_FAILED, "ContainerFailed", message)
        return True

    @staticmethod
    def _was_last(action: Action) -> bool:
        retries = action.details.task.task_template.metadata.retries.retries
        return action.attempt.attempt > retries

    def _close(self, action: Action, phase: int, code: str, message: str) -> None:
        if action.is_over:
            return
        action.error = execution_pb2.ExecutionError(
            code=code, message=message, kind=execution_pb2.ExecutionError.USER
        )
        if phase != phase_pb2.ACTION_PHASE_ABORTED:
            info = run_definition_pb2.ErrorInfo(
                code=code, message=message, kind=run_definition_pb2.ErrorInfo.KIND_USER
            )
            action.details.error_info.CopyFrom(info)
            action.attempt.error_info.CopyFrom(info)
        self._state.move(action, phase)

    def _end_pod(self, action: Action) -> None:
        pod = action.pod
        life = self._lives.get(action)
        if life is not None and life is not asyncio.current_task():
            life.cancel()
        if pod is None:
            return
        spec = pod.manifest["spec"]
        grace = float(spec.get("terminationGracePeriodSeconds", self._grace_s))
        task = asyncio.create_task(pod.end(grace))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)


def _moment(begun: float, seconds: float) -> float | None:
    """Convert a moment of `time.monotonic` to the clock of the event loop."""
    if not seconds:
        return None
    return asyncio.get_running_loop().time() + begun + seconds - time.monotonic()


async def follow(pod: Pod, *, every_s: float = 0.05) -> Any:
    """Yield the pod's log as it grows, until the pod has ended."""
    offset = 0
    while True:
        over = pod.is_over
        found = await pod.log_from(offset)
        if found:
            offset += len(found)
            yield found
        elif over:
            return
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.sleep(every_s)
