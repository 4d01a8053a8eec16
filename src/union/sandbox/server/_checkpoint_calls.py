"""Calls of a session that change its checkpoints: each is performed once for each key.

A module of its own, because a session without HTTP requests does not import the HTTP library.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.errors import SandboxError
from union.sandbox.server._quotas import busy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from union.sandbox.server._auth import Grant
    from union.sandbox.server._server_session import ServerSession

__all__ = ["Operations"]

_MAX_OUTCOMES: Final = 256
_MAX_RUNNING: Final = 32
_MAX_COMPARING: Final = 2
_END_WITHIN_S: Final = 30.0


class Operations:
    """The calls of one session that change something: each is performed once for each key."""

    def __init__(self, session: ServerSession) -> None:
        self._session = session
        self._comparing = 0
        self._running: dict[tuple[str, str, str], asyncio.Task[dict[str, Any]]] = {}
        self._outcomes: OrderedDict[tuple[str, str, str], dict[str, Any] | SandboxError] = (
            OrderedDict()
        )

    async def perform(
        self,
        grant: Grant,
        action: str,
        key: str,
        call: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
    ) -> dict[str, Any]:
        """Return the outcome of the call with this key; the first request performs it.

        It goes on if the client disconnects.
        """
        name = (grant.key, action, key)
        found = self._outcomes.get(name)
        if isinstance(found, SandboxError):
            raise found
        if found is not None:
            return found
        task = self._running.get(name)
        if task is None:
            if len(self._running) >= _MAX_RUNNING:
                raise busy(f"limit of checkpoint calls of the session reached ({_MAX_RUNNING})")
            task = asyncio.get_running_loop().create_task(self._perform(name, call))
            self._running[name] = task
        return await asyncio.shield(task)

    async def _perform(
        self, name: tuple[str, str, str], call: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        outcome: dict[str, Any] | SandboxError
        self._session.hold()
        try:
            outcome = await call()
        except SandboxError as exc:
            outcome = exc
        finally:
            self._session.release()
            del self._running[name]
        self._outcomes[name] = outcome
        if len(self._outcomes) > _MAX_OUTCOMES:
            self._outcomes.popitem(last=False)
        if isinstance(outcome, SandboxError):
            raise outcome
        return outcome

    @contextlib.contextmanager
    def comparing(self) -> Iterator[None]:
        """Limit the differences that are held in memory at the same time."""
        if self._comparing >= _MAX_COMPARING:
            raise busy(f"limit of differences of the session reached ({_MAX_COMPARING})")
        self._comparing += 1
        try:
            yield
        finally:
            self._comparing -= 1

    async def end(self) -> None:
        """Wait for the calls that run; cancel those that take too long."""
        running = tuple(self._running.values())
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=_END_WITHIN_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
