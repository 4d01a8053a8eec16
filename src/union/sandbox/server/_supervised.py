"""A server that somebody else started for one session: told what to do, and held, through stdin.

The first line of stdin describes the session and how its two kinds of callers are recognised. It
is not in the arguments, which every process of the machine can read, nor in the environment, which
children inherit. After that line nothing comes: when stdin ends, whoever held it is gone, and so is
this server, with everything below it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Guest, Verifier

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox.server._auth import Authority
    from union.sandbox.server._config import Config

__all__ = [
    "FixedSession",
    "Lifeline",
    "OwnerLease",
    "read_orders",
    "with_orders",
]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_MOST: Final = 4 * 1024 * 1024
_GRACE_S: Final = 5.0
"""How long the end may take, once nobody waits for it."""
_LOOK_S: Final = 1.0
_KNOWN: Final = frozenset(
    {"session", "told", "owner_sha256", "guest_sha256", "expires", "shown_at", "home", "line"}
    | {"owner_lease"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSession:
    """The one session of a supervised server: there before the first client, ended with it."""

    name: str
    told: dict[str, Any]
    expires: float
    """Unix time: from then on it is over."""
    shown_at: str | None = None
    """Where the sandbox sees its work dir, if not where it is."""
    home: str | None = None
    """A directory that was made for this server, and that goes with it."""
    owner_lease: tuple[float, float] | None = None
    """For how many seconds the owner may be silent; for how many until it is heard at all."""


def read_orders(fd: int) -> dict[str, Any]:
    """The first line of ``fd``, and nothing behind it."""
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(fd, 65536)
        if not piece or len(data) > _MOST:
            raise SandboxUsageError("--supervised: stdin holds no orders", argument="--supervised")
        data += piece
    try:
        told = json.loads(data)
    except ValueError as exc:
        raise SandboxUsageError(
            "--supervised: the orders are not JSON", argument="--supervised"
        ) from exc
    if not isinstance(told, dict) or told.keys() - _KNOWN:
        raise SandboxUsageError(
            "--supervised: these orders are of another version",
            argument="--supervised",
            hint="use the same version of unionai-sandbox on both sides",
        )
    return told


def with_orders(config: Config, told: dict[str, Any]) -> Config:
    """The server that the arguments and the orders describe together."""
    try:
        fixed = FixedSession(
            name=told["session"],
            told=told["told"],
            expires=float(told["expires"]),
            shown_at=told.get("shown_at"),
            home=told.get("home"),
            owner_lease=_pair(told.get("owner_lease")),
        )
        owner, guest = told["owner_sha256"], told["guest_sha256"]
        line = None if told.get("line") is None else _line(told["line"])
    except (KeyError, TypeError, ValueError, OSError) as exc:
        raise SandboxUsageError(
            f"--supervised: the orders are incomplete: {exc}", argument="--supervised"
        ) from exc
    return dataclasses.replace(
        config,
        verifier=Verifier.from_digest(owner, argument="owner_sha256"),
        guest=Guest(
            verifier=Verifier.from_digest(guest, argument="guest_sha256"),
            session=fixed.name,
            until=fixed.expires,
        ),
        fixed=fixed,
        line=line,
        max_sessions=1,
    )


def _pair(told: object) -> tuple[float, float] | None:
    if told is None:
        return None
    lease_s, first_s = map(float, told)  # type: ignore[call-overload]  # or it is no order
    return lease_s, first_s


def _line(fd: int) -> socket.socket:
    """The socket that was handed down; nobody else gets it."""
    line = socket.socket(fileno=fd)
    line.set_inheritable(False)
    return line


class Lifeline:
    """Watches whoever started this server, and ends it when they are gone."""

    def __init__(self, fd: int, end: Callable[[], None]) -> None:
        self._fd = fd
        self._end = end
        self._parent = os.getppid()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._readable)
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 4096)
        except OSError:
            data = b""
        if not data:
            self._cut("stdin has ended")

    def _look(self) -> None:
        # A process that the owner forked may hold the other end of stdin open for long.
        if os.getppid() != self._parent:
            self._cut("the parent is gone")
            return
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _cut(self, why: str) -> None:
        self.close()
        _LOGGER.info("nobody holds this server any more", extra={"why": why})
        self._loop.call_later(_GRACE_S, os._exit, 1)
        self._end()

    def close(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._fd)


class OwnerLease:
    """Ends a server whose owner was not heard of for too long."""

    def __init__(
        self, lease: tuple[float, float], authority: Authority, end: Callable[[], None]
    ) -> None:
        self._lease_s, self._first_s = lease
        self._authority = authority
        self._end = end
        self._begun = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._lease_s, self._look)

    def _left_s(self) -> float:
        heard = self._authority.owner_heard
        if heard is None:
            return self._begun + self._first_s - time.monotonic()
        return heard + self._lease_s - time.monotonic()

    def _look(self) -> None:
        left_s = self._left_s()
        if left_s > 0:
            self._timer = self._loop.call_later(min(left_s, self._lease_s), self._look)
            return
        _LOGGER.warning("the owner was not heard of for too long", extra={"lease_s": self._lease_s})
        self._end()

    def close(self) -> None:
        self._timer.cancel()
