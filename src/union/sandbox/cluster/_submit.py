"""Submits the run of a session to a cluster, and manages it until its end."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.resources import Resources
from union.sandbox._wire.endpoint import parse_endpoint
from union.sandbox.cluster._announce import new_signing_key
from union.sandbox.cluster._find import Search, plane_error
from union.sandbox.cluster._keys import Keys, session_name, verifier_of
from union.sandbox.cluster._lease import LeaseRenewal
from union.sandbox.cluster._request import ATTACH_SALT, OWNER_LEASE
from union.sandbox.errors import (
    SandboxError,
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)

if TYPE_CHECKING:
    from union.sandbox.cluster._request import Request
    from union.sandbox.cluster._server_handle import ServerAddress
    from union.sandbox.remote._http import HttpClient

__all__ = ["ClusterRun", "submit"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_SHUTDOWN_S: Final = 2.0
_ABORT_TRIES: Final = 3
_ABORT_S: Final = 20.0


async def submit(request: Request) -> ClusterRun:
    """Submit the run; return when the control plane has accepted it."""
    submitting = asyncio.ensure_future(_submit(request))
    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        # Only the reply shows whether there is a run and whether it is ours.
        await asyncio.wait({submitting}, timeout=_ABORT_S)
        if submitting.done() and not submitting.cancelled() and submitting.exception() is None:
            await submitting.result().end()
        submitting.cancel()
        raise


async def _submit(request: Request) -> ClusterRun:
    import flyte
    import flyte.errors
    import flyte.remote

    salt = secrets.token_hex(16)
    keys = Keys.for_run(request.name, salt)
    signing_key, public_key = new_signing_key(keys.announcement)
    announce_to = _announce_to(request.name)
    task_name = f"{request.environment}.sandbox_server"
    inputs = {
        "owner_sha256": verifier_of(keys.owner),
        "guest_sha256": verifier_of(keys.guest),
        "timeout_s": request.timeout_s,
        "session": json.dumps({**_session_payload(request), ATTACH_SALT: salt}),
        "sandbox_mode": request.sandbox_mode if request.overrides_mode else "",
        "announce_to": announce_to,
        "announce_key": signing_key,
    }
    try:
        task: Any = flyte.remote.TaskDetails.get(
            task_name, project=request.project, domain=request.domain, auto_version="latest"
        )
        await task.fetch.aio()
        if request.resources is not None:
            task = await task.override.aio(resources=_flyte_resources(request.resources))
        run: Any = await flyte.with_runcontext(
            mode="remote",
            name=request.name,
            project=request.project,
            domain=request.domain,
            labels={"union-sandbox": "server"},
            service_account=request.service_account,
        ).run.aio(task, **inputs)
    except flyte.errors.RemoteTaskNotFoundError as exc:
        raise SandboxUsageError(
            f"the sandbox environment {request.environment!r} is not deployed: {exc}",
            argument="environment",
            code="not-deployed",
            hint="deploy it once: `unionai-sandbox-deploy` for the defaults, "
            "`flyte deploy FILE NAME` for one of your own",
        ) from exc
    except flyte.errors.RuntimeUserError as exc:
        if exc.code != "RunAlreadyExistsError":
            raise plane_error(exc, "the run could not be submitted") from exc
        raise SandboxUsageError(
            f"a run named {request.name!r} already exists",
            argument="name",
            code="name-taken",
            hint="omit name, or choose another",
        ) from exc
    except SandboxError:
        raise
    except Exception as exc:  # Flyte's errors, Connect's and those of an HTTP client
        raise plane_error(exc, "the run could not be submitted") from exc
    return ClusterRun(
        run,
        keys,
        verifier=public_key,
        announce_to=announce_to,
        ready_timeout_s=request.ready_timeout_s,
        owner_lease_s=request.owner_lease_s,
    )


def _session_payload(request: Request) -> dict[str, Any]:
    payload = request.session()
    lease_s = request.owner_lease_s
    if lease_s is not None:
        # At first, the server waits as long as its owner searches for it.
        payload[OWNER_LEASE] = [lease_s, max(lease_s, request.ready_timeout_s)]
    return payload


def _announce_to(name: str) -> str:
    """Return the object that the server writes its announcement to; only tasks have one."""
    import flyte

    context = flyte.ctx()
    # Outside a task, every field of the context is None.
    raw = getattr(context.raw_data_path, "path", None)
    return f"{str(raw).rstrip('/')}/union-sandbox/{name}" if raw else ""


def _flyte_resources(resources: object) -> Any:
    import flyte

    if not isinstance(resources, Resources):
        return resources
    memory = resources.memory
    return flyte.Resources(
        cpu=resources.cpu,
        memory=f"{memory}" if isinstance(memory, int) else memory,
        gpu=resources.gpu,
    )


class ClusterRun:
    """A run on a cluster, and the tokens for its server."""

    def __init__(
        self,
        run: Any,
        keys: Keys,
        *,
        verifier: str,
        ready_timeout_s: float,
        owner_lease_s: float | None,
        announce_to: str = "",
    ) -> None:
        self.keys = keys
        self.verifier = verifier
        self._run = run
        identifier = run.pb2.action.id.run
        self.url: str | None = run.url
        self.project: str | None = identifier.project or None
        self.domain: str | None = identifier.domain or None
        self._search = Search(run, key=verifier, announce_to=announce_to)
        self._finding: asyncio.Task[ServerAddress] = asyncio.get_running_loop().create_task(
            self._search.find(within_s=ready_timeout_s)
        )
        # The result may never be awaited, which must not be logged as an error.
        self._finding.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._owner_lease_s = owner_lease_s
        self._lease: LeaseRenewal | None = None
        self._finding.add_done_callback(self._begin_lease)

    async def wait_ready(self) -> ServerAddress:
        try:
            return await asyncio.shield(self._finding)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._finding.cancelled() and not (caller and caller.cancelling()):
                raise SessionClosedError("the session was closed before it was ready") from None
            raise

    def take_socket(self) -> None:
        """Return None: the server is not a child of this process."""

    def _begin_lease(self, finding: asyncio.Task[ServerAddress]) -> None:
        if self._owner_lease_s is None or finding.cancelled() or finding.exception() is not None:
            return
        self._lease = LeaseRenewal(
            parse_endpoint(finding.result().endpoint),
            token=self.keys.owner,
            path=f"sessions/{session_name(self._run.name)}",
            lease_s=self._owner_lease_s,
        )

    def _http(self) -> HttpClient | None:
        """Return a client for the server; None if the server was not found."""
        if self._finding.cancelled() or self._finding.exception() is not None:
            return None
        from union.sandbox.remote._http import HttpClient

        return HttpClient(
            parse_endpoint(self._finding.result().endpoint), token=self.keys.owner, ca=None
        )

    async def end(self) -> None:
        try:
            self._finding.cancel()
            await asyncio.wait({self._finding})
            if self._lease is not None:
                self._lease.stop()
            await self._request_shutdown()
        finally:
            await self._abort()
            await self._search.close()

    async def _request_shutdown(self) -> None:
        """Request an orderly shutdown; the run is aborted afterwards in any case."""
        if (http := self._http()) is None:
            return
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await http.call("POST", "shutdown")
        except (SandboxError, TimeoutError) as exc:
            _LOGGER.debug("the shutdown request to %s has failed: %s", self._run.name, exc)
        finally:
            await http.close()

    async def _abort(self) -> None:
        problem: Exception | None = None
        for attempt in range(_ABORT_TRIES):
            try:
                async with asyncio.timeout(_ABORT_S):
                    await self._run.abort.aio(reason="the owner has closed the session")
            except Exception as exc:  # noqa: BLE001 - any error of the client is retried
                problem = exc
                await asyncio.sleep(0.2 * 2**attempt)
            else:
                return
        raise SandboxExecutionError(
            f"the run {self._run.name} could not be aborted: {problem}",
            stage="transport",
            code="abort-failed",
            hint=f"abort it by hand: flyte abort run {self._run.name}",
        ) from problem
