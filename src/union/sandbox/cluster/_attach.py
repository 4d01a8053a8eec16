"""``attach()``: finds a session again by the name of its run, and becomes its owner.

The tokens of a session follow from a secret of the user and the name of the run. A caller that has
crashed, or another process of the same user, derives them again; the server never stores them, and
the inputs of the run hold their digests only.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.optional_deps import require
from union.sandbox.cluster import _local
from union.sandbox.cluster._attach_key import VARIABLE, attach_key, key_file
from union.sandbox.cluster._keys import Keys, verifier_of
from union.sandbox.cluster._launch import Launch, restore_local
from union.sandbox.cluster._place import why_no_cluster
from union.sandbox.cluster._request import ATTACH_SALT, OWNER_LEASE, check_name, mode_of, seconds
from union.sandbox.cluster._session import SandboxSession
from union.sandbox.errors import SandboxUsageError, SessionClosedError

if TYPE_CHECKING:
    from union.sandbox.cluster._submit import ClusterRun

__all__ = ["attach"]

_TASK: Final = ".sandbox_server"


def attach(name: str, *, ready_timeout: timedelta | float = timedelta(minutes=3)) -> Launch:
    """Find a session again by its name, and become its owner: after a crash, or elsewhere.

    ``await attach(name)`` returns the session; ``async with attach(name)`` also waits until it can
    be addressed, and ends the run at the end of the block. Files and the venv are as they were.
    Commands that the former owner had started have ended with its connection.

    The tokens of the session are derived from a secret of the user: the variable
    ``UNION_SANDBOX_ATTACH_KEY``, or the file ``~/.local/state/union-sandbox/attach-key``, which the
    first session makes. It must be the same secret as in the process that started the session. A
    session with an ``owner_lease`` must be found again before its lease is over. A session without
    a cluster ends with its owner's process, so it is found in that process only.

    Args:
        name: The name of the run: ``name=`` of ``session()``, or ``sbx.name``.
        ready_timeout: A server that cannot be addressed after this time is given up. Default: three
            minutes.

    """
    require("aiohttp", extra="remote", what="attach()")
    check_name(name)
    within_s = seconds("ready_timeout", ready_timeout)
    return Launch(lambda: _attach(name, within_s))


async def _attach(name: str, within_s: float) -> SandboxSession:
    if (live := _local.live(name)) is not None:
        return restore_local(*live)
    if why := why_no_cluster():
        raise SandboxUsageError(
            f"there is no session {name!r} in this process, and no cluster to find it on: {why}",
            argument="name",
            code="no-session",
            hint="a session without a cluster ends with the process that started it; to find one "
            "on a cluster, call flyte.init(...) first",
        )
    from union.sandbox.cluster._find import get_run, plane_error
    from union.sandbox.cluster._run_state import describe_run, get_details

    run = await get_run(name)
    try:
        details = await get_details(run)
        inputs = dict(await details.inputs())
    except Exception as exc:  # Flyte's errors, Connect's and those of an HTTP client
        raise plane_error(exc, f"the run {name}") from exc
    if details.done():
        raise SessionClosedError(f"the run {name} has ended: {describe_run(details)}")
    return _restore(run, details, inputs, ready_timeout_s=within_s)


def _restore(
    run: Any, details: Any, inputs: dict[str, Any], *, ready_timeout_s: float
) -> SandboxSession:
    from union.sandbox.cluster._announce import new_signing_key
    from union.sandbox.cluster._submit import ClusterRun

    if "owner_sha256" not in inputs:
        raise SandboxUsageError(
            f"the run {run.name!r} is no sandbox session",
            argument="name",
            code="no-session",
            hint="pass the name of a run that session() has started",
        )
    key = attach_key(create=False)
    if key is None:
        raise SandboxUsageError(
            f"the session {run.name!r} cannot be attached to: there is no attach key",
            code="attach-key",
            hint=f"set {VARIABLE}, or keep {key_file()}, as in the process that started it",
        )
    arguments = json.loads(inputs["session"])
    keys = Keys.derived(key, run.name, str(arguments.get(ATTACH_SALT, "")))
    if verifier_of(keys.owner) != inputs["owner_sha256"]:
        raise SandboxUsageError(
            f"the session {run.name!r} was started with another attach key",
            code="attach-key",
            hint=f"use the same {VARIABLE}, or the same file {key_file()}, as in that process",
        )
    lease = arguments.get(OWNER_LEASE)
    handle = ClusterRun(
        run,
        keys,
        verifier=new_signing_key(keys.announcement)[1],
        ready_timeout_s=ready_timeout_s,
        owner_lease_s=None if lease is None else float(lease[0]),
    )
    return _session(run, details, inputs, arguments, handle)


def _session(
    run: Any, details: Any, inputs: dict[str, Any], arguments: dict[str, Any], handle: ClusterRun
) -> SandboxSession:
    begun: datetime = details.pb2.status.start_time.ToDatetime(tzinfo=UTC)
    task = str(details.pb2.metadata.task.id.name)
    made = SandboxSession(
        name=run.name,
        created_at=begun,
        expires_at=begun + timedelta(seconds=float(inputs["timeout_s"])),
        url=handle.url,
        project=handle.project,
        domain=handle.domain,
        environment=task.removesuffix(_TASK),
        sandbox_mode=mode_of(str(arguments.get("backend", "userns"))),
        network_mode=arguments.get("network_mode"),
        network_allowlist=arguments.get("network_allowlist"),
        network_denylist=arguments.get("network_denylist"),
        host_work_dir=arguments.get("host_work_dir"),
        verifier=handle.verifier,
    )
    made._become_owner(handle)  # noqa: SLF001 - this module makes owners
    return made
