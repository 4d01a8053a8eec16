"""The lifecycle of a session: when it is opened, used and closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, Protocol

from union.sandbox.errors import SandboxUsageError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._session.process import SandboxProcess
    from union.sandbox._session.transport import Transport

__all__ = ["Lifecycle", "SessionInfo", "SingleUseLifecycle", "running_loop"]


class SessionInfo(NamedTuple):
    """The facts that a transport has once it is open."""

    work_dir: str
    isolation: Isolation
    shell: str


class Lifecycle(Protocol):
    """Decides when a session is open. ``Session`` holds one and passes its calls on to it."""

    processes: set[SandboxProcess]
    """The commands of the session that have not ended."""

    @property
    def state(self) -> str:
        """``new``, ``opening``, ``open`` or ``closed``."""
        ...

    @property
    def transport(self) -> Transport | None:
        """The transport, once there is one; also after the end."""
        ...

    @property
    def info(self) -> SessionInfo | None:
        """The facts of the transport, if it has had them; also after the end."""
        ...

    @property
    def work_dir(self) -> str:
        """The work dir, which may be available before ``info`` is."""
        ...

    @property
    def isolation(self) -> Isolation: ...

    @property
    def shell(self) -> str: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the session belongs to; None before its first use."""
        ...

    async def open(self) -> None:
        """Open the session on request."""

    async def ensure_open(self) -> None:
        """Open the session if it is not open: ``await session``."""

    async def enter(self) -> None:
        """Begin a block of ``async with``."""

    async def close(self) -> None:
        """End every command of the session; return when that is done."""

    def live(self) -> Transport:
        """Return the transport for one call; raise if the session cannot be used now."""
        ...

    def live_here(self) -> Transport | None:
        """Return the transport if nothing is to be done before a call in this event loop.

        Else None, and ``live()`` decides. For calls that are made often.
        """
        ...


class SingleUseLifecycle:
    """A session that its user opens once, in one event loop, and closes for good."""

    def __init__(self, spec: SessionSpec, make_transport: Callable[[], Transport]) -> None:
        self.processes: set[SandboxProcess] = set()
        self.state = "new"
        self.transport: Transport | None = None
        self.closing: asyncio.Task[None] | None = None
        self._timeout_s = spec.timeout_s
        self._make_transport = make_transport
        self._info: SessionInfo | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._closed_reason = "the session is closed"
        self._close_started = False
        self._is_entered = False
        self._deadline: asyncio.TimerHandle | None = None

    # Opening.

    async def open(self) -> None:
        if self.state != "new":
            state = "open already" if self.state in {"open", "opening"} else "closed"
            raise SessionClosedError(
                f"the session is {state}", hint="create a new one with session(...)"
            )
        self.loop = running_loop()
        self.state = "opening"
        transport: Transport | None = None
        try:
            transport = self._make_transport()
            await transport.open()
            self.transport = transport
            self._update_info()
        except BaseException:
            # Whatever the reason, also a cancellation: nothing half open may remain.
            self.state = "closed"
            self._closed_reason = "the session could not be opened"
            self.transport = None
            if transport is not None:
                await transport.aclose()
            raise
        self.state = "open"
        if self._timeout_s is not None:
            self._deadline = self.loop.call_later(self._timeout_s, self._expire)

    async def ensure_open(self) -> None:
        if self.state != "open":
            await self.open()
        else:
            self.live()  # raises if the session belongs to another event loop

    async def enter(self) -> None:
        if self._is_entered:
            raise SessionClosedError(
                "the session is open already, in another `async with` block",
                hint="create a new one with session(...)",
            )
        await self.ensure_open()
        self._is_entered = True

    def live(self) -> Transport:
        if self.state != "open" or self.transport is None:
            raise self._not_open()
        if running_loop() is not self.loop:
            raise self._other_loop()
        return self.transport

    def live_here(self) -> Transport | None:
        try:
            is_own = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return None
        return self.transport if is_own and self.state == "open" else None

    def _not_open(self) -> SessionClosedError:
        if self.state in {"new", "opening"}:
            return SessionClosedError(
                "the session is not open", hint="use `async with session` or `await session.open()`"
            )
        return SessionClosedError(self._closed_reason)

    def _other_loop(self) -> SandboxUsageError:
        from union.sandbox._session.event_loops import other_loop

        return other_loop(self.loop)

    # Closing.

    def _expire(self) -> None:
        self._closed_reason = f"the session's timeout_s={self._timeout_s:g} has passed"
        self.state = "closed"
        for process in tuple(self.processes):
            process._expire()  # noqa: SLF001 - the session owns its processes
        self.closing = asyncio.get_running_loop().create_task(self._close())

    async def close(self) -> None:
        if self.state == "new":
            self.state = "closed"
            return
        if running_loop() is not self.loop:
            raise self._other_loop()
        if self.closing is None:
            self.closing = asyncio.get_running_loop().create_task(self._close())
        # Cancelling a caller of close() must not leave a session half closed.
        try:
            await asyncio.shield(self.closing)
        except asyncio.CancelledError:
            if not self._close_started and self.closing.cancelling():
                # The event loop is ending and cancelled that task before its first step, so the
                # task never runs.
                await self._close()
            raise

    async def _close(self) -> None:
        self._close_started = True
        self.state = "closed"
        if self._deadline is not None:
            self._deadline.cancel()
        if self.transport is not None:
            self._update_info()
            await self.transport.aclose()

    # Information.

    @property
    def info(self) -> SessionInfo | None:
        self._update_info()
        return self._info

    @property
    def work_dir(self) -> str:
        return self._required_info().work_dir

    @property
    def isolation(self) -> Isolation:
        return self._required_info().isolation

    @property
    def shell(self) -> str:
        return self._required_info().shell

    def _required_info(self) -> SessionInfo:
        if self.transport is None:
            raise SessionClosedError(
                "the session was not opened", hint="use `async with` or `await session.open()`"
            )
        info = self.info
        if info is None:
            raise SandboxUsageError(
                "the session has not connected to its server yet",
                code="not-connected",
                hint="make a call first, or open with lazy=False",
            )
        return info

    def _update_info(self) -> None:
        """Store the work dir and the isolation as soon as the transport has them."""
        transport = self.transport
        if self._info is None and transport is not None and transport.is_known:
            self._info = SessionInfo(transport.work_dir, transport.isolation, transport.shell)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop; raise an error that names what runs instead."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        from union.sandbox._session.event_loops import no_loop

        raise no_loop() from None
