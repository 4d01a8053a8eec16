"""Which backends work on this machine: found out by opening a session, not by guessing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from union.sandbox._backends import registry
from union.sandbox._core.spec import SessionSpec
from union.sandbox.errors import BackendUnavailableError
from union.sandbox.on_device._transport import LocalTransport

__all__ = ["BackendStatus", "available_backends"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """Whether a backend works here; if not, why, and what to do."""

    name: str
    available: bool
    reason: str = ""
    hint: str = ""


def available_backends() -> tuple[BackendStatus, ...]:
    """Tries every backend. Takes some milliseconds each; may be called with or without a loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="sandbox-availability") as thread:
        return tuple(thread.submit(asyncio.run, _try(name)).result() for name in registry.NAMES)


async def _try(name: str) -> BackendStatus:
    if name == "none":
        return BackendStatus(name=name, available=True, reason="isolates nothing")
    try:
        transport = LocalTransport(SessionSpec(backend=name, warm=0))
    except BackendUnavailableError as exc:
        return BackendStatus(name=name, available=False, reason=str(exc.args[0]), hint=exc.hint)
    try:
        await transport.open()
    except BackendUnavailableError as exc:
        return BackendStatus(name=name, available=False, reason=str(exc.args[0]), hint=exc.hint)
    finally:
        await transport.aclose()
    return BackendStatus(name=name, available=True)
