"""One plain HTTP request and its response, carried through."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.http1 import (
    MAX_HEAD_BYTES,
    ChunkedBody,
    HttpFormatError,
    body_length,
    forwarded_headers,
    parse_response_head,
)
from union.sandbox._net.dialer import DialError, RefusedError
from union.sandbox._net.stream import EndOfStreamError, HeadTooLongError
from union.sandbox._policy.addresses import format_host_port
from union.sandbox._policy.rules import Verdict, parse_host

if TYPE_CHECKING:
    from union.sandbox._codecs.http1 import RequestHead, ResponseHead
    from union.sandbox._net.egress import Connection
    from union.sandbox._net.ledger import Attempt
    from union.sandbox._net.stream import Stream

__all__ = ["ForwardedRequest"]

_READ_BYTES: Final = 64 * 1024
_RESPONSE_TIMEOUT_S: Final = 300.0
_MAX_INTERIM_RESPONSES: Final = 16


class _ClientError(Exception):
    """The body of the request is not what its head said."""


_CLIENT_FAILED: Final = (_ClientError, EndOfStreamError)


class ForwardedRequest:
    """Carries one request to a server of its own, and the answer back."""

    def __init__(
        self, connection: Connection, attempt: Attempt, head: RequestHead, *, path: str
    ) -> None:
        self._connection = connection
        self._client = connection.stream
        self._attempt = attempt
        self._head = head
        self._path = path
        self._answered = False

    async def run(self) -> bool:
        """Return whether the client may send another request on its connection.

        Raises:
            HttpFormatError: the request is not one that can be passed on.
            RefusedError, DialError: the server may not, or cannot, be reached.
            EndOfStreamError: the client ended in the middle of its request.

        """
        head = self._head
        length = body_length(head.headers, minor=head.minor)
        passed_on = tuple(
            field
            for field in forwarded_headers(head.headers)
            if field[0] not in {"host", "max-forwards"}
        )
        server, target = await self._server()
        # The one place that was judged is the one that the server is told.
        lines = (("host", self._authority()), *passed_on)
        try:
            await self._send(server, _request_bytes(head, target, lines, length))
            framed, whole = await self._both_ways(server, length or 0)
        except _ClientError as exc:
            self._attempt.error = f"malformed request body: {exc}"
            if self._answered:
                raise EndOfStreamError from exc
            raise HttpFormatError(str(exc)) from exc
        except (EndOfStreamError, HeadTooLongError, HttpFormatError, TimeoutError, OSError) as exc:
            if self._answered:
                raise EndOfStreamError from exc
            self._attempt.error = "the server did not answer with proper HTTP"
            raise DialError(self._attempt.error, verdict=self._verdict()) from exc
        finally:
            server.close()
        return framed and whole and self._client_stays()

    async def _both_ways(self, server: Stream, length: int | str) -> tuple[bool, bool]:
        """Carry body and answer at once: a server may answer before it has read everything."""
        upload = asyncio.create_task(self._upload(server, length))
        answer = asyncio.create_task(self._respond(server))
        try:
            await asyncio.wait((upload, answer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and isinstance(upload.exception(), _CLIENT_FAILED):
                # A server that stopped reading may still answer; a client that failed never can.
                upload.result()
            framed = await answer
            return framed, upload.done() and upload.exception() is None
        finally:
            upload.cancel()
            answer.cancel()
            await asyncio.gather(upload, answer, return_exceptions=True)

    def _authority(self) -> str:
        host, port = str(parse_host(self._attempt.host)), self._attempt.port
        if port != 80:
            return format_host_port(host, port)
        return f"[{host}]" if ":" in host else host

    def _verdict(self) -> Verdict:
        if self._attempt.verdict is None:
            raise AssertionError("a request was sent before it was judged")
        return self._attempt.verdict

    async def _server(self) -> tuple[Stream, str]:
        """Connect; return also the target to ask for."""
        attempt = self._attempt
        upstream = self._connection.upstream
        if upstream is None or not upstream.accepts_plain_http:
            return (await self._connection.dial(attempt)).stream, self._path
        attempt.verdict = self._connection.policy.decide_name(attempt.host, attempt.port)
        if not attempt.verdict.allowed:
            raise RefusedError(attempt.verdict)
        parsed = parse_host(attempt.host)
        if isinstance(parsed, str):
            await self._connection.check_before_upstream(attempt, parsed)
        host = format_host_port(str(parsed), attempt.port)
        try:
            stream = await upstream.open()
        except RefusedError as exc:
            attempt.verdict = exc.verdict
            raise
        except OSError as exc:
            attempt.error = str(exc)
            raise DialError(str(exc), verdict=attempt.verdict) from exc
        self._connection.set_server(stream)
        return stream, f"http://{host}{self._path}"

    async def _send(self, server: Stream, data: bytes) -> None:
        self._attempt.check_not_revoked()
        await server.send(data)
        self._attempt.bytes_up += len(data)

    async def _upload(self, server: Stream, length: int | str) -> None:
        if isinstance(length, str):
            body = ChunkedBody()
            while not body.done:
                data = await self._client.read_some(_READ_BYTES)
                if not data:
                    raise EndOfStreamError
                try:
                    passed_on = body.feed(data)
                except HttpFormatError as exc:
                    raise _ClientError(str(exc)) from exc
                await self._send(server, passed_on)
            self._client.unread(body.rest)
            return
        while length:
            data = await self._client.read_some(min(_READ_BYTES, length))
            if not data:
                raise EndOfStreamError
            await self._send(server, data)
            length -= len(data)

    async def _respond(self, server: Stream) -> bool:
        for _ in range(_MAX_INTERIM_RESPONSES):
            async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                head = parse_response_head(await server.read_head(MAX_HEAD_BYTES))
            if head.status == 101:
                raise HttpFormatError("the server changed the protocol without being asked")
            if head.status >= 200:
                return await self._final(server, head)
            await self._reply(_response_bytes(head, None, close=False))
        raise HttpFormatError("the server sends interim answers without end")

    async def _final(self, server: Stream, head: ResponseHead) -> bool:
        length = body_length(head.headers, minor=head.minor)
        bodiless = self._head.method == "HEAD" or head.status in {204, 304}
        framed = bodiless or length is not None
        close = not framed or not self._client_stays()
        if length == "chunked" and self._head.minor == 0 and not bodiless:
            raise HttpFormatError("the server answers HTTP/1.0 with chunks")
        await self._reply(_response_bytes(head, length, close=close))
        if bodiless:
            return True
        if length == "chunked":
            body = ChunkedBody()
            while not body.done:
                await self._reply(body.feed(await _more(server)))
        elif isinstance(length, int):
            while length:
                data = await _more(server, length)
                await self._reply(data)
                length -= len(data)
        else:
            while data := await server.read_some(_READ_BYTES):
                await self._reply(data)
        return framed

    async def _reply(self, data: bytes) -> None:
        self._answered = True
        self._attempt.check_not_revoked()
        await self._client.send(data)
        self._attempt.bytes_down += len(data)

    def _client_stays(self) -> bool:
        named = " ".join(
            value.lower()
            for key, value in self._head.headers
            if key in {"connection", "proxy-connection"}
        )
        return self._head.minor == 1 and "close" not in named


async def _more(server: Stream, most: int = _READ_BYTES) -> bytes:
    data = await server.read_some(min(_READ_BYTES, most))
    if not data:
        raise EndOfStreamError
    return data


def _request_bytes(
    head: RequestHead,
    target: str,
    lines: tuple[tuple[str, str], ...],
    length: int | str | None,
) -> bytes:
    framing = (("transfer-encoding", "chunked"),) if length == "chunked" else ()
    fields = (*lines, *framing, ("connection", "close"))
    return _head_bytes(f"{head.method} {target} HTTP/1.{head.minor}", fields)


def _response_bytes(head: ResponseHead, length: int | str | None, *, close: bool) -> bytes:
    framing = (("transfer-encoding", "chunked"),) if length == "chunked" else ()
    ending = (("connection", "close"),) if close else ()
    fields = (*forwarded_headers(head.headers), *framing, *ending)
    return _head_bytes(f"HTTP/1.1 {head.status} {head.reason}", fields)


def _head_bytes(first: str, fields: tuple[tuple[str, str], ...]) -> bytes:
    lines = [first, *(f"{key}: {value}" for key, value in fields)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
