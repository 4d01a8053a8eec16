"""The host id that a session's code runs as, where the caller is root."""

from __future__ import annotations

from union.sandbox._linux.ids import IDS

__all__ = ["SessionId"]


class SessionId:
    """One id, reserved at its first use and returned when the session's processes are gone."""

    def __init__(self) -> None:
        self._number: int | None = None

    @property
    def number(self) -> int:
        if self._number is None:
            self._number = IDS.take()
        return self._number

    def release(self) -> None:
        if self._number is not None:
            IDS.release(self._number)
            self._number = None
