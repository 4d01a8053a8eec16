"""The parts that all adapters share: options, sessions opened at first use, and their registry.

An adapter's session belongs to the event loop of ``union.sandbox.sync``. So it survives the loop of
its caller, and synchronous and asynchronous frameworks use it from any thread and any loop.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from union.sandbox import sync
from union.sandbox._core.optional_deps import install_hint
from union.sandbox.errors import (
    MissingExtraError,
    SandboxUsageError,
    SessionClosedError,
)
from union.sandbox.sync import _portal
from union.sandbox.sync._faces import Face

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from union.sandbox._contexts.context import Context
    from union.sandbox._session.session import Session

__all__ = [
    "WORK_DIR",
    "LazySession",
    "carry",
    "end",
    "make_session",
    "require_framework",
    "session_options",
]

_T = TypeVar("_T")
WORK_DIR: Final = "/workspace"
WITHOUT_NAMESPACES: Final = frozenset({"landlock", "none", "sandbox-exec"})
"""Backends that can neither rename the work dir nor keep a machine."""


def require_framework(module: str, *, extra: str) -> None:
    """Raise ``MissingExtraError`` with the install command unless ``module`` can be imported."""
    try:
        importlib.import_module(module)
    except ImportError as exc:
        if exc.name is None or module.partition(".")[0] != exc.name.partition(".")[0]:
            raise  # the framework is installed, and its own import failed
        raise MissingExtraError(
            f"this adapter needs the package {exc.name!r}, which is not installed",
            hint=install_hint(extra),
        ) from exc


# Sessions.


def session_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an adapter's session: those given, and the defaults of adapters.

    By default an adapter's session is one machine: ``/tmp``, the home directory and processes
    persist between commands, as agents expect. A private work dir is ``/workspace`` inside.
    """
    from union.sandbox._backends import registry

    given = {name: value for name, value in options.items() if value is not None}
    if given.get("backend", registry.DEFAULT) in WITHOUT_NAMESPACES and "endpoint" not in given:
        return given
    defaults: dict[str, Any] = {"persist": "machine"}
    if "endpoint" in given:
        defaults["lazy"] = False  # what a server refuses is reported when the sandbox is opened
    if "host_work_dir" not in given:
        defaults["work_dir_name"] = WORK_DIR
    return {**defaults, **given}


def make_session(options: Mapping[str, Any]) -> Session:
    """Return a session that is not open yet.

    Args:
        options: arguments of ``on_device.session()``; with ``endpoint``, of ``remote.session()``.

    """
    from union.sandbox import on_device, remote

    given = session_options(options)
    if "endpoint" in given:
        return remote.session(**given)
    return on_device.session(**given)


_open_sessions: Final[dict[str, Any]] = {}
"""The synchronous faces of the sessions that adapters opened, which keeps them open."""
_lock: Final = threading.Lock()


