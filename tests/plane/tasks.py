"""TaskService: deploy and get tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.common import list_pb2
from flyteidl2.task import task_definition_pb2, task_service_pb2
from flyteidl2.task.task_service_connect import TaskService
from tests.plane.state import now

if TYPE_CHECKING:
    from connectrpc.request import RequestContext
    from tests.plane.state import State


class Tasks(TaskService):
    """Keeps every version of every task that was deployed."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def deploy_task(
        self, request: task_service_pb2.DeployTaskRequest, ctx: RequestContext
    ) -> task_service_pb2.DeployTaskResponse:
        known = self._known(request.task_id)
        if known is not None:
            if known.spec != request.spec:
                raise ConnectError(Code.ALREADY_EXISTS, "another task has this name and version")
            raise ConnectError(Code.ALREADY_EXISTS, "deployed already")
        metadata = task_definition_pb2.TaskMetadata(
            short_name=request.spec.short_name,
            deployed_at=now(),
            environment_name=request.spec.environment.name,
        )
        self._state.tasks.append(
            task_definition_pb2.TaskDetails(
                task_id=request.task_id, metadata=metadata, spec=request.spec
            )
        )
        return task_service_pb2.DeployTaskResponse()

    async def get_task_details(
        self, request: task_service_pb2.GetTaskDetailsRequest, ctx: RequestContext
    ) -> task_service_pb2.GetTaskDetailsResponse:
        return task_service_pb2.GetTaskDetailsResponse(details=self.find(request.task_id))

    async def list_tasks(
        self, request: task_service_pb2.ListTasksRequest, ctx: RequestContext
    ) -> task_service_pb2.ListTasksResponse:
        place = (request.project_id.name, request.project_id.domain)
        found = [
            task_definition_pb2.Task(task_id=task.task_id, metadata=task.metadata)
            for task in self._state.tasks
            if (task.task_id.project, task.task_id.domain) == place
            and all(_holds(name, task.task_id.name) for name in request.request.filters)
        ]
        if request.request.sort_by.direction == list_pb2.Sort.DESCENDING:
            found.reverse()
        return task_service_pb2.ListTasksResponse(tasks=found[: request.request.limit or None])

    def find(self, task_id: task_definition_pb2.TaskIdentifier) -> task_definition_pb2.TaskDetails:
        known = self._known(task_id)
        if known is None:
            raise ConnectError(Code.NOT_FOUND, f"task {task_id.name} {task_id.version} not found")
        return known

    def _known(
        self, task_id: task_definition_pb2.TaskIdentifier
    ) -> task_definition_pb2.TaskDetails | None:
        key = (task_id.project, task_id.domain, task_id.name, task_id.version)
        for task in self._state.tasks:
            known = task.task_id
            if (known.project, known.domain, known.name, known.version) == key:
                return task
        return None


def _holds(asked: list_pb2.Filter, name: str) -> bool:
    """Return whether a filter accepts a name; the SDK filters tasks by name only."""
    if asked.field != "name":
        raise ConnectError(Code.UNIMPLEMENTED, f"filter by {asked.field}")
    if asked.function == list_pb2.Filter.CONTAINS:
        return asked.values[0] in name
    return name in asked.values
