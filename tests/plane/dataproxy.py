"""DataProxyService: bundles, inputs, results and logs."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.common import run_pb2
from flyteidl2.dataproxy import dataproxy_service_pb2
from flyteidl2.dataproxy.dataproxy_service_connect import DataProxyService
from flyteidl2.logs.dataplane import payload_pb2
from flyteidl2.task import common_pb2
from tests.plane.executor import follow
from tests.plane.state import now
from tests.plane.store import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from connectrpc.request import RequestContext
    from tests.plane.faults import Faults
    from tests.plane.state import State
    from tests.plane.store import Store


class DataProxy(DataProxyService):
    """Allocates places in the store, reads from it, and follows logs."""

    def __init__(self, state: State, store: Store, faults: Faults, store_url: str) -> None:
        self._state, self._store, self._faults, self._url = state, store, faults, store_url

    async def create_upload_location(
        self, request: dataproxy_service_pb2.CreateUploadLocationRequest, ctx: RequestContext
    ) -> dataproxy_service_pb2.CreateUploadLocationResponse:
        root = request.filename_root or request.content_md5.hex()
        key = f"{request.project}/{request.domain}/uploads/{root}/{request.filename}"
        return dataproxy_service_pb2.CreateUploadLocationResponse(
            signed_url=f"{self._url}/{BUCKET}/{key}", native_url=self._store.uri(key)
        )

    async def upload_inputs(
        self, request: dataproxy_service_pb2.UploadInputsRequest, ctx: RequestContext
    ) -> dataproxy_service_pb2.UploadInputsResponse:
        content = request.inputs.SerializeToString(deterministic=True)
        digest = hashlib.sha256(content).hexdigest()
        uri = self._store.uri(f"inputs/{digest}/inputs.pb")
        self._store.write(uri, content)
        payload = run_pb2.OffloadedInputData(uri=uri, inputs_hash=digest[:43])
        return dataproxy_service_pb2.UploadInputsResponse(offloaded_input_data=payload)

    async def get_action_data(
        self, request: dataproxy_service_pb2.GetActionDataRequest, ctx: RequestContext
    ) -> dataproxy_service_pb2.GetActionDataResponse:
        action = self._state.find_action(request.action_id)
        output_uri = f"{action.output_prefix}/outputs.pb"
        inputs, outputs = self._store.read(action.input_uri), self._store.read(output_uri)
        return dataproxy_service_pb2.GetActionDataResponse(
            inputs=common_pb2.Inputs.FromString(inputs or b""),
            outputs=common_pb2.Outputs.FromString(outputs or b""),
            inputs_uri=action.input_uri,
            outputs_uri=output_uri,
        )

    async def tail_logs(
        self, request: dataproxy_service_pb2.TailLogsRequest, ctx: RequestContext
    ) -> AsyncIterator[dataproxy_service_pb2.TailLogsResponse]:
        """Stream the log of the action's current pod from begin to end."""
        if self._faults.logs_down:
            raise ConnectError(Code.UNAVAILABLE, "no logs today")
        pod = self._state.find_action(request.action_id).pod
        if pod is None:
            raise ConnectError(Code.NOT_FOUND, "no pod yet")
        await asyncio.sleep(pod.born + self._faults.log_lag_s - time.monotonic())
        if self._faults.log_begins:
            yield _response([line.encode() for line in self._faults.log_begins])
        rest = b""
        async for chunk in follow(pod):
            *lines, rest = (rest + chunk).split(b"\n")
            if lines:
                yield _response(lines)
        if rest:
            yield _response([rest])


def _response(lines: list[bytes]) -> dataproxy_service_pb2.TailLogsResponse:
    moment = now()
    logs = dataproxy_service_pb2.TailLogsResponse.Logs(
        lines=[
            payload_pb2.LogLine(
                timestamp=moment,
                message=line.decode(errors="replace") + "\n",
                originator=payload_pb2.LogLineOriginator.USER,
            )
            for line in lines
        ]
    )
    return dataproxy_service_pb2.TailLogsResponse(logs=[logs])
