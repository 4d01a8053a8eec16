"""Move one intercepted request and its response, within their budgets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.http1 import (
    MAX_HEAD_BYTES,
    ChunkedBody,
    HttpFormatError,
    body_length,
    encode_head,
    parse_response_head,
)
from union.sandbox._codecs.scrubber import Scrubber
from union.sandbox._net import http_messages as messages
from union.sandbox._net.stream import EndOfStreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union.sandbox._codecs.http1 import RequestHead, ResponseHead
    from union.sandbox._codecs.scrubber import ScrubTable
    from union.sandbox._net.interception import Spent
    from union.sandbox._net.ledger import Attempt
    from union.sandbox._net.stream import Stream
    from union.sandbox._policy.http_entries import Http

__all__ = ["ClientBodyError", "Keeps", "Transfer", "TransferRefusedError"]

_READ_BYTES: Final = 256 * 1024
_RESPONSE_TIMEOUT_S: Final = 600.0
_MAX_INTERIM_RESPONSES: Final = 16
_HELD_BACK_S: Final = 0.1
"""How long a WebSocket waits with bytes that could be the beginning of a secret."""


class TransferRefusedError(Exception):
    """The entry does not allow the rest of a message; ``status`` is that of the response."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ClientBodyError(Exception):
    """The request body does not match the framing in its head."""

    status: Final = 400


@dataclass(frozen=True, slots=True)
class Keeps:
    """Which connections can carry another request."""

    client: bool
    server: bool


