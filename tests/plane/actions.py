"""ActionsService: a task's own sub-actions, requested from inside its pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.actions import actions_service_pb2
from flyteidl2.actions.actions_service_connect import ActionsService
from flyteidl2.workflow import run_definition_pb2, state_service_pb2
from tests.plane.runs import action_details
from tests.plane.state import Action

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from connectrpc.request import RequestContext
    from tests.plane.executor import Executor
    from tests.plane.state import State


class Actions(ActionsService):
    """Accepts sub-actions, and reports the state of children to their parent."""

    def __init__(self, state: State, executor: Executor) -> None:
        self._state, self._executor = state, executor

    async def enqueue(
        self, request: actions_service_pb2.EnqueueRequest, ctx: RequestContext
    ) -> actions_service_pb2.EnqueueResponse:
        asked = request.action
        run = self._state.find_run(asked.action_id.run)
        if asked.action_id.name in run.actions:
            raise ConnectError(Code.ALREADY_EXISTS, f"action {asked.action_id.name} exists")
        if run.root.is_over:
            raise ConnectError(Code.ABORTED, f"run {run.id.name} is over")
        details = action_details(run.id, asked.action_id.name, asked.task.spec)
        details.metadata.parent = asked.parent_action_name
        details.metadata.group = asked.group
        action = Action(run, details, asked.input_uri, asked.run_output_base or run.base)
        run.actions[action.name] = action
        if asked.HasField("trace"):
            self._record(action, asked.trace)
        else:
            self._executor.start(action)
        return actions_service_pb2.EnqueueResponse()

    def _record(self, action: Action, trace: run_definition_pb2.TraceAction) -> None:
        """Record a trace, which has already run in its parent."""
        action.details.metadata.action_type = run_definition_pb2.ACTION_TYPE_TRACE
        self._state.begin_attempt(action)
        self._state.move(action, trace.phase)

    async def watch_for_updates(
        self, request: actions_service_pb2.WatchForUpdatesRequest, ctx: RequestContext
    ) -> AsyncIterator[actions_service_pb2.WatchForUpdatesResponse]:
        """Send every child as it is, then a sentinel, then every change."""
        parent = request.parent_action_id
        run = self._state.find_run(parent.run)
        payload: dict[str, int] = {}
        sentinel = False
        while True:
            change = self._state.next_change()
            for action in list(run.actions.values()):
                if action.details.metadata.parent != parent.name:
                    continue
                if payload.get(action.name) != action.phase:
                    payload[action.name] = action.phase
                    yield actions_service_pb2.WatchForUpdatesResponse(action_update=action.update())
            if not sentinel:
                sentinel = True
                end = state_service_pb2.ControlMessage(sentinel=True)
                yield actions_service_pb2.WatchForUpdatesResponse(control_message=end)
            if run.actions[parent.name].is_over:
                return
            await change.wait()

    async def abort(
        self, request: actions_service_pb2.AbortRequest, ctx: RequestContext
    ) -> actions_service_pb2.AbortResponse:
        self._executor.abort(self._state.find_action(request.action_id), request.reason)
        return actions_service_pb2.AbortResponse()
