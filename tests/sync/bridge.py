"""The synchronous face behind ``await``, so that the contract's own tests run over it.

Each call of the face runs in a thread, as a program with threads would make it. Cancelling the task
that awaits the call interrupts that thread, as Ctrl-C interrupts the main thread.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from union.sandbox import sync
from union.sandbox.sync import _faces, _portal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

_THREADS = ThreadPoolExecutor(64, thread_name_prefix="sync-bridge")
_here = threading.local()


class Interrupt(BaseException):
    """Raised in a thread that waits for the portal, as a signal handler would."""


class _Thread:
    """One call in a thread of its own."""

    def __init__(self) -> None:
        self.is_interrupted = False
        self.is_ending = False

    def run(self, function: Callable[[], Any]) -> Any:
        _here.thread = self
        try:
            return function()
        except StopIteration:
            return _END
        finally:
            del _here.thread


_END = object()
_LOOK_S = 0.002
_wait = _portal._Call.wait


def _interruptible_wait(call: _portal._Call) -> None:
    thread: _Thread | None = getattr(_here, "thread", None)
    if thread is None or thread.is_ending:
        _wait(call)  # not ours, or the wait for the end of an interrupted call
        return
    while not call._is_done.acquire(timeout=_LOOK_S):
        if thread.is_interrupted:
            thread.is_ending = True
            raise Interrupt


_portal._Call.wait = _interruptible_wait  # type: ignore[method-assign]  # interruption without a signal


async def in_thread(function: Callable[[], Any]) -> Any:
    thread = _Thread()
    future = asyncio.get_running_loop().run_in_executor(_THREADS, thread.run, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        thread.is_interrupted = True
        await asyncio.wait([future])
        if future.exception() is None:
            return future.result()  # it had ended before the interrupt
        raise


class Bridge:
    """An object of the synchronous API that is used with ``await``."""

    def __init__(self, face: _faces.Face) -> None:
        self._face = face

    def __getattr__(self, name: str) -> Any:
        target = self._face._target
        if name.startswith("_"):
            return getattr(target, name)
        value = getattr(self._face, name)
        if not inspect.ismethod(value):
            return bridged(value)
        if inspect.iscoroutinefunction(getattr(type(target), name)):

            async def call(*args: Any, **kwargs: Any) -> Any:
                return bridged(await in_thread(lambda: value(*args, **kwargs)))

            return call
        return lambda *args, **kwargs: bridged(value(*args, **kwargs))

    @property  # type: ignore[misc]  # isinstance() asks for it
    def __class__(self) -> type:
        return type(self._face._target)

    def __repr__(self) -> str:
        return repr(self._face)

    async def __aenter__(self) -> Any:
        return bridged(await in_thread(self._face.__enter__))  # type: ignore[attr-defined]

    async def __aexit__(self, *exc: object) -> None:
        await in_thread(lambda: self._face.__exit__(*exc))  # type: ignore[attr-defined]

    def __await__(self) -> Generator[Any, None, Any]:
        return self.open().__await__()  # type: ignore[no-any-return]


_bridges: weakref.WeakValueDictionary[int, Bridge] = weakref.WeakValueDictionary()
"""By the id of the face, which a bridge keeps alive."""


def bridged(value: Any) -> Any:
    if isinstance(value, _faces.Face):
        bridge = _bridges.get(id(value))
        if bridge is None:
            bridge = _bridges[id(value)] = Bridge(value)
        return bridge
    if isinstance(value, _faces.BlockingIterator):
        return _iterate(value)
    return value


async def _iterate(source: Any) -> AsyncIterator[Any]:
    while (item := await in_thread(source.__next__)) is not _END:
        yield bridged(item)


API = SimpleNamespace(
    on_device=SimpleNamespace(session=lambda **given: bridged(sync.on_device.session(**given))),
    remote=SimpleNamespace(session=lambda **given: bridged(sync.remote.session(**given))),
)
"""The synchronous face as ``tests.conftest.Face.current``."""
