"""The HTTP proxy: CONNECT, and plain requests in absolute form, each judged by itself."""

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
    from union.sandbox._net.egress import Connection

__all__ = ["HttpFrontend"]

_HEAD_TIMEOUT_S: Final = 10.0
_IDLE_TIMEOUT_S: Final = 60.0
_SCHEME: Final = "http://"
_ECHO_METHODS: Final = frozenset({"TRACE", "TRACK", "DEBUG"})
"""Methods whose answer is the request as it was received."""
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
    """Serves one client of the proxy per connection."""

    name: Final = "http"

    def __init__(self, credentials: str | None) -> None:
        self._expected = (
            None if credentials is None else b"Basic " + base64.b64encode(credentials.encode())
        )

    def destination_of(self, _sock: socket.socket) -> tuple[str, int]:
        """Return the destination of a connection that is not served: unknown yet."""
        return "", 0

    async def serve(self, connection: Connection) -> None:
        """Serve requests until the client ends, is refused, or asks for a tunnel."""
        again, patience_s = True, _HEAD_TIMEOUT_S
        while again:
            attempt = Attempt(frontend="http", host="", port=0)
            try:
                async with asyncio.timeout(patience_s):
                    data = await connection.stream.read_head(MAX_HEAD_BYTES)
                if not data:
                    return
                again = await self._request(connection, parse_request_head(data), attempt)
                patience_s = _IDLE_TIMEOUT_S
            except HttpFormatError as exc:
                if attempt.verdict is None:
                    attempt.verdict = Verdict(allowed=False, rule="syntax", reason=f"HTTP: {exc}")
                    connection.begin_attempt(attempt)
                await self._answer(connection, 400, str(exc))
                return
            except HeadTooLongError:
                await self._answer(connection, 431, "the head is larger than 64 KiB")
                return
            except TimeoutError:
                # To an idle client an answer would look like that to its next request.
                if connection.stream.has_buffered:
                    await self._answer(connection, 408, "the request did not arrive in time")
                return
            except EndOfStreamError:
                return

    async def _request(self, connection: Connection, head: RequestHead, attempt: Attempt) -> bool:
        if not self._may_use(head):
            attempt.verdict = Verdict(
                allowed=False, rule="credentials", reason="wrong or missing proxy credentials"
            )
            connection.begin_attempt(attempt)
            await self._answer(connection, 407, "this proxy belongs to another run")
            return False
        if head.method == "CONNECT":
            attempt.host, attempt.port = split_authority(head.target, default_port=None)
            path = ""
        else:
            attempt.host, attempt.port, path = _absolute(head.target)
        _same_host(head, attempt.host, attempt.port)
        connection.begin_attempt(attempt)
        connection.request_received()
        if connection.upstream is not None and head.method.upper() in _ECHO_METHODS:
            attempt.verdict = Verdict(
                allowed=False,
                rule="method",
                reason=f"{head.method} is not passed to an upstream proxy: it may be repeated back",
            )
            await self._answer(connection, 405, attempt.verdict.reason)
            return False
        try:
            if head.method == "CONNECT":
                await self._tunnel(connection, attempt)
                return False
            exchange = ForwardedRequest(connection, attempt, head, path=path)
            return await exchange.run()
        except RefusedError as exc:
            await self._answer(connection, 403, _refusal(exc.verdict))
        except DialError as exc:
            await self._answer(connection, 502, f"allowed, but: {exc}")
        return False

    async def _tunnel(self, connection: Connection, attempt: Attempt) -> None:
        connected = await connection.dial(attempt)
        await connection.stream.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await tunnel(connection.stream, connected, attempt, policy=connection.policy)
        except RefusedError as exc:
            # The tunnel is open: an HTTP answer would arrive as the far side's first bytes.
            attempt.verdict = exc.verdict
            connection.stream.abort()

    def _may_use(self, head: RequestHead) -> bool:
        if self._expected is None:
            return True
        given = head.values("proxy-authorization")
        return len(given) == 1 and hmac.compare_digest(given[0].encode("latin-1"), self._expected)

    async def _answer(self, connection: Connection, status: int, text: str) -> None:
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


def _absolute(target: str) -> tuple[str, int, str]:
    """Split ``http://host[:port]/path`` into host, port and what the server is asked for."""
    if target[: len(_SCHEME)].lower() != _SCHEME:
        raise HttpFormatError("the target is not an http:// URL; for https use CONNECT")
    if "#" in target or "\\" in target:
        raise HttpFormatError("the target holds a fragment or a backslash")
    rest = target[len(_SCHEME) :]
    cut = min((at for c in "/?" if (at := rest.find(c)) >= 0), default=len(rest))
    host, port = split_authority(rest[:cut], default_port=80)
    path = rest[cut:]
    return host, port, path if path.startswith("/") else f"/{path}"


def _same_host(head: RequestHead, host: str, port: int) -> None:
    """Refuse a request whose Host differs from its target: two places, one of them judged."""
    hosts = head.values("host")
    if len(hosts) > 1 or (not hosts and head.minor == 1 and head.method != "CONNECT"):
        raise HttpFormatError("there must be exactly one Host")
    if not hosts:
        return
    named, named_port = split_authority(
        hosts[0], default_port=port if head.method == "CONNECT" else 80
    )
    try:
        same = parse_host(named) == parse_host(host)
    except NameSyntaxError as exc:
        raise HttpFormatError(f"the host {exc}") from exc
    if not same or named_port != port:
        raise HttpFormatError("Host names another place than the target")


def _refusal(verdict: Verdict) -> str:
    text = f"refused by the sandbox's network policy: {verdict.reason}"
    if verdict.suggestion:
        text += f"\nthe entry that would allow it: {verdict.suggestion}"
    return text
