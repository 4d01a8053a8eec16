"""ClusterService: which cluster holds some data. There is one, and it is the plane itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyteidl2.cluster import payload_pb2
from flyteidl2.cluster.service_connect import ClusterService

if TYPE_CHECKING:
    from connectrpc.request import RequestContext


class Cluster(ClusterService):
    """Replies to every request with this plane."""

    async def select_cluster(
        self, request: payload_pb2.SelectClusterRequest, ctx: RequestContext
    ) -> payload_pb2.SelectClusterResponse:
        """Return an empty address, which means the replying server."""
        return payload_pb2.SelectClusterResponse()
