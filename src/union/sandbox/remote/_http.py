"""The HTTP client of a remote session.

The server is not trusted. Every reply has a size limit and a deadline, no redirect is followed, no
reply is decompressed and no cookie is kept. A reply that breaks a rule is a
``SandboxConnectionError`` with the code ``protocol``; a missing one has the code ``no-answer``.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote_from_bytes

import aiohttp
from yarl import URL

from union.sandbox._wire.errors import decode_error
from union.sandbox._wire.frames import MAX_MESSAGE, PROTOCOL, WireError, parse_json, to_json
from union.sandbox.errors import SandboxConnectionError, SandboxError, SandboxUsageError
from union.sandbox.remote._upload import LAST, PIECE, Upload, wait_finished
from union.sandbox.remote._websocket import WebSocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from aiohttp import ClientTimeout as _Timeout

    from union.sandbox._wire.endpoint import Endpoint

__all__ = ["MAX_LISTING", "HttpClient"]

_CONNECT_S: Final = 10.0
_HANDSHAKE_S: Final = 30.0
CALL_S: Final = 20.0
"""How long one request may take, its reply included."""
IDLE_S: Final = 60.0
"""How long the transfer of a file may make no progress."""
MAX_REPLY: Final = 4 * 1024 * 1024
MAX_LISTING: Final = 64 * 1024 * 1024
"""Enough for a directory with the maximum number of entries and long names."""
MAX_TAIL: Final = 64 * 1024
"""The outcome of a download, which follows its last piece."""
_GIVE_UP_S: Final = 10.0
_MAX_PIECE: Final = 16 * 1024 * 1024
_HEARTBEAT_S: Final = 10.0
_LEAKS_TLS_CONNECTIONS: Final = (3, 11, 4) <= sys.version_info[:3] < (3, 12, 7) or (
    sys.version_info[:3] == (3, 13, 0)
)
"""Whether this Python leaks a TLS connection that both sides close at the same time.

Earlier ones do, too, but there a closed connection cannot be aborted: the call raises.
"""
_WS_CLOSE_S: Final = 2.0
"""How long a server may take to confirm the end of a connection."""
_NOT_SENT: Final = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.ServerFingerprintMismatch,
)


class ProtocolViolationError(aiohttp.ClientPayloadError):
    """The server sent a reply that this protocol does not have."""


class _Response(aiohttp.ClientResponse):
    """A reply; a redirect is refused before anything is sent to its target."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        if 300 <= self.status < 400:
            raise ProtocolViolationError(f"status {self.status}: redirects are not followed")
        return self


