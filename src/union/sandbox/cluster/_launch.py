"""``session()``: one call, to a cluster where there is one, to this machine where there is not."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from union.sandbox._core.extras import require
from union.sandbox.cluster._request import request_from
from union.sandbox.cluster._session import SandboxSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox.cluster._environment import SandboxEnvironment
    from union.sandbox.cluster._hold import Hold
    from union.sandbox.cluster._request import Request

__all__ = ["session"]


def _has_control_plane() -> bool:
    """Whether runs can be submitted. A Flyte that nobody has imported is not configured either."""
    flyte = sys.modules.get("flyte")
    return flyte is not None and bool(flyte.is_control_plane_available())


async def session(
    environment: SandboxEnvironment | str | None = None,
    *,
    name: str | None = None,
    timeout: timedelta | float = timedelta(hours=1),  # noqa: ASYNC109 - the session's, not the call's
    project: str | None = None,
    domain: str | None = None,
    resources: object = None,
    network_mode: str | None = None,
    network_allowlist: Sequence[str] | None = None,
    network_denylist: Sequence[str] | None = None,
    sandbox_mode: str | None = None,
    ready_timeout: timedelta | float = timedelta(minutes=3),
    owner_lease: timedelta | float | None = None,
) -> SandboxSession:
    """Starts a sandbox in a run of its own, and returns at once; the caller is its owner.

    ``environment`` is a deployed ``SandboxEnvironment``, or the name of one; the default is
    ``DEFAULT_SANDBOX_ENV``, with ``sandbox_mode="bwrap"`` ``DEFAULT_SANDBOX_ENV_BWRAP``. After
    ``timeout``, which is at most a day and counts from now, the run ends by itself.
    ``network_mode`` and its lists are the default and the ceiling of every call; without
    ``network_mode`` a call is blocked unless it asks for more. ``resources`` replaces the
    environment's. A server that cannot be addressed after ``ready_timeout`` is given up.

    With ``owner_lease`` the run also ends when nothing was heard of its owner for so long: one that
    crashed, or whose event loop did not come to it. The owner renews it by itself.

    Where Flyte has no control plane (none was configured, or the calling task runs locally), the
    sandbox is a process of this machine: the same in every respect, but with no pod around it. It
    ends with its owner's process, so it needs no lease.
    """
    require("aiohttp", extra="remote", what="session()")
    request = request_from(
        environment=environment,
        name=name,
        timeout=timeout,
        project=project,
        domain=domain,
        resources=resources,
        network_mode=network_mode,
        network_allowlist=network_allowlist,
        network_denylist=network_denylist,
        sandbox_mode=sandbox_mode,
        ready_timeout=ready_timeout,
        owner_lease=owner_lease,
    )
    created = datetime.now(UTC)
    if _has_control_plane():
        from union.sandbox.cluster._submit import submit

        hold = await submit(request)
        made = _described(request, created, hold)
        made.url, made.project, made.domain = hold.url, hold.project, hold.domain
    else:
        from union.sandbox.cluster import _local

        local = _local.start(request)
        made = _described(request, created, local)
        made.endpoint = local.endpoint
    return made


def _described(request: Request, created: datetime, hold: Hold) -> SandboxSession:
    network = request.spec.network
    made = SandboxSession(
        name=request.name,
        created_at=created,
        expires_at=created + timedelta(seconds=request.timeout_s),
        environment=request.environment,
        sandbox_mode=request.sandbox_mode,
        network_mode=network.mode if request.spec.network_is_ceiling else None,
        network_allowlist=(
            [entry.text for entry in network.allow] if network.mode == "allowlist" else None
        ),
        network_denylist=[entry.text for entry in network.deny] or None,
        verifier=hold.verifier,
    )
    made._own(hold)  # noqa: SLF001 - this is where owners are made
    return made
