"""The lifecycle of a session in a run of its own: found, connected by its first call, closed."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import weakref
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from union.sandbox._core.optional_deps import require
from union.sandbox._session.event_loops import other_loop
from union.sandbox._session.lifecycle import SessionInfo, running_loop
from union.sandbox.cluster._keys import session_name
from union.sandbox.cluster._server_command import WORK_DIR
from union.sandbox.errors import SandboxError, SandboxUsageError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._session.process import SandboxProcess
    from union.sandbox._session.transport import Transport
    from union.sandbox.cluster._session import SandboxSession
    from union.sandbox.remote._access import Access

__all__ = ["ClusterLifecycle"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_TRANSPORT_S: Final = 5.0
_CONNECT_S: Final = 30.0
_REFERENCE_S: Final = 5.0
"""How long a reference waits for its server, which was ready before it was passed on."""
_YOUNG_S: Final = 60.0
_CLOSING: Final[set[asyncio.Task[None]]] = set()


class ClusterLifecycle:
    """Any call may be the first: it finds the server and connects. ``open()`` only waits for it.

    The facts about the run are fields of the session, which this object does not keep alive: a
    reference is disconnected when it is garbage-collected.
    """

    def __init__(self, session: SandboxSession, spec: SessionSpec) -> None:
        self.processes: set[SandboxProcess] = set()
        self.state = "new"
        self.transport: Transport | None = None
        self._session = weakref.ref(session)
        self._spec = spec
        self.loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None

    def _facts(self) -> SandboxSession:
        session = self._session()
        if session is None:
            raise SessionClosedError("the session was garbage-collected")
        return session

    # Opening.

    async def open(self) -> None:
        """Wait until the server can be addressed; raise as soon as it never will be."""
        if self.state == "closed":
            raise SessionClosedError("the session is closed")
        try:
            await self._locate()
        except SandboxError:
            if self._facts().is_owner:
                # The run is useless, and the caller gets an exception instead of a session.
                await self.close()
            raise

    async def ensure_open(self) -> None:
        await self.open()

    async def enter(self) -> None:
        try:
            await self.open()
        except BaseException:
            # The caller has no session to close, so its run is ended here, also when cancelled.
            await self.close()
            raise

    async def _locate(self) -> None:
        facts = self._facts()
        handle = facts._handle  # noqa: SLF001 - the session and its lifecycle are one unit
        if handle is not None:
            found = await handle.wait_ready()
        elif not facts.endpoint:
            from union.sandbox.cluster._find import find_by_name

            found = await find_by_name(
                facts.name,
                key=facts.verifier,
                expires=facts.expires_at.timestamp(),
            )
        else:
            return
        facts.endpoint, facts.ip = found.endpoint, found.ip

    def live_here(self) -> Transport | None:
        """Return None: each call looks at the expiry."""
        return None

    def live(self) -> Transport:
        """Return the transport; the first call creates it, and using it connects."""
        if self.state == "closed":
            raise SessionClosedError("the session is closed")
        facts = self._facts()
        if datetime.now(UTC) >= facts.expires_at:
            raise SessionClosedError("the session's timeout has passed")
        loop = running_loop()
        if self.transport is None:
            require("aiohttp", extra="remote", what="a remote session")
            from union.sandbox.remote._attached import AttachedTransport

            self.loop = loop
            self.state = "open"
            self.transport = AttachedTransport(
                self._spec,
                self._access,
                session=session_name(facts.name),
                ends_session=facts.is_owner,
                wait_for_end=_end_watch(facts),
            )
            if not facts.is_owner:
                # A receiver need not call close(): its connection ends when it is collected.
                finalizer = weakref.finalize(facts, _close_later, loop, self.transport)
                finalizer.atexit = False
        elif loop is not self.loop:
            raise other_loop(self.loop)
        return self.transport

    async def _access(self) -> Access:
        from union.sandbox.remote._access import resolve_access

        await self._locate()
        facts = self._facts()
        handle = facts._handle  # noqa: SLF001 - the session and its lifecycle are one unit
        key = facts.access if handle is None else handle.keys.owner
        within_s = _CONNECT_S if handle is not None or _may_be_starting(facts) else _REFERENCE_S
        access = resolve_access(
            facts.endpoint, token=key, cert=None, connect_timeout_s=within_s, lazy=True
        )
        return dataclasses.replace(
            access, owner_socket=None if handle is None else handle.take_socket()
        )

    # Closing.

    async def close(self) -> None:
        """End the run if this is its owner, else only the commands that were started here."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(self._facts()))
        # Cancelling a caller of close() must not leave half a session behind.
        await asyncio.shield(self._closing)

    async def _close(self, facts: SandboxSession) -> None:
        self.state = "closed"
        handle = facts._handle  # noqa: SLF001 - the session and its lifecycle are one unit
        try:
            if self.transport is not None:
                async with asyncio.timeout(_TRANSPORT_S):
                    await self.transport.aclose()
        except (SandboxError, TimeoutError, OSError) as exc:
            # The run is ended below in any case.
            _LOGGER.warning("the connection to %s was not closed in order: %s", facts.name, exc)
        finally:
            if handle is not None:
                await handle.end()

    # Information.

    @property
    def info(self) -> SessionInfo | None:
        transport = self.transport
        if transport is None or not transport.is_known:
            return None
        return SessionInfo(transport.work_dir, transport.isolation, transport.shell)

    @property
    def work_dir(self) -> str:
        info = self.info
        if info is not None:
            return info.work_dir
        chosen = self._facts().host_work_dir
        return WORK_DIR if chosen is None else chosen

    @property
    def isolation(self) -> Isolation:
        return self._required_info().isolation

    @property
    def shell(self) -> str:
        return self._required_info().shell

    def _required_info(self) -> SessionInfo:
        info = self.info
        if info is not None:
            return info
        if self.transport is None:
            raise SessionClosedError("the session was not opened", hint="make a call first")
        raise SandboxUsageError(
            "the session has not connected to its server yet",
            code="not-connected",
            hint="make a call first",
        )


def _end_watch(facts: SandboxSession) -> Callable[[], Awaitable[SandboxError]] | None:
    """Return a function that waits for the end of the run, without keeping the session alive.

    The end of a server on this machine shows at its socket.
    """
    if facts.endpoint.startswith("unix:"):
        return None
    from union.sandbox.cluster._find import wait_for_end_by_name

    return functools.partial(wait_for_end_by_name, facts.name)


def _may_be_starting(facts: SandboxSession) -> bool:
    """Whether the server may not listen yet: a local one has its address before it does."""
    age_s = (datetime.now(UTC) - facts.created_at).total_seconds()
    return facts.endpoint.startswith("unix:") and age_s < _YOUNG_S


def _close_later(loop: asyncio.AbstractEventLoop, transport: Transport) -> None:
    def begin() -> None:
        task = loop.create_task(transport.aclose())
        _CLOSING.add(task)
        task.add_done_callback(_CLOSING.discard)

    if not loop.is_closed():
        loop.call_soon_threadsafe(begin)