class Transfer:
    """One request and its response.

    Args:
        client: the client's stream.
        attempt: record of the connection.
        http: the entry, with its budgets.
        spent: what has been used of the budgets.
        table: the secrets to replace in the response; None: none.

    """

    def __init__(
        self,
        client: Stream,
        attempt: Attempt,
        http: Http,
        spent: Spent,
        table: ScrubTable | None,
    ) -> None:
        self.table = table
        self.status = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.has_credential = False
        self.has_begun = False
        """Whether a part of the response was sent to the client."""
        self._client = client
        self._attempt = attempt
        self._http = http
        self._spent = spent

    def count_up(self, size: int) -> None:
        """Count bytes of the request body.

        Raises:
            TransferRefusedError: the budget is exceeded.

        """
        if problem := self._spent.exceeded(up=size):
            raise TransferRefusedError(problem, status=403)
        self._spent.add(up=size)
        self.bytes_up += size

    def _count_down(self, size: int) -> None:
        if problem := self._spent.exceeded(down=size):
            raise TransferRefusedError(problem, status=403)
        self._spent.add(down=size)
        self.bytes_down += size

    async def read_body(self, length: int) -> bytes:
        """Read a whole request body of known length."""
        return await self._client.read_exactly(length)

    async def run(
        self,
        server: Stream,
        head: RequestHead,
        data: bytes,
        length: int | str | None,
        *,
        is_websocket: bool,
    ) -> Keeps:
        """Send the encoded head and the body, and return the response to the client."""
        await self._to_server(server, data)
        if not length:
            return await self._respond(server, head, is_websocket=is_websocket)
        # Concurrently: a server may respond before it has read all.
        upload = asyncio.create_task(self._upload(server, length))
        response = asyncio.create_task(self._respond(server, head, is_websocket=is_websocket))
        try:
            await asyncio.wait((upload, response), return_when=asyncio.FIRST_COMPLETED)
            if not response.done() and isinstance(
                upload.exception(), ClientBodyError | TransferRefusedError | EndOfStreamError
            ):
                upload.result()
            keeps = await response
            is_complete = upload.done() and upload.exception() is None
            return keeps if is_complete else Keeps(client=False, server=False)
        finally:
            upload.cancel()
            response.cancel()
            await asyncio.gather(upload, response, return_exceptions=True)

    async def _upload(self, server: Stream, length: int | str) -> None:
        if isinstance(length, int):
            while length:
                data = await self._client.read_some(min(_READ_BYTES, length))
                if not data:
                    raise EndOfStreamError
                self.count_up(len(data))
                await self._to_server(server, data)
                length -= len(data)
            return
        body = ChunkedBody(encode=False)
        while not body.done:
            data = await self._client.read_some(_READ_BYTES)
            if not data:
                raise EndOfStreamError
            try:
                data = body.feed(data)
            except HttpFormatError as exc:
                raise ClientBodyError(f"malformed request body: {exc}") from exc
            if data:
                self.count_up(len(data))
                await self._to_server(server, b"%x\r\n%b\r\n" % (len(data), data))
        self._client.unread(body.rest)
        await self._to_server(server, b"0\r\n\r\n")

    async def _respond(self, server: Stream, request: RequestHead, *, is_websocket: bool) -> Keeps:
        for _ in range(_MAX_INTERIM_RESPONSES):
            async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                data = await server.read_head(MAX_HEAD_BYTES)
            head = parse_response_head(data if self.table is None else self.table.replaced(data))
            if head.status == 101 and is_websocket:
                await self._switch(server, head)
                return Keeps(client=False, server=False)
            if head.status == 101:
                raise HttpFormatError("the server switched protocols without a request to do so")
            if head.status >= 200:
                self.status = head.status
                return await self._final_response(server, head, request)
            await self._to_client(encode_head(f"HTTP/1.1 {head.status} {head.reason}", ()))
            self.has_begun = False  # a final response of our own may still follow
        raise HttpFormatError(
            f"the server sent more than {_MAX_INTERIM_RESPONSES} interim responses"
        )

    async def _final_response(
        self, server: Stream, head: ResponseHead, request: RequestHead
    ) -> Keeps:
        length = body_length(head.headers, minor=head.minor)
        bodiless = request.method == "HEAD" or head.status in {204, 304}
        announced = length if isinstance(length, int) and not bodiless else 0
        if problem := self._spent.exceeded(down=announced):
            raise TransferRefusedError(problem, status=403)
        if self.table is not None and not bodiless and messages.is_compressed(head):
            raise TransferRefusedError(
                "the server compressed its response, in which a secret would not be found; "
                f"scrub=False of {self._http.text} permits that",
                status=502,
            )
        framed_by_server = bodiless or length is not None
        # A client of HTTP/1.0 reads no chunks.
        chunked = length == "chunked" and request.minor == 1
        framed = bodiless or chunked or isinstance(length, int)
        close = not framed or not messages.client_keeps_alive(request)
        encoded = messages.response_head(head, self._http, chunked=chunked, close=close)
        if bodiless:
            await self._to_client(encoded)
        else:
            await self._body_to_client(server, encoded, length, chunked=chunked)
        keeps_server = framed_by_server and messages.server_keeps_alive(head)
        return Keeps(client=not close, server=keeps_server)

    async def _body_to_client(
        self, server: Stream, head: bytes, length: int | str | None, *, chunked: bool
    ) -> None:
        """Send the head and the scrubbed body; a part that is here already goes with the head."""
        if not server.has_buffered:
            await self._to_client(head)
            head = b""
        scrubber = None if self.table is None else Scrubber(self.table)
        async for data in _payload(server, length):
            self._count_down(len(data))
            out = data if scrubber is None else scrubber.feed(data)
            if out or head:
                out = _chunk(out) if chunked and out else out
                await self._to_client(head + out if head else out)
                head = b""
        rest = b"" if scrubber is None else scrubber.finish()
        if rest and chunked:
            rest = _chunk(rest)
        if chunked:
            rest += b"0\r\n\r\n"
        if head or rest:
            await self._to_client(head + rest)

    async def _switch(self, server: Stream, head: ResponseHead) -> None:
        """Forward the bytes of a WebSocket both ways until one side ends."""
        self.status = head.status
        await self._to_client(
            messages.response_head(head, self._http, chunked=False, close=False, is_upgrade=True)
        )
        both = (
            asyncio.create_task(self._websocket_up(server)),
            asyncio.create_task(self._websocket_down(server)),
        )
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _websocket_up(self, server: Stream) -> None:
        while data := await self._client.read_some(_READ_BYTES):
            self.count_up(len(data))
            await self._to_server(server, data)

    async def _websocket_down(self, server: Stream) -> None:
        scrubber = None if self.table is None else Scrubber(self.table)
        while True:
            try:
                # A message may end with a byte that could begin a secret: it must not wait.
                held = scrubber is not None and scrubber.is_holding
                async with asyncio.timeout(_HELD_BACK_S if held else None):
                    data = await server.read_some(_READ_BYTES)
            except TimeoutError:
                if scrubber is not None:
                    await self._to_client(scrubber.finish())
                continue
            if not data:
                break
            self._count_down(len(data))
            out = data if scrubber is None else scrubber.feed(data)
            if out:
                await self._to_client(out)
        if scrubber is not None and (out := scrubber.finish()):
            await self._to_client(out)

    async def _to_server(self, server: Stream, data: bytes) -> None:
        self._attempt.check_not_revoked()
        await server.send(data)
        self._attempt.bytes_up += len(data)

    async def _to_client(self, data: bytes) -> None:
        self.has_begun = True
        self._attempt.check_not_revoked()
        await self._client.send(data)
        self._attempt.bytes_down += len(data)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _payload(server: Stream, length: int | str | None) -> AsyncIterator[bytes]:
    """Yield the content of a response body.

    Raises:
        EndOfStreamError: it ended before its announced end.
        HttpFormatError: its framing is malformed.

    """
    if isinstance(length, int):
        while length:
            data = await server.read_some(min(_READ_BYTES, length))
            if not data:
                raise EndOfStreamError
            yield data
            length -= len(data)
    elif length is None:
        while data := await server.read_some(_READ_BYTES):
            yield data
    else:
        body = ChunkedBody(encode=False)
        while not body.done:
            data = await server.read_some(_READ_BYTES)
            if not data:
                raise EndOfStreamError
            if data := body.feed(data):
                yield data
        if body.rest:
            raise HttpFormatError("the server sent bytes after its response")
