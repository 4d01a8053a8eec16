"""Errors for a session that is used outside its event loop. Loaded when one is raised."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import asyncio

__all__ = ["no_loop", "other_loop"]


def no_loop() -> SandboxUsageError:
    """Return the error for a call without a running asyncio loop."""
    library = _other_library()
    if library:
        return SandboxUsageError(
            f"sessions need asyncio; this code runs in {library}",
            code="no-event-loop",
            hint="run the session in asyncio.run(), in a thread of its own if necessary",
        )
    return SandboxUsageError(
        "no asyncio event loop runs in this thread",
        code="no-event-loop",
        hint="call it from a coroutine that asyncio.run() runs",
    )


def _other_library() -> str:
    """The asynchronous library that runs here instead, if it registers itself as most do."""
    sniffio = sys.modules.get("sniffio")
    if sniffio is None:
        return ""
    try:
        return str(sniffio.current_async_library())
    except sniffio.AsyncLibraryNotFoundError:
        return ""


def other_loop(own: asyncio.AbstractEventLoop | None) -> SandboxUsageError:
    """Return the error for a call from another event loop than the session's ``own``."""
    here = threading.current_thread().name
    state = "which is closed" if own is not None and own.is_closed() else "which does not run now"
    return SandboxUsageError(
        f"the session belongs to another event loop, {state}; this call comes from thread {here!r}",
        code="wrong-event-loop",
        hint="keep that loop running, in another thread, as long as the session is used; or open "
        "a session in this loop",
    )
