"""The HTTP proxy: CONNECT and plain absolute-form requests. Each request is checked."""

from __future__ import annotations

import asyncio
import base64
import hmac
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.http1 import (
    MAX_HEAD_BYTES,
    HttpFormatError,
    parse_request_head,
    split_authority,
)
from union.sandbox._net.dialer import DialError, RefusedError
from union.sandbox._net.http_forward import ForwardedRequest
from union.sandbox._net.ledger import Attempt
from union.sandbox._net.relay import tunnel
from union.sandbox._net.stream import EndOfStreamError, HeadTooLongError
from union.sandbox._policy.names import NameSyntaxError
from union.sandbox._policy.rules import Verdict, parse_host

if TYPE_CHECKING:
    import socket

    from union.sandbox._codecs.http1 import RequestHead
    from union.sandbox._net.connection import Connection
    from union.sandbox._policy.http_entries import Http

__all__ = ["HttpFrontend"]

_HEAD_TIMEOUT_S: Final = 10.0
_IDLE_TIMEOUT_S: Final = 60.0
_SCHEME: Final = "http://"
_ECHO_METHODS: Final = frozenset({"TRACE", "TRACK", "DEBUG"})
"""Methods whose response repeats the request as received."""
_REASONS: Final = {
    400: "Bad Request",
    403: "Forbidden",
    405: "Method Not Allowed",
    407: "Proxy Authentication Required",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
    504: "Gateway Timeout",
}


class HttpFrontend:
    """Serve one HTTP proxy client per connection.

    Args:
        credentials: ``user:password`` that clients must send; None: none.

    """

    name: Final = "http"

    def __init__(self, credentials: str | None) -> None:
        self._expected = (
            None if credentials is None else b"Basic " + base64.b64encode(credentials.encode())
        )

    def destination_of(self, _sock: socket.socket) -> tuple[str, int]:
        """Return no destination: it is unknown before the first request."""
        return "", 0

    async def serve(self, connection: Connection) -> None:
        """Serve requests until the client disconnects, is refused, or opens a tunnel."""
        keep_alive, timeout_s = True, _HEAD_TIMEOUT_S
        while keep_alive:
            attempt = Attempt(frontend="http", host="", port=0)
            try:
                async with asyncio.timeout(timeout_s):
                    data = await connection.stream.read_head(MAX_HEAD_BYTES)
                if not data:
                    return
                keep_alive = await self._serve_request(
                    connection, parse_request_head(data), attempt
                )
                timeout_s = _IDLE_TIMEOUT_S
            except HttpFormatError as exc:
                if attempt.verdict is None:
                    attempt.verdict = Verdict(allowed=False, rule="syntax", reason=f"HTTP: {exc}")
                    connection.begin_attempt(attempt)
                await self._respond(connection, 400, str(exc))
                return
            except HeadTooLongError:
                await self._respond(connection, 431, "the request head is larger than 64 KiB")
                return
            except TimeoutError:
                # An idle client would read a response as the response to its next request.
                if connection.stream.has_buffered:
                    await self._respond(connection, 408, "the request did not arrive in time")
                return
            except EndOfStreamError:
                return

    async def _serve_request(
        self, connection: Connection, head: RequestHead, attempt: Attempt
    ) -> bool:
        if not self._is_authorized(head):
            attempt.verdict = Verdict(
                allowed=False, rule="credentials", reason="wrong or missing proxy credentials"
            )
            connection.begin_attempt(attempt)
            await self._respond(connection, 407, "this proxy requires the credentials of its run")
            return False
        if head.method == "CONNECT":
            attempt.host, attempt.port = split_authority(head.target, default_port=None)
            path = ""
        else:
            attempt.host, attempt.port, path = _split_absolute_target(head.target)
        _check_host_header(head, attempt.host, attempt.port)
        connection.begin_attempt(attempt)
        connection.request_received()
        if connection.upstream is not None and head.method.upper() in _ECHO_METHODS:
            attempt.verdict = Verdict(
                allowed=False,
                rule="method",
                reason=f"{head.method} is not forwarded to an upstream proxy: its response may "
                "repeat the proxy credentials",
            )
            await self._respond(connection, 405, attempt.verdict.reason)
            return False
        try:
            bound = connection.policy.binding(attempt.host, attempt.port)
            if bound is not None:
                return await self._intercept(connection, attempt, bound, head, path)
            if head.method == "CONNECT":
                await self._tunnel(connection, attempt)
                return False
            return await ForwardedRequest(connection, attempt, head, path=path).run()
        except RefusedError as exc:
            await self._respond(connection, 403, _refusal_text(exc.verdict))
        except DialError as exc:
            await self._respond(
                connection, 502, f"the destination is allowed, but the request failed: {exc}"
            )
        return False

    async def _intercept(
        self, connection: Connection, attempt: Attempt, bound: Http, head: RequestHead, path: str
    ) -> bool:
        """Serve a connection or a request to the host of an ``Http`` entry."""
        exchange = connection.intercept(attempt, bound)
        if head.method != "CONNECT":
            try:
                return await exchange.forward(head, path)
            finally:
                exchange.close()
        await connection.stream.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await exchange.serve()
        except RefusedError as exc:
            # The client would read an HTTP response as tunnelled data.
            attempt.verdict = exc.verdict
            connection.stream.abort()
        return False

    async def _tunnel(self, connection: Connection, attempt: Attempt) -> None:
        outbound = await connection.dial(attempt)
        await connection.stream.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await tunnel(connection.stream, outbound, attempt, policy=connection.policy)
        except RefusedError as exc:
            # The tunnel is open: the client would read an HTTP response as tunnelled data.
            attempt.verdict = exc.verdict
            connection.stream.abort()

    def _is_authorized(self, head: RequestHead) -> bool:
        if self._expected is None:
            return True
        given = head.values("proxy-authorization")
        return len(given) == 1 and hmac.compare_digest(given[0].encode("latin-1"), self._expected)

    async def _respond(self, connection: Connection, status: int, text: str) -> None:
        body = (text + "\n").encode("utf-8", "replace")
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
            "Content-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\n"
            "Connection: close\r\n"
        )
        if status == 405:
            head += "Allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, CONNECT\r\n"
        if status == 407:
            head += 'Proxy-Authenticate: Basic realm="sandbox"\r\n'
        await connection.stream.send(head.encode("ascii") + b"\r\n" + body)
        await connection.linger()


