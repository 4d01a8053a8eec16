"""The portal: one event loop in a background thread, and blocking calls into it.

Rules of this file:

- A process has at most one portal. It starts at the first call, never at import.
- An exception that interrupts the waiting thread, such as Ctrl-C, cancels the call in the loop. The
  exception propagates when the call has ended.
- At interpreter exit the portal closes every session that is still open, then ends its thread.
- A forked child has no portal of its parent. Its own starts at the first call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import logging
import os
import sys
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol

from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Closable", "Portal", "generation", "running"]

_LOGGER: Final = logging.getLogger("union.sandbox.sync")
_EXIT_S: Final = 15.0
"""Seconds that interpreter exit waits for open sessions to close."""


class Closable(Protocol):
    """An object of the asynchronous API that is to be closed before the process ends."""

    async def close(self) -> None: ...


class _Call:
    """One call into the loop, with the thread that waits for it."""

    __slots__ = (
        "_begin",
        "_context",
        "_is_cancelled",
        "_is_done",
        "_is_started",
        "_task",
        "error",
        "has_ended",
        "value",
    )

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._context = contextvars.copy_context()
        self._is_started = False
        self._is_cancelled = False
        self._is_done = threading.Lock()
        self._is_done.acquire()
        self._task: asyncio.Task[None] | None = None
        self.has_ended = False
        self.value: Any = None
        self.error: BaseException | None = None

    def post(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the call in the loop, from another thread, without waiting for its next turn."""
        if sys.version_info >= (3, 12):
            loop.call_soon_threadsafe(self._start_eagerly, loop)
            return
        # Only the constructor runs in this thread. It appends to the queue of the loop, as
        # call_soon_threadsafe itself does.
        performing = self._perform()
        try:
            self._task = asyncio.Task(performing, loop=loop, context=self._context)
            loop.call_soon_threadsafe(_wake_up)
        except RuntimeError:  # the loop was closed
            performing.close()
            raise

    # In the loop.

    def _start_eagerly(self, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.Task(
            self._perform(),
            loop=loop,
            context=self._context,
            eager_start=True,  # type: ignore[call-arg, unused-ignore]  # from 3.12
        )
        self._task = task

    async def _perform(self) -> None:
        self._is_started = True
        try:
            if self._is_cancelled:
                raise asyncio.CancelledError
            value = self._begin()
            # Most values are neither; the first test is the cheap one.
            if inspect.iscoroutine(value) or isinstance(value, Coroutine):
                value = await value
            self.value = value
        except BaseException as exc:  # noqa: BLE001 - the waiting thread raises it
            self.error = exc
        finally:
            self.has_ended = True
            self._is_done.release()

    def cancel(self) -> None:
        self._is_cancelled = True
        # A task that is cancelled before its first step would never release the lock.
        if self._is_started and self._task is not None:
            self._task.cancel()

    # In the waiting thread.

    def wait(self) -> None:
        """Wait for the end of the call; a signal handler may raise meanwhile."""
        self._is_done.acquire()


def _wake_up() -> None:
    """Make the loop look at its queue."""


class Portal:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._kept: dict[int, Closable] = {}
        self._is_exiting = False
        self._thread = threading.Thread(target=self._serve, name="sandbox-sync", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    @staticmethod
    def current() -> Portal:
        """Return the portal of this process; start it if there is none."""
        portal = _State.portal
        if portal is not None:
            return portal
        with _State.lock:
            if _State.portal is None:
                if _State.has_exited:
                    raise _exiting()
                _State.portal = Portal()
            return _State.portal

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    # Calls.

    def call(self, begin: Callable[[], Any], *, on_interrupt: Callable[[], None] | None) -> Any:
        """Run ``begin`` in the loop, await a coroutine that it returns, and return the result.

        Args:
            begin: called in the loop, in a copy of the caller's context.
            on_interrupt: called in the loop if this thread is interrupted while it waits.

        """
        if threading.get_ident() == self._thread.ident:
            raise SandboxUsageError(
                "a synchronous call was made from the event loop that would have to serve it",
                code="sync-in-callback",
                hint="let the callback store its data, and make the call in your own thread",
            )
        call = _Call(begin)
        try:
            call.post(self.loop)
        except RuntimeError:  # the loop was closed
            raise _exiting() from None
        try:
            call.wait()
        except BaseException:
            self._interrupt(call, on_interrupt)
            raise
        if call.error is not None:
            try:
                raise call.error
            finally:
                # The traceback refers to this frame, and the frame would refer to the error.
                del call
        return call.value

    def _interrupt(self, call: _Call, on_interrupt: Callable[[], None] | None) -> None:
        """End a call whose caller stopped waiting; another interrupt ends only this wait."""
        self.loop.call_soon_threadsafe(call.cancel)
        if on_interrupt is not None:
            self.loop.call_soon_threadsafe(on_interrupt)
        if not call.has_ended:  # the interrupt may have come right after the end of the wait
            call.wait()
        # The call may have ended before it was cancelled; its caller never gets the result.
        lost = call.value
        if hasattr(lost, "kill"):
            self.loop.call_soon_threadsafe(lost.kill)
        elif hasattr(type(lost), "__aexit__") and hasattr(lost, "close"):
            closing = _Call(lambda: self._close(lost))
            closing.post(self.loop)
            closing.wait()

    # Objects to close.

    def keep(self, target: Closable) -> None:
        """Close ``target`` at interpreter exit, unless ``release`` is called before."""
        self._kept[id(target)] = target
        # Exit functions run in reverse order. This one must precede that of the launcher, which
        # the call before this one may have started.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)

    def forget(self, target: Closable) -> None:
        """Do not close ``target`` at interpreter exit: it was closed."""
        self._kept.pop(id(target), None)

    def release(self, target: Closable) -> None:
        """Close ``target`` soon: no caller has a reference to it. Never blocks."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, after all that was kept
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._close(target)))

    async def _close(self, target: Closable) -> None:
        try:
            await target.close()
        except Exception:  # no caller is left; the others must be closed as well
            _LOGGER.exception("%r could not be closed", target)
        self.forget(target)

    # The end.

    def finish(self) -> None:
        """Close all objects that were kept, newest first, and end the thread."""
        if self._is_exiting:
            return
        self._is_exiting = True
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._finish()))
        self._thread.join(_EXIT_S)

    async def _finish(self) -> None:
        try:
            for target in reversed(tuple(self._kept.values())):
                await self._close(target)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self.loop.shutdown_asyncgens()
        finally:
            self.loop.stop()


class _State:
    """The portal of this process."""

    portal: Portal | None = None
    lock = threading.Lock()
    generation = 0
    """The number of forks between the first process and this one."""
    has_exited = False
    inherited: Final[list[Portal]] = []
    """Those of parent processes. Their loops are never closed here: that would remove descriptors
    from the parent's epoll instance."""


def generation() -> int:
    """Return a number that differs in every forked child."""
    return _State.generation


def running() -> Portal | None:
    """Return the portal of this process, if it was started."""
    return _State.portal


def _exiting() -> SandboxUsageError:
    return SandboxUsageError(
        "the interpreter is exiting, and the event loop of synchronous sessions has ended",
        code="interpreter-exit",
        hint="finish synchronous work before the main thread ends; join the threads that do it",
    )


def _at_exit() -> None:
    _State.has_exited = True
    portal, _State.portal = _State.portal, None
    if portal is not None:
        portal.finish()


def _after_fork() -> None:
    # The child has no thread of the parent, and the lock may have been held at the fork.
    _State.generation += 1
    if _State.portal is not None:
        _State.inherited.append(_State.portal)
    _State.portal = None
    _State.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
