"""Forward one plain HTTP request to its server and the response to the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.http1 import (
    MAX_HEAD_BYTES,
    ChunkedBody,
    HttpFormatError,
    body_length,
    encode_head,
    forwarded_headers,
    parse_response_head,
)
from union.sandbox._net.dialer import DialError, RefusedError
from union.sandbox._net.stream import EndOfStreamError, HeadTooLongError
from union.sandbox._policy.addresses import format_host_port
from union.sandbox._policy.rules import Verdict, parse_host

if TYPE_CHECKING:
    from union.sandbox._codecs.http1 import RequestHead, ResponseHead
    from union.sandbox._net.connection import Connection
    from union.sandbox._net.ledger import Attempt
    from union.sandbox._net.stream import Stream

__all__ = ["ForwardedRequest"]

_READ_BYTES: Final = 64 * 1024
_RESPONSE_TIMEOUT_S: Final = 300.0
_MAX_INTERIM_RESPONSES: Final = 16


class _RequestBodyError(Exception):
    """The request body does not match the framing in its head."""


_CLIENT_ERRORS: Final = (_RequestBodyError, EndOfStreamError)


class ForwardedRequest:
    """One request, forwarded over a server connection of its own.

    Args:
        connection: the client's connection.
        attempt: record of this request, with host and port.
        head: the parsed request head.
        path: request target for the server.

    """

    def __init__(
        self, connection: Connection, attempt: Attempt, head: RequestHead, *, path: str
    ) -> None:
        self._connection = connection
        self._client = connection.stream
        self._attempt = attempt
        self._head = head
        self._path = path
        self._response_started = False

    async def run(self) -> bool:
        """Forward both ways; return whether the client may send another request.

        Raises:
            HttpFormatError: the request is malformed.
            RefusedError: the policy refuses the server.
            DialError: the server cannot be reached or sends no valid HTTP.
            EndOfStreamError: the client disconnected in the middle of its request.

        """
        head = self._head
        length = body_length(head.headers, minor=head.minor)
        forwarded = tuple(
            field
            for field in forwarded_headers(head.headers)
            if field[0] not in {"host", "max-forwards"}
        )
        server, target = await self._connect()
        # The Host header names exactly the destination that the policy allowed.
        fields = (("host", self._authority()), *forwarded)
        try:
            await self._send(server, _encode_request(head, target, fields, length))
            is_framed, is_complete = await self._transfer(server, length or 0)
        except _RequestBodyError as exc:
            self._attempt.error = f"malformed request body: {exc}"
            if self._response_started:
                raise EndOfStreamError from exc
            raise HttpFormatError(str(exc)) from exc
        except (EndOfStreamError, HeadTooLongError, HttpFormatError, TimeoutError, OSError) as exc:
            if self._response_started:
                raise EndOfStreamError from exc
            self._attempt.error = "the server did not send a valid HTTP response"
            raise DialError(self._attempt.error, verdict=self._verdict()) from exc
        finally:
            server.close()
        return is_framed and is_complete and self._client_keeps_alive()

    async def _transfer(self, server: Stream, length: int | str) -> tuple[bool, bool]:
        """Forward body and response concurrently: a server may respond before it has read all.

        Return whether the response has a length, and whether the whole body was sent.
        """
        upload = asyncio.create_task(self._upload(server, length))
        response = asyncio.create_task(self._forward_response(server))
        try:
            await asyncio.wait((upload, response), return_when=asyncio.FIRST_COMPLETED)
            if not response.done() and isinstance(upload.exception(), _CLIENT_ERRORS):
                # A server that stopped reading may still respond; a failed client cannot recover.
                upload.result()
            is_framed = await response
            return is_framed, upload.done() and upload.exception() is None
        finally:
            upload.cancel()
            response.cancel()
            await asyncio.gather(upload, response, return_exceptions=True)

    def _authority(self) -> str:
        host, port = str(parse_host(self._attempt.host)), self._attempt.port
        if port != 80:
            return format_host_port(host, port)
        return f"[{host}]" if ":" in host else host

    def _verdict(self) -> Verdict:
        if self._attempt.verdict is None:
            raise AssertionError("a request was sent before the policy decided about it")
        return self._attempt.verdict

    async def _connect(self) -> tuple[Stream, str]:
        """Return a stream to the server or upstream proxy, and the request target for it."""
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
            stream = await upstream.connect_to_proxy()
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
                    chunks = body.feed(data)
                except HttpFormatError as exc:
                    raise _RequestBodyError(str(exc)) from exc
                await self._send(server, chunks)
            self._client.unread(body.rest)
            return
        while length:
            data = await self._client.read_some(min(_READ_BYTES, length))
            if not data:
                raise EndOfStreamError
            await self._send(server, data)
            length -= len(data)

    async def _forward_response(self, server: Stream) -> bool:
        for _ in range(_MAX_INTERIM_RESPONSES):
            async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                head = parse_response_head(await server.read_head(MAX_HEAD_BYTES))
            if head.status == 101:
                raise HttpFormatError("the server switched protocols without a request to do so")
            if head.status >= 200:
                return await self._forward_final_response(server, head)
            await self._send_to_client(_encode_response(head, None, close=False))
        raise HttpFormatError(
            f"the server sent more than {_MAX_INTERIM_RESPONSES} interim responses"
        )

    async def _forward_final_response(self, server: Stream, head: ResponseHead) -> bool:
        length = body_length(head.headers, minor=head.minor)
        bodiless = self._head.method == "HEAD" or head.status in {204, 304}
        is_framed = bodiless or length is not None
        close = not is_framed or not self._client_keeps_alive()
        if length == "chunked" and self._head.minor == 0 and not bodiless:
            raise HttpFormatError("the server sent a chunked response to an HTTP/1.0 request")
        await self._send_to_client(_encode_response(head, length, close=close))
        if bodiless:
            return True
        if length == "chunked":
            body = ChunkedBody()
            while not body.done:
                await self._send_to_client(body.feed(await _read_some(server)))
        elif isinstance(length, int):
            while length:
                data = await _read_some(server, length)
                await self._send_to_client(data)
                length -= len(data)
        else:
            while data := await server.read_some(_READ_BYTES):
                await self._send_to_client(data)
        return is_framed

    async def _send_to_client(self, data: bytes) -> None:
        self._response_started = True
        self._attempt.check_not_revoked()
        await self._client.send(data)
        self._attempt.bytes_down += len(data)

    def _client_keeps_alive(self) -> bool:
        options = " ".join(
            value.lower()
            for key, value in self._head.headers
            if key in {"connection", "proxy-connection"}
        )
        return self._head.minor == 1 and "close" not in options


async def _read_some(server: Stream, limit: int = _READ_BYTES) -> bytes:
    data = await server.read_some(min(_READ_BYTES, limit))
    if not data:
        raise EndOfStreamError
    return data


def _encode_request(
    head: RequestHead,
    target: str,
    fields: tuple[tuple[str, str], ...],
    length: int | str | None,
) -> bytes:
    framing = (("transfer-encoding", "chunked"),) if length == "chunked" else ()
    everything = (*fields, *framing, ("connection", "close"))
    return encode_head(f"{head.method} {target} HTTP/1.{head.minor}", everything)


def _encode_response(head: ResponseHead, length: int | str | None, *, close: bool) -> bytes:
    framing = (("transfer-encoding", "chunked"),) if length == "chunked" else ()
    ending = (("connection", "close"),) if close else ()
    fields = (*forwarded_headers(head.headers), *framing, *ending)
    return encode_head(f"HTTP/1.1 {head.status} {head.reason}", fields)