def _split_absolute_target(target: str) -> tuple[str, int, str]:
    """Split ``http://host[:port]/path`` into host, port and path."""
    if target[: len(_SCHEME)].lower() != _SCHEME:
        raise HttpFormatError("the request target is not an http:// URL; use CONNECT for https")
    if "#" in target or "\\" in target:
        raise HttpFormatError("the request target contains a fragment or a backslash")
    rest = target[len(_SCHEME) :]
    end = min((at for c in "/?" if (at := rest.find(c)) >= 0), default=len(rest))
    host, port = split_authority(rest[:end], default_port=80)
    path = rest[end:]
    return host, port, path if path.startswith("/") else f"/{path}"


def _check_host_header(head: RequestHead, host: str, port: int) -> None:
    """Refuse a request whose Host header differs from its target: only the target is checked."""
    hosts = head.values("host")
    if len(hosts) > 1 or (not hosts and head.minor == 1 and head.method != "CONNECT"):
        raise HttpFormatError(f"expected exactly one Host header, got {len(hosts)}")
    if not hosts:
        return
    header_host, header_port = split_authority(
        hosts[0], default_port=port if head.method == "CONNECT" else 80
    )
    try:
        same = parse_host(header_host) == parse_host(host)
    except NameSyntaxError as exc:
        raise HttpFormatError(f"the host {exc}") from exc
    if not same or header_port != port:
        raise HttpFormatError("the Host header differs from the request target")


def _refusal_text(verdict: Verdict) -> str:
    text = f"refused by the sandbox's network policy: {verdict.reason}"
    if verdict.suggestion:
        text += f"\nentry that would allow it: {verdict.suggestion}"
    return text
