"""One accepted connection of a run, with the operations that a frontend may use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final

from union.sandbox._net.dialer import DialError, RefusedError
from union.sandbox._policy.addresses import parse_address
from union.sandbox._policy.rules import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._net.dialer import OutboundConnection
    from union.sandbox._net.egress import Egress
    from union.sandbox._net.http_exchange import HttpExchange
    from union.sandbox._net.ledger import Attempt
    from union.sandbox._net.stream import Stream
    from union.sandbox._policy.http_entries import Http
    from union.sandbox._policy.http_request import HttpRequest

__all__ = ["Connection"]

_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 256 * 1024


class Connection:
    """One accepted connection, with the operations that a frontend may use."""

    def __init__(self, egress: Egress, stream: Stream) -> None:
        self._egress = egress
        self._server: Stream | None = None
        self._attempts: list[Attempt] = []
        self.pending_request: Callable[[], None] | None = None
        """Records the HTTP request in progress."""
        self.stream = stream
        self.policy = egress.policy
        self.upstream = egress.dialer.upstream

    def begin_attempt(self, attempt: Attempt) -> Attempt:
        """Begin an attempt, which ends the previous attempt on this connection."""
        if not self._attempts or self._attempts[-1] is not attempt:
            self.end_attempts()
            self._attempts.append(attempt)
        return attempt

    def request_received(self) -> None:
        """Mark the connection as used: the client has sent a request."""
        self._egress.request_received(self)

    async def dial(self, attempt: Attempt) -> OutboundConnection:
        """Check the policy, connect, and store both outcomes in ``attempt``.

        Raises:
            RefusedError: the policy refuses the destination.
            DialError: connecting failed.

        """
        attempt.verdict_by_name = self.policy.decide_name(attempt.host, attempt.port)
        try:
            outbound = await self._egress.dialer.dial(attempt.host, attempt.port)
        except RefusedError as exc:
            attempt.verdict = exc.verdict
            self.end_attempts()
            raise
        except DialError as exc:
            attempt.verdict = exc.verdict
            attempt.error = str(exc)
            self.end_attempts()
            raise
        attempt.verdict = outbound.verdict
        attempt.address = outbound.address
        self.set_server(outbound.stream)
        return outbound

    def intercept(self, attempt: Attempt, http: Http) -> HttpExchange:
        """Return the exchange that serves a connection to the host of an ``Http`` entry.

        Raises:
            RefusedError: a deny-list entry refuses the host.

        """
        # Plain HTTP to port 80 is upgraded: the connection goes to the port of the entry.
        attempt.port = http.port
        attempt.binding = http
        attempt.verdict = self.policy.decide_name(attempt.host, attempt.port)
        if not attempt.verdict.allowed:
            raise RefusedError(attempt.verdict)
        return self._egress.exchange(self, attempt, http)

    def record_request(self, request: HttpRequest) -> None:
        """Record an HTTP request that has ended."""
        self._egress.ledger.record_request(request)

    def set_server(self, server: Stream) -> None:
        """Store the stream to the destination and close the previous one."""
        if self._server is not None:
            self._server.close()
        self._server = server

    def recheck(self) -> Verdict | None:
        """Check the current attempt against the current policy; None without an attempt."""
        if not self._attempts:
            return None
        attempt = self._attempts[-1]
        if self.policy.binding(attempt.host, attempt.port) is not attempt.binding:
            return Verdict(
                allowed=False, rule="default", reason="another entry applies to the host now"
            )
        return self.policy.recheck(
            attempt.host,
            attempt.port,
            address=parse_address(attempt.address),
            server_names=attempt.server_names,
        )

    def revoke(self, reason: str) -> None:
        """Forward no further byte. The task that serves the connection closes it with a reset."""
        is_ended = self.stream.is_ended
        for attempt in self._attempts:
            attempt.is_revoked = True
            if not is_ended:  # else the program itself has closed it before
                attempt.error = f"reset by a change of the network policy: {reason}"
        if self._server is not None:
            # Data that is blocked in a send() must not leave after switch() has returned.
            with contextlib.suppress(OSError):  # may be closed already
                self._server.sock.shutdown(socket.SHUT_RDWR)

    @property
    def is_tunnel(self) -> bool:
        """Whether the connection forwards bytes both ways, so that it can be suspended."""
        return bool(self._attempts) and self._attempts[-1].is_tunnel

    def record_part(self) -> None:
        """Record the current attempt up to now; it continues."""
        for attempt in self._attempts:
            self._egress.ledger.record_part(attempt)

    async def check_before_upstream(self, attempt: Attempt, name: str) -> None:
        """Check the addresses of ``name`` before the caller's proxy gets a request for it.

        Raises:
            RefusedError: the policy refuses one of them.

        """
        try:
            await self._egress.dialer.check_before_upstream(name, attempt.port)
        except RefusedError as exc:
            attempt.verdict = exc.verdict
            raise

    async def linger(self) -> None:
        """Shut down writing and drain input briefly, so that a reset discards no sent data."""
        self.end_attempts()
        self.stream.shutdown_write()
        remaining = _LINGER_BYTES
        try:
            async with asyncio.timeout(_LINGER_S):
                while remaining > 0 and (data := await self.stream.read_some()):
                    remaining -= len(data)
        except TimeoutError:
            return

    def record_pending_request(self) -> None:
        """Record the HTTP request in progress as it is now."""
        if self.pending_request is not None:
            self.pending_request()

    def end_attempts(self) -> None:
        """Record the attempts that have ended."""
        while self._attempts:
            self._egress.ledger.record(self._attempts.pop())

    def record_refusal(self, exc: RefusedError) -> None:
        """Store a refusal that happened after the connection was established."""
        if self._attempts:
            self._attempts[-1].verdict = exc.verdict

    def close(self, *, abort: bool) -> None:
        """Close both streams and record the remaining attempts."""
        for stream in (self.stream, self._server):
            if stream is not None:
                if abort:
                    stream.abort()
                else:
                    stream.close()
        self.end_attempts()
