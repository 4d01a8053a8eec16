"""``session()``: starts a sandbox on a cluster, or as a process of this machine without one."""

from __future__ import annotations

import warnings
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.optional_deps import require
from union.sandbox._policy.http_entries import texts_of
from union.sandbox.cluster import _plain_calls
from union.sandbox.cluster._place import check_local, choose_place
from union.sandbox.cluster._request import resolve_request
from union.sandbox.cluster._session import SandboxSession

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from types import TracebackType

    from union.sandbox.cluster._environment import SandboxEnvironment
    from union.sandbox.cluster._local import LocalServer
    from union.sandbox.cluster._request import Request
    from union.sandbox.cluster._server_handle import ServerHandle

__all__ = ["Launch", "restore_local", "session"]

_HOUR: Final = timedelta(hours=1)
_LEASE: Final = timedelta(minutes=5)


class Launch(Coroutine[Any, Any, SandboxSession]):
    """A session that is about to be started: ``await`` it, or enter it with ``async with``.

    ``await`` submits the run and returns the ``SandboxSession`` at once. ``async with`` also waits
    until it can be addressed, and closes it at the end.
    """

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, SandboxSession]]) -> None:
        self._begin = begin
        self._coroutine: Coroutine[Any, Any, SandboxSession] | None = None
        self._session: SandboxSession | None = None

    def _started(self) -> Coroutine[Any, Any, SandboxSession]:
        if self._coroutine is None:
            self._coroutine = self._begin()
        return self._coroutine

    def __await__(self) -> Generator[Any, Any, SandboxSession]:
        if self._coroutine is not None:
            raise RuntimeError("session(...) was awaited already: use the session that it returned")
        return self._started().__await__()

    def send(self, value: Any) -> Any:
        return self._started().send(value)

    def throw(self, *args: Any) -> Any:
        return self._started().throw(*args)

    def close(self) -> None:
        self._started().close()

    async def __aenter__(self) -> SandboxSession:
        self._session = await self
        return await self._session.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.__aexit__(kind, exc, traceback)

    def __del__(self) -> None:
        if self._coroutine is None:
            warnings.warn("session(...) was never awaited", RuntimeWarning, stacklevel=2)


