"""SandboxSession: a session in a run of its own, which can be passed to other tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import weakref
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self, get_type_hints

from union.sandbox._core.optional_deps import require
from union.sandbox._core.resolve import resolve_session
from union.sandbox._session.session import Session
from union.sandbox.cluster._keys import session_name
from union.sandbox.cluster._request import BACKENDS
from union.sandbox.cluster._server_command import WORK_DIR
from union.sandbox.errors import SandboxError, SandboxUsageError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from union.sandbox._session.transport import Transport
    from union.sandbox.cluster._server_handle import ServerHandle
    from union.sandbox.remote._access import Access

__all__ = ["SandboxSession"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_TRANSPORT_S: Final = 5.0
_CONNECT_S: Final = 30.0
_REFERENCE_S: Final = 5.0
"""How long a reference waits for its server, which was ready before it was passed on."""
_YOUNG_S: Final = 60.0


def _rebuild(cls: type[SandboxSession], fields: dict[str, Any]) -> SandboxSession:
    return cls(**fields)


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class SandboxSession(Session):
    """A live sandbox in a run of its own, made by ``await session(...)``.

    ``async with sbx``, or ``await sbx``, waits until it can be addressed; the first call connects.
    The process that made it is its *owner*: leaving the block, or ``close()``, ends the run. It can
    be passed to other tasks, pickled and copied: the receiver gets a *reference*, which runs
    commands and moves files, and whose ``close()`` ends only the commands that it has started.

    A reference carries a token for this one session, valid until ``expires_at``. The token is
    stored wherever the inputs of those tasks are stored.
    """

    name: str
    """The name of the run."""
    created_at: datetime
    expires_at: datetime
    """When the run ends at the latest."""
    endpoint: str = ""
    """The endpoint of the server; empty until the server is found."""
    ip: str | None = None
    """The address of the pod, once it is found; None for a process of this machine."""
    url: str | None = None
    """The run's page in the console; None without a cluster."""
    project: str | None = None
    domain: str | None = None
    environment: str = ""
    sandbox_mode: str = "userns"
    network_mode: str | None = None
    """The default and the ceiling of every call; None: blocked unless a call requests more."""
    network_allowlist: list[str] | None = None
    network_denylist: list[str] | None = None
    host_work_dir: str | None = None
    """The work dir, if the owner has chosen one."""
    access: str = ""
    """The guest's token. The owner's token is in no field."""
    verifier: str = ""
    """The public key that verifies the server's announcement; it cannot sign one."""

    def __post_init__(self) -> None:
        spec = resolve_session(
            backend=BACKENDS.get(self.sandbox_mode, self.sandbox_mode),
            backends=tuple(BACKENDS.values()),
            network_mode=self.network_mode,
            network_allowlist=self.network_allowlist,
            network_denylist=self.network_denylist,
        )
        super().__init__(spec, _no_transport)
        self._handle: ServerHandle | None = None

    def _become_owner(self, handle: ServerHandle) -> None:
        """Make this the owner of a run that was just started."""
        self._handle = handle
        self.access = handle.keys.guest

    # Passing it on.

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __reduce__(self) -> tuple[Callable[..., SandboxSession], tuple[Any, ...]]:
        return _rebuild, (type(self), self._fields())

    def __repr__(self) -> str:
        role = "owner" if self.is_owner else "reference"
        return f"<SandboxSession {self.name} {role} at {self.endpoint or 'an unknown endpoint'}>"

    # Properties.

    @property
    def is_owner(self) -> bool:
        """Whether this object started the run, and ends it."""
        return self._handle is not None

    @property
    def work_dir(self) -> str:
        """The directory that persists between calls, as a path inside the sandbox."""
        self._update_info()
        if self._info is not None:
            return self._info.work_dir
        return WORK_DIR if self.host_work_dir is None else self.host_work_dir

    # Opening.

    async def open(self) -> Self:
        """Wait until the server can be addressed; raise as soon as it never will be."""
        if self._state == "closed":
            raise SessionClosedError(self._closed_reason)
        try:
            await self._locate()
        except SandboxError:
            if self.is_owner:
                # The run is useless, and the caller gets an exception instead of a session.
                await self.close()
            raise
        return self

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            # The caller has no session to close, so its run is ended here.
            await self.close()
            raise

    def __await__(self) -> Generator[Any, None, Self]:
        return self.open().__await__()

    async def _locate(self) -> None:
        if self._handle is not None:
            found = await self._handle.wait_ready()
            self.endpoint, self.ip = found.endpoint, found.ip
        elif not self.endpoint:
            from union.sandbox.cluster._find import find_by_name

            found = await find_by_name(
                self.name,
                key=self.verifier,
                project=self.project,
                domain=self.domain,
                expires=self.expires_at.timestamp(),
            )
            self.endpoint, self.ip = found.endpoint, found.ip

    def _live(self) -> Transport:
        """Return the transport; the first call creates it and connects."""
        if self._state == "closed":
            raise SessionClosedError(self._closed_reason)
        if datetime.now(UTC) >= self.expires_at:
            raise SessionClosedError("the session's timeout has passed")
        loop = asyncio.get_running_loop()
        if self._transport is None:
            require("aiohttp", extra="remote", what="a remote session")
            from union.sandbox.remote._attached import AttachedTransport

            self._loop = loop
            self._state = "open"
            self._transport = transport = AttachedTransport(
                self._spec,
                _AccessProvider(self),
                session=session_name(self.name),
                ends_session=self.is_owner,
            )
            if not self.is_owner:
                # A receiver need not call close(): its connection ends when it is collected.
                finalizer = weakref.finalize(self, _close_later, loop, transport)
                finalizer.atexit = False
        elif loop is not self._loop:
            raise SandboxUsageError(
                "the session belongs to another event loop",
                hint="pass a copy of it (copy.copy) to each event loop",
            )
        return self._transport

    async def _access(self) -> Access:
        from union.sandbox.remote._access import resolve_access

        await self._locate()
        handle = self._handle
        key = self.access if handle is None else handle.keys.owner
        within_s = _CONNECT_S if handle is not None or self._may_be_starting() else _REFERENCE_S
        access = resolve_access(
            self.endpoint, token=key, cert=None, connect_timeout_s=within_s, lazy=True
        )
        return dataclasses.replace(
            access, owner_socket=None if handle is None else handle.take_socket()
        )

    def _may_be_starting(self) -> bool:
        """Whether the server may not listen yet: a local one has its address before it does."""
        age_s = (datetime.now(UTC) - self.created_at).total_seconds()
        return self.endpoint.startswith("unix:") and age_s < _YOUNG_S

    # Closing.

    async def close(self) -> None:
        """Close the session; return when that is done.

        The owner's ``close()`` ends the run and everything in it. A reference's ``close()`` ends
        only the commands that it has started. It may be called again, and concurrently.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        # Cancelling a caller of close() must not leave half a session behind.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._state = "closed"
        self._update_info()
        try:
            if self._transport is not None:
                async with asyncio.timeout(_TRANSPORT_S):
                    await self._transport.aclose()
        except (SandboxError, TimeoutError, OSError) as exc:
            # The run is ended below in any case.
            _LOGGER.warning("the connection to %s was not closed in order: %s", self.name, exc)
        finally:
            if self._handle is not None:
                await self._handle.end()


# The class reports its public module, in which these annotations cannot be resolved.
SandboxSession.__annotations__ = get_type_hints(SandboxSession)
for _field in dataclasses.fields(SandboxSession):
    _field.type = SandboxSession.__annotations__[_field.name]


class _AccessProvider:
    """Returns the access of a session to its transport, without keeping the session alive."""

    def __init__(self, session: SandboxSession) -> None:
        self._session = weakref.ref(session)

    async def __call__(self) -> Access:
        session = self._session()
        if session is None:
            raise SessionClosedError("the session was garbage-collected")
        return await session._access()  # noqa: SLF001 - one object in two parts


def _no_transport() -> Transport:
    raise RuntimeError("a SandboxSession creates its transport itself")


def _close_later(loop: asyncio.AbstractEventLoop, transport: Transport) -> None:
    def begin() -> None:
        task = loop.create_task(transport.aclose())
        _CLOSING.add(task)
        task.add_done_callback(_CLOSING.discard)

    if not loop.is_closed():
        loop.call_soon_threadsafe(begin)


_CLOSING: Final[set[asyncio.Task[None]]] = set()