class HttpClient:
    """The HTTP client for one server, in one event loop. It owns its connections."""

    def __init__(self, endpoint: Endpoint, *, token: str | None, ca: str | None) -> None:
        self.endpoint = endpoint
        connector: aiohttp.BaseConnector
        if endpoint.socket is not None:
            connector = aiohttp.UnixConnector(endpoint.socket, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, enable_cleanup_closed=_LEAKS_TLS_CONNECTIONS)
        self._ssl: Any = True
        if endpoint.fingerprint is not None:
            self._ssl = aiohttp.Fingerprint(endpoint.fingerprint)
        elif ca is not None:
            self._ssl = _tls_context(ca)
        self.deadline: float | None = None
        """When the session's own timeout passes, by the clock of the event loop."""
        self._auth = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Accept-Encoding": "identity"},
            timeout=self._timeout(None),
            read_bufsize=1024 * 1024,
            response_class=_Response,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _timeout(self, within_s: float | None, *, idle_s: float | None = None) -> _Timeout:
        """Return the time limits of one request; none outlasts the session."""
        if self.deadline is not None:
            left_s = max(0.001, self.deadline - asyncio.get_running_loop().time())
            within_s = left_s if within_s is None else min(within_s, left_s)
        return aiohttp.ClientTimeout(
            total=within_s, connect=_CONNECT_S, sock_connect=_CONNECT_S, sock_read=idle_s
        )

    def _url(self, path: str, query: dict[str, str] | None = None) -> URL:
        text = f"{self.endpoint.base}/v1/{path}"
        if query:
            pairs = (
                f"{name}={quote_from_bytes(value.encode('utf-8', 'surrogateescape'), safe='')}"
                for name, value in query.items()
            )
            text += "?" + "&".join(pairs)
        return URL(text, encoded=True)

    def _failed(self, exc: BaseException) -> SandboxConnectionError:
        """Return the error that a failed request raises."""
        sent = not isinstance(exc, _NOT_SENT)
        hint, code = "", "connection"
        if isinstance(exc, aiohttp.ServerFingerprintMismatch):
            code, hint = "certificate", "this is not the server whose certificate was pinned"
        elif isinstance(exc, aiohttp.ClientConnectorCertificateError):
            code, hint = "certificate", "pass cert='sha256:...' with the server's fingerprint"
        elif isinstance(exc, ProtocolViolationError | WireError):
            code, hint = "protocol", "the server is faulty or hostile: do not use it"
        elif isinstance(exc, TimeoutError) and sent:
            code, hint = "no-answer", "the server is overloaded, stuck or hostile"
        elif not sent:
            hint = "check that the server is running and that this is its address"
        return SandboxConnectionError(
            f"{self.endpoint}: {_describe(exc)}",
            endpoint=str(self.endpoint),
            sent=sent,
            code=code,
            hint=hint,
        )

    async def call(
        self,
        method: str,
        path: str,
        payload: dict[str, Any] | None = None,
        *,
        within_s: float = CALL_S,
        max_bytes: int = MAX_REPLY,
    ) -> dict[str, Any]:
        """Send one request; return its whole reply, which must come within ``within_s``."""
        body = None if payload is None else to_json(payload)
        headers = {} if body is None else {"Content-Type": "application/json"}
        if path != "health":  # It needs no token, and the server is not verified yet.
            headers |= self._auth
        try:
            async with self._session.request(
                method,
                self._url(path),
                data=body,
                headers=headers,
                ssl=self._ssl,
                timeout=self._timeout(within_s),
            ) as response:
                return await self._decode_reply(response, max_bytes=max_bytes)
        except SandboxError:
            raise  # Some of our own errors are OSErrors as well.
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self._failed(exc) from exc

    async def _decode_reply(
        self, response: aiohttp.ClientResponse, *, max_bytes: int = MAX_REPLY
    ) -> dict[str, Any]:
        data = await _read_limited(response.content, max_bytes)
        try:
            payload = parse_json(data, max_bytes=max_bytes)
        except WireError as exc:
            raise ProtocolViolationError(
                f"status {response.status}, and a reply that violates the protocol"
            ) from exc
        if isinstance(error := payload.get("error"), dict):
            raise decode_error(error)
        return payload

    async def connect(self, session: str) -> WebSocket:
        """Open the WebSocket that carries the runs of one session."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                return WebSocket(
                    await self._session.ws_connect(
                        self._url(f"sessions/{session}/connect"),
                        protocols=(PROTOCOL,),
                        headers=self._auth,
                        max_msg_size=MAX_MESSAGE,
                        heartbeat=_HEARTBEAT_S,
                        timeout=aiohttp.ClientWSTimeout(ws_close=_WS_CLOSE_S),
                        ssl=self._ssl,
                    )
                )
        except aiohttp.WSServerHandshakeError as exc:
            # The handshake does not carry the reason of a refusal; a plain request returns it.
            await self.call("GET", f"sessions/{session}")
            raise self._failed(exc) from exc
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self._failed(exc) from exc

    # Files.

    async def store(
        self,
        session: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        query: dict[str, str],
        route: str = "file",
    ) -> int:
        """Upload a file in pieces and return its size; see ``upload``."""
        payload = await self.upload(session, path, chunks, query=query, route=route)
        found = payload.get("size")
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise self._failed(ProtocolViolationError(f"invalid size {found!r:.40} in the reply"))
        return found

    async def upload(
        self,
        session: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        query: dict[str, str],
        route: str,
    ) -> dict[str, Any]:
        """Upload in pieces and return the reply. An exception of ``chunks`` is raised unchanged.

        After such an exception, or when this is cancelled, the server has discarded the upload when
        this returns.
        """
        fields = {"path": path, **query, "framed": "1"}
        body = Upload(chunks)
        sending = asyncio.get_running_loop().create_task(
            self._put(self._url(f"sessions/{session}/{route}", fields), body)
        )
        try:
            await self._wait_for_upload(sending, body)
            return sending.result()
        except asyncio.CancelledError:
            body.cancel()
            await wait_finished(sending, within_s=_GIVE_UP_S)
            raise
        except SandboxError:
            # The connection may have dropped while the next piece was being read.
            await body.stop(within_s=_GIVE_UP_S)
            if body.error is not None:
                raise body.error from None
            raise

    async def _wait_for_upload(self, sending: asyncio.Task[dict[str, Any]], body: Upload) -> None:
        """Wait for an upload; end one whose server accepts no data for ``IDLE_S``."""
        loop = asyncio.get_running_loop()
        sent, since = -1, loop.time()
        while not sending.done():
            await asyncio.wait({sending}, timeout=IDLE_S / 4)
            if body.sent != sent or body.waits_for_caller:
                sent, since = body.sent, loop.time()
            elif loop.time() - since >= IDLE_S:
                sending.cancel()
                await asyncio.wait({sending})
                raise self._failed(TimeoutError(f"the server accepted no data for {IDLE_S:g} s"))

    async def _put(self, url: URL, body: Upload) -> dict[str, Any]:
        headers = {"Content-Type": "application/octet-stream", **self._auth}
        try:
            async with self._session.put(
                url,
                data=body.pieces(),
                headers=headers,
                ssl=self._ssl,
                timeout=self._timeout(None),
            ) as response:
                return await self._decode_reply(response)
        except SandboxError:
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self._failed(exc) from exc

    async def fetch(
        self,
        session: str,
        path: str,
        *,
        max_bytes: int,
        route: str = "file",
        query: dict[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Download a file in pieces; the server marks the last one explicitly."""
        fields = {"path": path, **(query or {}), "max_bytes": str(max_bytes), "framed": "1"}
        left = max_bytes
        try:
            async with self._session.get(
                self._url(f"sessions/{session}/{route}", fields),
                headers=self._auth,
                ssl=self._ssl,
                timeout=self._timeout(None, idle_s=IDLE_S),
            ) as response:
                if response.status != 200:
                    await self._decode_reply(response)
                    raise ProtocolViolationError(f"status {response.status}")
                while True:
                    (size,) = PIECE.unpack(await response.content.readexactly(PIECE.size))
                    if size == LAST:
                        break
                    if not 0 < size <= _MAX_PIECE:
                        raise ProtocolViolationError(f"a piece of {size} bytes")
                    left -= size
                    if left < 0:
                        raise ProtocolViolationError(f"more than {max_bytes} bytes were sent")
                    yield await response.content.readexactly(size)
                tail = await _read_limited(response.content, MAX_TAIL)
                outcome = parse_json(tail, max_bytes=MAX_TAIL)
        except SandboxError:
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self._failed(exc) from exc
        except (asyncio.IncompleteReadError, WireError) as exc:
            raise self._failed(exc) from exc
        if isinstance(error := outcome.get("error"), dict):
            raise decode_error(error)
        if outcome.get("done") is not True:
            raise self._failed(ProtocolViolationError("the download has no outcome"))

    async def close(self) -> None:
        await self._session.close()


async def _read_limited(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    """Read to the end, and refuse more than ``max_bytes``."""
    data = bytearray()
    async for chunk in content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise ProtocolViolationError(f"a reply of more than {max_bytes} bytes")
    return bytes(data)


def _tls_context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as exc:
        raise SandboxUsageError(
            f"cert={ca!r} cannot be read: {exc}",
            argument="cert",
            hint="pass the path of a PEM file, or 'sha256:...'",
        ) from exc


def _describe(exc: BaseException) -> str:
    if isinstance(exc, aiohttp.ServerFingerprintMismatch):
        return f"its certificate is sha256:{exc.got.hex()}, not the one that was pinned"
    if isinstance(exc, asyncio.IncompleteReadError):
        return "the reply was truncated"
    if isinstance(exc, aiohttp.ClientConnectorError) and not isinstance(
        exc, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError
    ):
        # Its own text shows the TLS settings as an object.
        return f"cannot connect: {exc.os_error.strerror or exc.os_error}"
    if isinstance(exc, TimeoutError):
        return str(exc) or "no reply in time"
    return str(exc) or type(exc).__name__
