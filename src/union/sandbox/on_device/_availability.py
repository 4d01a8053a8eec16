"""Find the backends that work on this machine by opening a session of each."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from union.sandbox._backends import registry
from union.sandbox._core.spec import SessionSpec
from union.sandbox.errors import SandboxError
from union.sandbox.on_device._transport import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["BackendStatus", "available_backends", "in_own_loop", "try_backend"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """Whether a backend works here; if not, the reason and the remedy."""

    name: str
    """The name for ``backend=``."""
    available: bool
    """Whether a session of it can be opened here."""
    reason: str = ""
    """Why it is not available; empty if it is."""
    hint: str = ""
    """The remedy; empty if there is nothing to do."""


def in_own_loop(work: Coroutine[object, object, _T]) -> _T:
    """Run a coroutine in another thread, so that the caller may have an event loop or not."""
    with ThreadPoolExecutor(1, thread_name_prefix="sandbox-own-loop") as thread:
        return thread.submit(asyncio.run, work).result()


def available_backends() -> tuple[BackendStatus, ...]:
    """Try every backend. Takes some milliseconds each; works with or without an event loop."""
    return in_own_loop(_try_all())


async def _try_all() -> tuple[BackendStatus, ...]:
    return tuple([await try_backend(name) for name in registry.NAMES])


async def try_backend(name: str) -> BackendStatus:
    """Open a session of one backend and close it again."""
    try:
        transport = LocalTransport(SessionSpec(backend=name, warm=0))
        try:
            await transport.open()
        finally:
            await transport.aclose()
    except SandboxError as exc:
        return BackendStatus(name=name, available=False, reason=str(exc.args[0]), hint=exc.hint)
    return BackendStatus(
        name=name, available=True, reason="isolates nothing" if name == "none" else ""
    )
