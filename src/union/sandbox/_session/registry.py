"""The sessions of this process by their ids, so that other event loops can attach to them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

from union.sandbox.errors import SandboxUsageError, SessionClosedError

if TYPE_CHECKING:
    from union.sandbox._session.session import Session

__all__ = ["add", "find"]

_sessions: Final[weakref.WeakValueDictionary[str, Session]] = weakref.WeakValueDictionary()


def add(session: Session) -> None:
    """Make a session available to ``find``, as long as it lives."""
    _sessions[session.id] = session


def find(session_id: object) -> Session:
    """Return the open session with an id.

    Raises:
        SandboxUsageError: the id is not a string.
        SessionClosedError: no session of this process with that id is open.

    """
    if not isinstance(session_id, str):
        raise SandboxUsageError(
            f"session_id must be the id of a session, not {session_id!r}", argument="session_id"
        )
    session = _sessions.get(session_id)
    if session is None or session._lifecycle.state != "open":  # noqa: SLF001 - a part of it
        raise SessionClosedError(
            f"no session with the id {session_id:.80} is open in this process",
            code="no-such-session",
            hint="a session is closed when its `async with` block ends, or when it is collected; "
            "for a session on a server, use remote.attach()",
        )
    return session
