"""A server that another process started for one session.

The first line of its stdin is the launch document (``_wire/launch.py``). Nothing follows it. The
end of stdin means that the supervisor is gone: the server then ends, and all its sandboxes with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._wire.launch import MAX_LAUNCH_BYTES, LaunchSpec
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Guest, Verifier
from union.sandbox.server._stored_secrets import stored_from_launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox.server._auth import Authority
    from union.sandbox.server._config import Config

__all__ = ["OwnerLease", "SupervisorWatch", "apply_launch_spec", "read_launch_spec"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_EXIT_TIMEOUT_S: Final = 5.0
"""Longest time for an orderly end after the supervisor is gone."""
_CHECK_INTERVAL_S: Final = 1.0


def read_launch_spec(fd: int) -> LaunchSpec:
    """Read the launch document, the first line of ``fd``.

    Raises:
        SandboxUsageError: There is no such line, it is too long or not a launch document.

    """
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(fd, 65536)
        if not piece or len(data) > MAX_LAUNCH_BYTES:
            raise SandboxUsageError(
                f"--supervised: stdin must begin with a launch document of one line, got "
                f"{len(data)} bytes without a line end (limit {MAX_LAUNCH_BYTES})",
                argument="--supervised",
                hint="start the server with sandbox.session(), which writes this document",
            )
        data += piece
    return LaunchSpec.decode(data)


def apply_launch_spec(config: Config, spec: LaunchSpec) -> Config:
    """Return the configuration that the command line and the launch document describe together."""
    owner = Verifier.from_digest(spec.owner_sha256, argument="owner_sha256")
    guest = Verifier.from_digest(spec.guest_sha256, argument="guest_sha256")
    return dataclasses.replace(
        config,
        verifier=owner,
        guest=Guest(verifier=guest, session=spec.session, until=spec.expires),
        launch=dataclasses.replace(spec, secrets=None),
        secrets=stored_from_launch(spec.secrets or {}),
        owner_socket=None if spec.owner_socket is None else _inherited_socket(spec.owner_socket),
        max_sessions=1,
    )


def _inherited_socket(fd: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
    except (OSError, OverflowError, ValueError) as exc:
        raise SandboxUsageError(
            f"--supervised: owner_socket must be an inherited socket, got file descriptor {fd}: "
            f"{exc}",
            argument="--supervised",
        ) from exc
    sock.set_inheritable(False)
    return sock


class SupervisorWatch:
    """Ends the server when the process that started it is gone."""

    def __init__(self, fd: int, end: Callable[[], None]) -> None:
        self._fd = fd
        self._end = end
        self._parent = os.getppid()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._readable)
        self._timer = self._loop.call_later(_CHECK_INTERVAL_S, self._check_parent)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 4096)
        except OSError:
            data = b""
        if not data:
            self._supervisor_gone("end of stdin")

    def _check_parent(self) -> None:
        # A process that the supervisor forked may keep the other end of stdin open.
        if os.getppid() != self._parent:
            self._supervisor_gone("the parent process has ended")
            return
        self._timer = self._loop.call_later(_CHECK_INTERVAL_S, self._check_parent)

    def _supervisor_gone(self, reason: str) -> None:
        self.close()
        _LOGGER.info("supervisor gone, shutting down", extra={"reason": reason})
        self._loop.call_later(_EXIT_TIMEOUT_S, os._exit, 1)
        self._end()

    def close(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._fd)


class OwnerLease:
    """Ends a server whose owner has sent no request for too long."""

    def __init__(
        self, lease: tuple[float, float], authority: Authority, end: Callable[[], None]
    ) -> None:
        self._lease_s, self._first_s = lease
        self._authority = authority
        self._end = end
        self._begun = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._lease_s, self._check)

    def _left_s(self) -> float:
        last_seen = self._authority.owner_last_seen
        if last_seen is None:
            return self._begun + self._first_s - time.monotonic()
        return last_seen + self._lease_s - time.monotonic()

    def _check(self) -> None:
        left_s = self._left_s()
        if left_s > 0:
            self._timer = self._loop.call_later(min(left_s, self._lease_s), self._check)
            return
        _LOGGER.warning("owner lease expired, shutting down", extra={"lease_s": self._lease_s})
        self._end()

    def close(self) -> None:
        self._timer.cancel()
