"""The state of tasks, runs and actions, and the watchers of its changes.

Only the plane's loop writes. An action is kept as the message that describes it
(`ActionDetails`), so that an answer is a copy and nothing is translated.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.common import identifier_pb2, phase_pb2
from flyteidl2.workflow import run_definition_pb2, state_service_pb2
from google.protobuf.timestamp_pb2 import Timestamp
from tests.plane.store import Store

if TYPE_CHECKING:
    from flyteidl2.core import execution_pb2
    from flyteidl2.task import run_pb2, task_definition_pb2
    from tests.plane.executor import Pod

TERMINAL = frozenset(
    {
        phase_pb2.ACTION_PHASE_SUCCEEDED,
        phase_pb2.ACTION_PHASE_FAILED,
        phase_pb2.ACTION_PHASE_ABORTED,
        phase_pb2.ACTION_PHASE_TIMED_OUT,
    }
)
ROOT_ACTION = "a0"

RunKey = tuple[str, str, str]


def now() -> Timestamp:
    stamp = Timestamp()
    stamp.GetCurrentTime()
    return stamp


def phase_name(phase: int) -> str:
    """``RUNNING`` and the like."""
    return phase_pb2.ActionPhase.Name(phase).removeprefix("ACTION_PHASE_")


@dataclass(eq=False)
class Run:
    """A named run: its specification, and its actions by name."""

    id: identifier_pb2.RunIdentifier
    spec: run_pb2.RunSpec
    begun: float = field(default_factory=time.monotonic)
    created: Timestamp = field(default_factory=now)
    actions: dict[str, Action] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The prefix of all objects of the run."""
        return Store.uri(f"{self.id.project}/{self.id.domain}/{self.id.name}")

    @property
    def root(self) -> Action:
        return self.actions[ROOT_ACTION]

    def message(self) -> run_definition_pb2.Run:
        return run_definition_pb2.Run(
            action=self.root.message(), labels=dict(self.spec.labels.values)
        )


@dataclass(eq=False)
class Action:
    """One action of a run: its description on the wire, its pod, and its outcome."""

    run: Run
    details: run_definition_pb2.ActionDetails
    input_uri: str
    base: str
    pod: Pod | None = None
    pods: list[Pod] = field(default_factory=list)
    """All its pods so far, the current one last."""
    error: execution_pb2.ExecutionError | None = None

    @property
    def name(self) -> str:
        return self.details.id.name

    @property
    def phase(self) -> int:
        return self.details.status.phase

    @property
    def is_over(self) -> bool:
        return self.phase in TERMINAL

    @property
    def attempt(self) -> run_definition_pb2.ActionAttempt:
        """The current attempt; there always is one."""
        return self.details.attempts[-1]

    @property
    def output_prefix(self) -> str:
        return f"{self.base}/{self.name}/{self.attempt.attempt}"

    @property
    def phases(self) -> list[str]:
        """All its phases so far, over all attempts, in order."""
        payload = [t for a in self.details.attempts for t in a.phase_transitions]
        return [phase_name(t.phase) for t in payload]

    @property
    def container_env(self) -> dict[str, str]:
        """The environment that the task itself requests."""
        return {pair.key: pair.value for pair in self.details.task.task_template.container.env}

    def message(self) -> run_definition_pb2.Action:
        payload = self.details
        return run_definition_pb2.Action(
            id=payload.id, metadata=payload.metadata, status=payload.status
        )

    def update(self) -> state_service_pb2.ActionUpdate:
        """Return the update that a parent receives."""
        payload = state_service_pb2.ActionUpdate(
            action_id=self.details.id, phase=self.details.status.phase
        )
        if self.phase == phase_pb2.ACTION_PHASE_SUCCEEDED:
            payload.output_uri = self.output_prefix
        if self.error is not None:
            payload.error.CopyFrom(self.error)
        return payload


class State:
    """All state, and an event that is set when any of it changes."""

    def __init__(self) -> None:
        self.tasks: list[task_definition_pb2.TaskDetails] = []
        self.runs: dict[RunKey, Run] = {}
        self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Return the event of the next change; get it before reading, to miss no change."""
        return self._changed

    def changed(self) -> None:
        change, self._changed = self._changed, asyncio.Event()
        change.set()

    def begin_attempt(self, action: Action) -> None:
        status = action.details.status
        status.attempts += 1
        action.details.attempts.add(attempt=status.attempts, start_time=now(), cluster="stand-in")
        self.move(action, phase_pb2.ACTION_PHASE_QUEUED)

    def move(self, action: Action, phase: int) -> None:
        """Put an action into a phase, unless it has ended."""
        status, attempt = action.details.status, action.attempt
        if action.is_over:
            return
        moment = now()
        if attempt.phase_transitions:
            attempt.phase_transitions[-1].end_time.CopyFrom(moment)
        attempt.phase_transitions.add(phase=phase, start_time=moment)
        status.phase = attempt.phase = phase
        if phase in TERMINAL:
            status.end_time.CopyFrom(moment)
            attempt.end_time.CopyFrom(moment)
            status.duration_ms = int((time.monotonic() - action.run.begun) * 1000)
        self.changed()

    def find_run(self, id: identifier_pb2.RunIdentifier) -> Run:  # noqa: A002  # the name on the wire
        run = self.runs.get((id.project, id.domain, id.name))
        if run is None:
            raise ConnectError(Code.NOT_FOUND, f"run {id.name} not found")
        return run

    def find_action(self, id: identifier_pb2.ActionIdentifier) -> Action:  # noqa: A002  # the same
        action = self.find_run(id.run).actions.get(id.name)
        if action is None:
            raise ConnectError(Code.NOT_FOUND, f"action {id.name} of {id.run.name} not found")
        return action
