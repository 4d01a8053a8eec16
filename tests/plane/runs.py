"""RunService: create, get, watch, list and abort runs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.common import identifier_pb2, list_pb2, phase_pb2
from flyteidl2.task import task_definition_pb2
from flyteidl2.workflow import run_definition_pb2, run_service_pb2
from flyteidl2.workflow.run_service_connect import RunService
from tests.plane.state import ROOT_ACTION, Action, Run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from connectrpc.request import RequestContext
    from tests.plane.executor import Executor
    from tests.plane.faults import Faults
    from tests.plane.state import State
    from tests.plane.tasks import Tasks

_LOOK_S = 0.2
"""How soon an open watch notices that it must be interrupted."""


class Runs(RunService):
    """Runs by name, each with its tree of actions."""

    def __init__(self, state: State, tasks: Tasks, executor: Executor, faults: Faults) -> None:
        self._state, self._tasks, self._executor, self._faults = state, tasks, executor, faults

    async def create_run(
        self, request: run_service_pb2.CreateRunRequest, ctx: RequestContext
    ) -> run_service_pb2.CreateRunResponse:
        run_id = identifier_pb2.RunIdentifier()
        if request.HasField("run_id"):
            run_id.CopyFrom(request.run_id)
        else:
            place = request.project_id
            run_id = identifier_pb2.RunIdentifier(
                org=place.organization,
                project=place.name,
                domain=place.domain,
                name="r" + secrets.token_hex(9),
            )
        key = (run_id.project, run_id.domain, run_id.name)
        if key in self._state.runs:
            raise ConnectError(Code.ALREADY_EXISTS, f"run {run_id.name} exists")
        if request.HasField("task_id"):
            spec = self._tasks.find(request.task_id).spec
        else:
            spec = request.task_spec
        run = Run(run_id, request.run_spec)
        details = action_details(run_id, ROOT_ACTION, spec)
        details.metadata.relation.CopyFrom(request.run_spec.relation)
        action = Action(run, details, request.offloaded_input_data.uri, run.base)
        run.actions[ROOT_ACTION] = action
        self._state.runs[key] = run
        self._executor.start(action)
        return run_service_pb2.CreateRunResponse(run=run.message())

    async def abort_run(
        self, request: run_service_pb2.AbortRunRequest, ctx: RequestContext
    ) -> run_service_pb2.AbortRunResponse:
        for action in self._state.find_run(request.run_id).actions.values():
            self._executor.abort(action, request.reason)
        return run_service_pb2.AbortRunResponse()

    async def abort_action(
        self, request: run_service_pb2.AbortActionRequest, ctx: RequestContext
    ) -> run_service_pb2.AbortActionResponse:
        self._executor.abort(self._state.find_action(request.action_id), request.reason)
        return run_service_pb2.AbortActionResponse()

    async def get_run_details(
        self, request: run_service_pb2.GetRunDetailsRequest, ctx: RequestContext
    ) -> run_service_pb2.GetRunDetailsResponse:
        run = self._state.find_run(request.run_id)
        details = run_definition_pb2.RunDetails(run_spec=run.spec, action=run.root.details)
        return run_service_pb2.GetRunDetailsResponse(details=details)

    async def get_action_details(
        self, request: run_service_pb2.GetActionDetailsRequest, ctx: RequestContext
    ) -> run_service_pb2.GetActionDetailsResponse:
        action = self._state.find_action(request.action_id)
        return run_service_pb2.GetActionDetailsResponse(details=action.details)

    async def watch_action_details(
        self, request: run_service_pb2.WatchActionDetailsRequest, ctx: RequestContext
    ) -> AsyncIterator[run_service_pb2.WatchActionDetailsResponse]:
        action = self._state.find_action(request.action_id)
        cuts = self._faults.watch_cuts
        payload = b""
        while True:
            change = self._state.next_change()
            current = action.details.SerializeToString(deterministic=True)
            if current != payload:
                payload = current
                yield run_service_pb2.WatchActionDetailsResponse(details=action.details)
            if action.is_over:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), _LOOK_S)
            if self._faults.watch_cuts != cuts:
                raise ConnectError(Code.UNAVAILABLE, "the watch was cut")

    async def list_runs(
        self, request: run_service_pb2.ListRunsRequest, ctx: RequestContext
    ) -> run_service_pb2.ListRunsResponse:
        place = (request.project_id.name, request.project_id.domain)
        asked = request.request.filters
        found = [
            run.message()
            for key, run in self._state.runs.items()
            if key[:2] == place and all(_holds(one, run) for one in asked)
        ]
        return run_service_pb2.ListRunsResponse(runs=found)

    async def list_actions(
        self, request: run_service_pb2.ListActionsRequest, ctx: RequestContext
    ) -> run_service_pb2.ListActionsResponse:
        actions = self._state.find_run(request.run_id).actions.values()
        return run_service_pb2.ListActionsResponse(actions=[a.message() for a in actions])


def action_details(
    run_id: identifier_pb2.RunIdentifier, name: str, spec: task_definition_pb2.TaskSpec
) -> run_definition_pb2.ActionDetails:
    """Return the description of an action that has not started."""
    template = spec.task_template
    task = run_definition_pb2.TaskActionMetadata(
        id=task_definition_pb2.TaskIdentifier(
            org=template.id.org,
            project=template.id.project,
            domain=template.id.domain,
            name=template.id.name,
            version=template.id.version,
        ),
        task_type=template.type,
        short_name=spec.short_name,
    )
    metadata = run_definition_pb2.ActionMetadata(
        task=task,
        action_type=run_definition_pb2.ACTION_TYPE_TASK,
        environment_name=spec.environment.name,
    )
    details = run_definition_pb2.ActionDetails(
        id=identifier_pb2.ActionIdentifier(run=run_id, name=name), metadata=metadata, task=spec
    )
    details.status.start_time.GetCurrentTime()
    return details


def _holds(asked: list_pb2.Filter, run: Run) -> bool:
    """Return whether a filter accepts a run; only the filters that we use are supported."""
    if asked.field.startswith("labels."):
        value = run.spec.labels.values.get(asked.field.removeprefix("labels."))
        return value is not None and (not asked.values or value in asked.values)
    if asked.field == "phase":
        phase = run.root.phase
        return bool({str(phase), phase_pb2.ActionPhase.Name(phase)} & set(asked.values))
    if asked.field == "task_name":
        return run.root.details.metadata.task.id.name in asked.values
    raise ConnectError(Code.UNIMPLEMENTED, f"filter by {asked.field}")