def session(
    environment: SandboxEnvironment | str | None = None,
    *,
    name: str | None = None,
    timeout: timedelta | float = _HOUR,
    timeout_s: float | None = None,
    project: str | None = None,
    domain: str | None = None,
    service_account: str | None = None,
    resources: object = None,
    network_mode: str | None = None,
    network_allowlist: Sequence[str] | None = None,
    network_denylist: Sequence[str] | None = None,
    network_proxy_url: str | None = None,
    network_socks_url: str | None = None,
    sandbox_mode: str | None = None,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    host_work_dir: str | None = None,
    read_only_paths: Sequence[str] = (),
    read_write_paths: Sequence[str] = (),
    local: bool | None = None,
    ready_timeout: timedelta | float = timedelta(minutes=3),
    owner_lease: timedelta | float | None = _LEASE,
) -> Launch:
    """Start a sandbox in a run of its own. The caller is its owner.

    ``await session(...)`` submits the run and returns the session at once; ``async with
    session(...)`` also waits until it can be addressed. Both spellings, and ``async with await
    session(...)``, give the same session. Arguments are checked before anything is submitted.

    Where Flyte has no control plane (it was not initialised, or the calling task runs locally), the
    sandbox is a process of this machine: the same in every respect, but with no pod around it, and
    it ends with its owner's process. ``local`` decides whether that is accepted.

    Args:
        environment: A deployed ``SandboxEnvironment`` or the name of one. Default:
            ``DEFAULT_SANDBOX_ENV``; with ``sandbox_mode="bwrap"``, ``DEFAULT_SANDBOX_ENV_BWRAP``.
        name: The name of the run. Default: ``sbx-`` and 16 random hexadecimal digits.
        timeout: After this time, counted from now, the run ends by itself. Default: one hour; at
            most 24 hours.
        timeout_s: The same in seconds, as ``on_device.session()`` takes it.
        project: Where the run is submitted. Default: the configured project.
        domain: Where the run is submitted. Default: the configured domain.
        service_account: The Kubernetes service account of the pod. Default: the environment's.
        resources: Replaces the resources of the environment.
        network_mode: ``"blocked"``, ``"allowlist"`` or ``"open"``: the default and the ceiling of
            every call. Default None: a call is blocked unless it requests more.
        network_allowlist: The hosts that ``"allowlist"`` allows.
        network_denylist: The hosts that no call may reach.
        network_proxy_url: An upstream HTTP proxy, as ``on_device.session()`` takes it.
        network_socks_url: An upstream SOCKS proxy, as ``on_device.session()`` takes it.
        sandbox_mode: ``"userns"``, ``"bwrap"`` or ``"landlock"``. Default: the environment's.
        backend: Another spelling of ``sandbox_mode``: ``"userns"``, ``"bubblewrap"`` or
            ``"landlock"``.
        env: Variables of every command. They are stored with the inputs of the run, so pass
            secrets to single commands instead, or as ``secrets`` of the environment.
        host_work_dir: A directory of the pod to use as the work dir, or of this machine.
        read_only_paths: Paths of the pod, or of this machine, to show read-only.
        read_write_paths: Paths of the pod, or of this machine, to show writable.
        local: None runs on this machine where there is no cluster, with a ``SandboxWarning`` that
            names the reason; True runs on this machine; False requires a cluster. An environment
            with ``runtime="gvisor"`` never runs on this machine.
        ready_timeout: A server that cannot be addressed after this time is given up. Default: three
            minutes.
        owner_lease: The run also ends when its owner has not been in contact for this long. The
            process of the owner renews it by itself, from a thread. Default: five minutes. None:
            no lease, for a session that outlives the process that started it.

    """
    require("aiohttp", extra="remote", what="session()")
    where = check_local(local)
    request = resolve_request(
        environment=environment,
        name=name,
        timeout=None if timeout is _HOUR and timeout_s is not None else timeout,
        timeout_s=timeout_s,
        project=project,
        domain=domain,
        service_account=service_account,
        resources=resources,
        network_mode=network_mode,
        network_allowlist=network_allowlist,
        network_denylist=network_denylist,
        network_proxy_url=network_proxy_url,
        network_socks_url=network_socks_url,
        sandbox_mode=sandbox_mode,
        backend=backend,
        env=env,
        host_work_dir=host_work_dir,
        read_only_paths=read_only_paths,
        read_write_paths=read_write_paths,
        ready_timeout=ready_timeout,
        owner_lease=owner_lease,
    )
    place = choose_place(request, local=where, stacklevel=2)
    _plain_calls.install()
    return Launch(lambda: _submit_session(request) if place == "cluster" else _start_local(request))


async def _submit_session(request: Request) -> SandboxSession:
    from union.sandbox.cluster._submit import submit

    created = datetime.now(UTC)
    handle = await submit(request)
    made = _make_session(request, created, handle)
    made.url, made.project, made.domain = handle.url, handle.project, handle.domain
    return made


async def _start_local(request: Request) -> SandboxSession:
    from union.sandbox.cluster import _local

    local = _local.LocalServer(request)
    made = _make_session(request, datetime.now(UTC), local)
    made.endpoint = local.endpoint
    local.fields = made._fields()
    return made


def restore_local(local: LocalServer, fields: dict[str, Any]) -> SandboxSession:
    """Return the owner's session of a server that this process has started."""
    made = SandboxSession(**fields)
    made._become_owner(local)  # noqa: SLF001 - only this module makes owners
    return made


def _make_session(request: Request, created: datetime, handle: ServerHandle) -> SandboxSession:
    network = request.spec.network
    made = SandboxSession(
        name=request.name,
        created_at=created,
        expires_at=created + timedelta(seconds=request.timeout_s),
        environment=request.environment,
        sandbox_mode=request.sandbox_mode,
        network_mode=network.mode if request.spec.network_is_ceiling else None,
        network_allowlist=(texts_of(network.allow) if network.mode == "allowlist" else None),
        network_denylist=[entry.text for entry in network.deny] or None,
        host_work_dir=request.spec.host_work_dir,
        verifier=handle.verifier,
    )
    made._become_owner(handle)  # noqa: SLF001 - only this module makes owners
    return made
