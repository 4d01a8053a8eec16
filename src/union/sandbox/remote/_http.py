"""Requests to a server: sent with the token, answered or turned into the error that was told."""

from __future__ import annotations

import asyncio
import ssl
import sys
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote_from_bytes

import aiohttp
from yarl import URL

from union.sandbox._core.wire import MAX_MESSAGE, PROTOCOL, WireError, parse_json, to_json
from union.sandbox._core.wire_errors import error_from
from union.sandbox.errors import SandboxConnectionError, SandboxError, SandboxUsageError
from union.sandbox.remote._upload import LAST, PIECE, Upload, finished
from union.sandbox.remote._websocket import WebSocket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from union.sandbox._core.endpoint import Endpoint

__all__ = ["Http"]

_CONNECT_S: Final = 10.0
_MOST_ANSWER: Final = 64 * 1024 * 1024
_GIVE_UP_S: Final = 10.0
_MOST_PIECE: Final = 16 * 1024 * 1024
_HEARTBEAT_S: Final = 10.0
_FORGETS_TLS: Final = sys.version_info < (3, 12, 7) or sys.version_info[:3] == (3, 13, 0)
"""Whether this Python leaves a TLS connection open that was closed while the other side was too."""
_GOODBYE_S: Final = 2.0
"""How long a server may take to answer that a connection ends."""
_NOT_SENT: Final = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.ServerFingerprintMismatch,
)


class Http:
    """One server, for one event loop. Owns its connections."""

    def __init__(self, endpoint: Endpoint, *, token: str | None, ca: str | None) -> None:
        self.endpoint = endpoint
        connector: aiohttp.BaseConnector
        if endpoint.socket is not None:
            connector = aiohttp.UnixConnector(endpoint.socket, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, enable_cleanup_closed=_FORGETS_TLS)
        self._ssl: Any = True
        if endpoint.fingerprint is not None:
            self._ssl = aiohttp.Fingerprint(endpoint.fingerprint)
        elif ca is not None:
            self._ssl = _trusting(ca)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_connect=_CONNECT_S),
            read_bufsize=1024 * 1024,
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

    def lost(self, exc: BaseException) -> SandboxConnectionError:
        """What a failed exchange is to the caller."""
        sent = not isinstance(exc, _NOT_SENT)
        hint, code = "", "connection"
        if isinstance(exc, aiohttp.ServerFingerprintMismatch):
            code, hint = "certificate", "this is not the server whose certificate was pinned"
        elif isinstance(exc, aiohttp.ClientConnectorCertificateError):
            code, hint = "certificate", "pass cert='sha256:...' with the server's fingerprint"
        elif not sent:
            hint = "is the server running, and is this its address?"
        return SandboxConnectionError(
            f"{self.endpoint}: {_words(exc)}",
            endpoint=str(self.endpoint),
            sent=sent,
            code=code,
            hint=hint,
        )

    async def call(
        self, method: str, path: str, told: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One request and its whole answer."""
        body = None if told is None else to_json(told)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self._url(path), data=body, headers=headers, ssl=self._ssl
            ) as response:
                return await self._answer(response)
        except SandboxError:
            raise  # some of ours are OSErrors too
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self.lost(exc) from exc

    async def _answer(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > _MOST_ANSWER:
                raise aiohttp.ClientPayloadError("an answer without end")
        try:
            told = parse_json(bytes(data), most=_MOST_ANSWER)
        except WireError as exc:
            raise aiohttp.ClientPayloadError(
                f"status {response.status}, and an answer that is not of this protocol"
            ) from exc
        if isinstance(error := told.get("error"), dict):
            raise error_from(error)
        return told

    async def connect(self, session: str) -> WebSocket:
        """The connection that carries the runs of one session."""
        try:
            return WebSocket(
                await self._session.ws_connect(
                    self._url(f"sessions/{session}/connect"),
                    protocols=(PROTOCOL,),
                    max_msg_size=MAX_MESSAGE,
                    heartbeat=_HEARTBEAT_S,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_GOODBYE_S),
                    ssl=self._ssl,
                )
            )
        except aiohttp.WSServerHandshakeError as exc:
            # The refusal's reason is not in the handshake; a plain request tells it.
            await self.call("GET", f"sessions/{session}")
            raise self.lost(exc) from exc
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self.lost(exc) from exc

    # Files.

    async def store(
        self,
        session: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        mode: int,
        overwrite: bool,
    ) -> int:
        """PUT: pieces become a file. What ``chunks`` raises comes out as it is.

        Then, and if this is cancelled, the server is told to give the file up, and has done so when
        this returns.
        """
        query = {"path": path, "mode": f"{mode:o}", "overwrite": str(int(overwrite)), "framed": "1"}
        body = Upload(chunks)
        sending = asyncio.get_running_loop().create_task(
            self._put(self._url(f"sessions/{session}/file", query), body)
        )
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            body.give_up()
            await finished(sending, within_s=_GIVE_UP_S)
            raise
        except SandboxError:
            if body.fault is not None:
                raise body.fault from None
            raise

    async def _put(self, url: URL, body: Upload) -> int:
        headers = {"Content-Type": "application/octet-stream"}
        try:
            async with self._session.put(
                url, data=body.pieces(), headers=headers, ssl=self._ssl
            ) as response:
                told = await self._answer(response)
        except SandboxError:
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self.lost(exc) from exc
        found = told.get("size")
        if not isinstance(found, int):
            raise self.lost(aiohttp.ClientPayloadError("no size in the answer"))
        return found

    async def fetch(
        self, session: str, path: str, *, max_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """GET: a file in pieces; that it was the last one is said, not guessed."""
        query = {"path": path, "max_bytes": str(max_bytes), "framed": "1"}
        try:
            async with self._session.get(
                self._url(f"sessions/{session}/file", query), ssl=self._ssl
            ) as response:
                if response.status != 200:
                    await self._answer(response)
                    raise aiohttp.ClientPayloadError(f"status {response.status}")
                while True:
                    (size,) = PIECE.unpack(await response.content.readexactly(PIECE.size))
                    if size == LAST:
                        break
                    if size > _MOST_PIECE:
                        raise aiohttp.ClientPayloadError(f"a piece of {size} bytes")
                    yield await response.content.readexactly(size)
                outcome = parse_json(await response.content.read(), most=1024 * 1024)
        except SandboxError:
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise self.lost(exc) from exc
        except (asyncio.IncompleteReadError, WireError) as exc:
            raise self.lost(exc) from exc
        if isinstance(error := outcome.get("error"), dict):
            raise error_from(error)

    async def close(self) -> None:
        await self._session.close()


def _trusting(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as exc:
        raise SandboxUsageError(f"cert={ca!r} cannot be read: {exc}", argument="cert") from exc


def _words(exc: BaseException) -> str:
    if isinstance(exc, aiohttp.ServerFingerprintMismatch):
        return f"its certificate is sha256:{exc.got.hex()}, not the one that was pinned"
    if isinstance(exc, asyncio.IncompleteReadError):
        return "the answer was cut off"
    return str(exc) or type(exc).__name__