async def carry(begin: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Await ``begin()`` in the event loop of synchronous sessions; cancelling cancels it."""
    loop = _portal.Portal.current().loop
    if loop is asyncio.get_running_loop():
        return await begin()

    async def call() -> _T:
        return await begin()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))


def end(session_id: str) -> None:
    """Close a session of this process that an adapter opened. Closing twice is allowed."""
    with _lock:
        face = _open_sessions.pop(session_id, None)
    if face is not None:
        face.close()


class LazySession:
    """A session that is opened at its first use, once, whichever thread or loop uses it first.

    Args:
        session: a session to use, of the asynchronous or the synchronous API. It is opened if it
            is not open, and never closed here. None (default) opens one with ``options``.
        session_id: the id of a session that an adapter of this process has opened. None (default)
            for a new one.
        options: arguments of ``on_device.session()``, or of ``remote.session()`` if ``endpoint``
            is among them.

    """

    def __init__(
        self,
        session: object = None,
        *,
        session_id: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        given = {name: value for name, value in (options or {}).items() if value is not None}
        if session is not None and given:
            raise SandboxUsageError(
                f"session= was given together with {', '.join(sorted(given))}",
                argument="session",
                hint="pass the options where the session is created",
            )
        self._is_own = session is None
        self._session: Session | None = _asynchronous(session)
        self._id = session_id
        self._options = given
        self._opening: asyncio.Lock | None = None
        self._contexts: dict[tuple[str, str], Context] = {}
        self._is_closed = False

    @property
    def id(self) -> str | None:
        """The id of the session; None before its first use."""
        if self._id is None and self._session is not None:
            return self._session.id
        return self._id

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._is_closed

    # Opening.

    def face(self) -> sync.Session:
        """Return the open session, for use without ``await``."""
        return sync.wrap(self.call(_itself))

    def call(self, begin: Callable[[Session], Coroutine[Any, Any, _T]]) -> _T:
        """Open the session, await ``begin(session)`` and return the result, without ``await``."""

        async def perform() -> _T:
            return await begin(await self.opened())

        return cast("_T", _portal.Portal.current().call(perform, on_interrupt=None))

    async def opened(self) -> Session:
        """Return the open session, for use with ``await``."""
        if self._session is not None and not self._is_own:
            if self._session._lifecycle.state == "new":  # noqa: SLF001 - a part of it
                await carry(self._session.open)
            return self._session
        return await carry(self._ensure)

    async def _ensure(self) -> Session:
        """Open the session in the portal's loop, in which this runs."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._is_closed:
                raise SessionClosedError("the sandbox of this adapter was closed")
            if self._session is None:
                if self._id is not None:
                    self._session = self._attached(self._id)
                else:
                    self._session = await self._new()
            return self._session

    @staticmethod
    def _attached(session_id: str) -> Session:
        from union.sandbox import on_device

        with _lock:
            face = _open_sessions.get(session_id)
        if face is not None:  # also one on a server
            return cast("Session", face._target)  # noqa: SLF001 - its asynchronous form
        return on_device.attach(session_id)

    async def _new(self) -> Session:
        session = make_session(self._options)
        await session.open()
        face = cast("Any", sync.wrap(session))
        _portal.Portal.current().keep(session)
        self._id = session.id
        with _lock:
            _open_sessions[session.id] = face
        return session

    # Interpreters.

    async def context(self, language: str = "python", *, name: str = "main") -> Context:
        """Return an interpreter of this session by name; it starts at the first call.

        Call its methods through ``carry()``.
        """

        async def find() -> Context:
            session = await self._ensure() if self._is_own else cast("Session", self._session)
            found = self._contexts.get((language, name))
            if found is None:
                found = self._contexts[language, name] = session.context(
                    cast("Any", language), restart="auto"
                )
                await found.open()
            return found

        await self.opened()
        return await carry(find)

    async def end_contexts(self) -> None:
        """End all interpreters; the next ``context()`` starts a new one."""

        async def close() -> None:
            while self._contexts:
                _, found = self._contexts.popitem()
                await found.close()

        await carry(close)

    # Closing.

    def close(self) -> None:
        """Close the session if this adapter opened it. Closing twice is allowed."""
        self._is_closed = True
        if self._is_own and self._id is not None:
            end(self._id)

    async def aclose(self) -> None:
        """Close the session if this adapter opened it. Closing twice is allowed."""
        self._is_closed = True
        if self._is_own and self._id is not None:
            await asyncio.to_thread(end, self._id)


def _asynchronous(session: object) -> Session | None:
    if isinstance(session, Face):
        return cast("Session", session._target)  # noqa: SLF001 - its asynchronous form
    if session is None or hasattr(session, "exec"):
        return cast("Session | None", session)
    raise SandboxUsageError(
        f"session must be a session of union.sandbox, not {session!r:.80}", argument="session"
    )


async def _itself(session: Session) -> Session:
    return session
