"""Finds the server of a run by its announcement, and fails as soon as the run has ended.

Three places are searched: the task's log through the control plane, the pod's log through
Kubernetes where that is allowed, and an object that the caller has named. An announcement is
signed, so the first valid one counts. The object comes last, because other tasks may be able to
write it, and only the pod writes its log. It counts only if the server has been running for a while
and its log shows nothing. Meanwhile the run is watched: a failure, and a pod that does not start,
are reported soon, with the events of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from union.sandbox._wire.errors import decode_error
from union.sandbox._wire.frames import VERSION
from union.sandbox.cluster._announce import parse_announcement
from union.sandbox.cluster._run_state import (
    PodWait,
    describe_run,
    get_details,
    launch_hint,
    phase_of,
    wait_for_end,
)
from union.sandbox.cluster._server_handle import ServerAddress
from union.sandbox.errors import SandboxError, SandboxExecutionError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from union.sandbox.cluster._announce import Announcement

__all__ = ["Search", "find_by_name", "get_run", "plane_error", "wait_for_end_by_name"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_POLL_S: Final = 0.3
_SLOW_POLL_S: Final = 2.0
_LOG_WAIT_S: Final = 3.0
"""How long the log of a run that has ended may take to show the reason."""
_LOG_FIRST_S: Final = 8.0
"""How long a run must have been running without a line in its log before the object counts."""
_UNWATCHED_S: Final = 0.5
_MAX_OBJECT: Final = 64 * 1024
_MAX_FAILURES: Final = 15
_TOKEN: Final = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
_MAX_LOG: Final = 256 * 1024


_HINTS: Final = {
    "unauthenticated": "log in: `flyte create config`, or pass api_key= to flyte.init()",
    "permission_denied": "the account may not submit runs in this project and domain",
    "unavailable": "check the endpoint of the control plane, and that it can be reached from here",
    "invalid_argument": "deploy the sandbox environment again, with the version used here",
}


def plane_error(exc: BaseException, what: str) -> SandboxExecutionError:
    """Return the error of a call to the control plane, of any class, as a ``SandboxError``."""
    code = getattr(exc, "code", "")
    named = str(getattr(code, "value", code)).lower()
    return SandboxExecutionError(
        f"{what}: {str(exc) or type(exc).__name__}",
        stage="transport",
        code="control-plane",
        hint=_HINTS.get(named, "check flyte.init() and the control plane's own logs"),
    )


async def get_run(name: str) -> Any:
    """Return a run by its name."""
    import flyte.remote

    try:
        return await flyte.remote.Run.get.aio(name=name)
    except Exception as exc:  # Flyte's errors, Connect's and those of an HTTP client
        raise plane_error(exc, f"the run {name}") from exc


async def wait_for_end_by_name(name: str) -> SandboxError:
    """Wait until a run has ended; return the error that describes its end.

    Where there is no control plane, this never returns.
    """
    flyte = sys.modules.get("flyte")
    if flyte is None or not flyte.is_control_plane_available():
        await asyncio.Event().wait()
    # A connection is usually there sooner than a reply of the control plane would be.
    await asyncio.sleep(_UNWATCHED_S)
    return await wait_for_end(await get_run(name))


async def find_by_name(name: str, *, key: str, expires: float) -> ServerAddress:
    """Find the server of a session that was passed on before its server was ready."""
    from union.sandbox._core.optional_deps import require

    require("flyte", extra="flyte", what="a session that was passed before it was ready")
    import flyte

    if not flyte.is_control_plane_available():
        raise SandboxUsageError(
            f"the session {name} has no endpoint yet, and there is no control plane to find it",
            code="no-endpoint",
            hint="pass a session on after `await sbx`, or inside `async with`",
        )
    run = await get_run(name)
    within_s = max(1.0, min(expires - time.time(), 180.0))
    search = Search(run, key=key)
    try:
        return await search.find(within_s=within_s)
    finally:
        await search.close()


class Search:
    """The search for the announcement of one run, in several places."""

    def __init__(self, run: Any, *, key: str, announce_to: str = "") -> None:
        self._run = run
        self._reading: asyncio.Future[Announcement] | None = None
        self._key = key
        self._announce_to = announce_to
        self._details: Any = None
        """The latest details of the run from the control plane."""
        self._is_over = False
        self._running_since: float | None = None

    async def find(self, *, within_s: float) -> ServerAddress:
        """Return the address of the server of the run; raise if it will never have one."""
        try:
            async with asyncio.timeout(within_s):
                return await self._first()
        except TimeoutError:
            raise SandboxExecutionError(
                f"the sandbox {self._run.name} could not be addressed within {within_s:g} s: "
                + describe_run(self._details),
                stage="transport",
                code="not-ready",
                hint=f"see {self._run.url}; session(ready_timeout=...) waits longer",
            ) from None

    async def close(self) -> None:
        """Stop reading the log. Best called after the run, and with it the log, has ended."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_LOG_WAIT_S)
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _first(self) -> ServerAddress:
        watching = asyncio.ensure_future(self._watch())
        sources: list[Coroutine[Any, Any, Announcement]] = []
        if self._announce_to:
            sources.append(self._search_object())
        if os.path.exists(_TOKEN):  # noqa: ASYNC240 - a file in memory
            sources.append(self._search_pod_log())
        searching: set[asyncio.Future[Announcement]] = set(map(asyncio.ensure_future, sources))
        # Not cancelled with the others, because the SDK logs an error when a log is cancelled.
        self._reading = asyncio.ensure_future(self._search_log())
        try:
            return await self._first_announcement(watching, {self._reading, *searching})
        finally:
            self._is_over = True
            tasks: list[asyncio.Future[Any]] = [watching, *searching]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_announcement(
        self, watching: asyncio.Future[None], searching: set[asyncio.Future[Announcement]]
    ) -> ServerAddress:
        while True:
            waiting: set[asyncio.Future[Any]] = {*searching}
            over = watching.done()
            if not over:
                waiting.add(watching)
            done: set[asyncio.Future[Any]] = set()
            if waiting:
                done, _ = await asyncio.wait(
                    waiting,
                    timeout=self._log_wait_s() if over else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            for task in done & searching:
                searching.discard(task)
                if (fault := task.exception()) is not None:
                    _LOGGER.debug("searching a source has failed: %s", fault)
                    continue
                return self._accept(task.result())
            if over and (not done or not searching):
                raise self._ended(watching)

    def _log_wait_s(self) -> float:
        """Return how long to wait for the log of an ended run; one without a pod has no log."""
        if self._details is None or not self._details.done():
            return 0.0
        attempts = self._details.pb2.attempts
        return _LOG_WAIT_S if attempts and attempts[-1].log_context.pods else 0.0

    def _accept(self, announcement: Announcement) -> ServerAddress:
        if announcement.failed is not None:
            raise decode_error(announcement.failed)
        if announcement.protocol != VERSION:
            raise SandboxExecutionError(
                f"the server of {self._run.name} uses version {announcement.protocol} of the "
                f"protocol, this client version {VERSION}",
                stage="transport",
                code="version",
                hint="deploy the sandbox environment again, with the version used here",
            )
        ip = urlsplit(announcement.endpoint).hostname
        return ServerAddress(endpoint=announcement.endpoint, ip=ip)

    def _parse_log(self, text: str) -> Announcement | None:
        for line in text.splitlines():
            found = parse_announcement(line, key=self._key, run=self._run.name, now=time.time())
            if found is not None:
                return found
        return None

    # The run.

    async def _watch(self) -> None:
        """Return when the run has ended, which it should not while it is searched for.

        This polls, because the SDK's own watch treats its cancellation as a lost connection and
        continues.
        """
        pause_s, failures = _POLL_S, 0
        waits = PodWait(self._run.name)
        while True:
            try:
                self._details = await get_details(self._run)
                failures = 0
                if self._running_since is None and phase_of(self._details) == "running":
                    self._running_since = time.monotonic()
            except Exception as exc:  # Any error of the client, up to a number of times.
                failures += 1
                if failures >= _MAX_FAILURES:
                    raise
                _LOGGER.debug("the control plane does not reply: %s", exc)
            if self._details is not None:
                if self._details.done():
                    return
                waits.check(self._details)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _SLOW_POLL_S)

    def _ended(self, watching: asyncio.Future[None]) -> SandboxError:
        fault = watching.exception()
        if isinstance(fault, SandboxError):
            return fault  # The pod waits for something that does not come.
        if fault is not None:
            return plane_error(fault, f"the run {self._run.name} cannot be watched")
        return SandboxExecutionError(
            f"the run {self._run.name} ended before its server could be addressed: "
            + describe_run(self._details),
            stage="spawn",
            code="launch-failed",
            hint=launch_hint(self._details, self._run.url),
        )

    # Sources.

    async def _search_log(self) -> Announcement:
        from flyte.remote._logs import Logs

        while not self._is_over:
            attempt = 1 if self._details is None else max(1, self._details.attempts)
            try:
                lines: AsyncGenerator[Any, None] = Logs.tail.aio(  # type: ignore[assignment]  # it is
                    action_id=self._run.action.action_id, attempt=attempt, retry=1
                )
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        if (found := self._parse_log(line.message)) is not None:
                            return found
                        if self._is_over:
                            break
            except Exception as exc:  # noqa: BLE001 - logs come and go; the watch decides
                _LOGGER.debug("no log of %s yet: %s", self._run.name, exc)
            await asyncio.sleep(_POLL_S)
        raise asyncio.CancelledError

    async def _search_object(self) -> Announcement:
        from flyte import storage

        while True:
            await asyncio.sleep(_SLOW_POLL_S)
            since = self._running_since
            if since is None or time.monotonic() - since < _LOG_FIRST_S:
                continue
            if not await storage.exists(self._announce_to):
                continue
            data = b""
            async for piece in storage.get_stream(self._announce_to):
                data += piece
                if len(data) > _MAX_OBJECT:
                    break  # Our server does not write that much.
            if (found := self._parse_log(data.decode("utf-8", "replace"))) is not None:
                return found

    async def _search_pod_log(self) -> Announcement:
        """Read the pod's log through Kubernetes, if the service account may read it."""
        from kubernetes import client, config

        config.load_incluster_config()  # type: ignore[no-untyped-call]  # theirs
        core = client.CoreV1Api()
        while True:
            await asyncio.sleep(_SLOW_POLL_S)
            attempts = [] if self._details is None else self._details.pb2.attempts
            for pod in attempts[-1].log_context.pods if attempts else ():
                text = await asyncio.to_thread(
                    core.read_namespaced_pod_log,
                    pod.pod_name,
                    pod.namespace,
                    limit_bytes=_MAX_LOG,
                )
                if (found := self._parse_log(text)) is not None:
                    return found
