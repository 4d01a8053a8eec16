"""Serve the connection of a client to a host with an ``Http`` entry, request by request.

TLS of the client ends here. Each request is parsed strictly, decided by the rules of the entry,
given the credential, and sent over verified TLS. The response is scrubbed and streamed back.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.client_hello import TlsFormatError, looks_like_tls, parse_client_hello
from union.sandbox._codecs.http1 import (
    MAX_HEAD_BYTES,
    HttpFormatError,
    encode_head,
    parse_request_head,
)
from union.sandbox._net import http_messages as messages
from union.sandbox._net.dialer import DialError, RefusedError
from union.sandbox._net.http_transfer import ClientBodyError, Transfer, TransferRefusedError
from union.sandbox._net.interception import upstream_context
from union.sandbox._net.stream import EndOfStreamError, HeadTooLongError
from union.sandbox._net.tls_stream import TlsStream
from union.sandbox._policy.credentials import (
    CredentialRefusedError,
    needs_digest,
    put_credential,
)
from union.sandbox._policy.http_entries import RequestVerdict, decide_request
from union.sandbox._policy.http_request import HttpRequest
from union.sandbox._policy.names import NameSyntaxError
from union.sandbox._policy.rules import Verdict, parse_host

if TYPE_CHECKING:
    from union.sandbox._codecs.client_hello import ClientHello
    from union.sandbox._codecs.http1 import RequestHead
    from union.sandbox._net.connection import Connection
    from union.sandbox._net.interception import Interception
    from union.sandbox._net.ledger import Attempt
    from union.sandbox._net.stream import Stream
    from union.sandbox._policy.credentials import Headers
    from union.sandbox._policy.http_entries import Http

__all__ = ["HttpExchange"]

_FIRST_BYTES_TIMEOUT_S: Final = 20.0
_IDLE_TIMEOUT_S: Final = 120.0
_MAX_SIGNED_BODY: Final = 16 * 1024 * 1024
"""Limit on a body that is read whole, because its digest is part of the signature."""
_MAX_SHOWN_PATH: Final = 1024
_MAX_SHOWN_METHOD: Final = 32
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0"
_HTTP2: Final = (
    "the client offers only HTTP/2, and an Http entry serves HTTP/1.1; use an HTTP/1.1 client, or "
    "list the host by name, without a credential"
)


class HttpExchange:
    """One client's connection to the host of an ``Http`` entry.

    Args:
        connection: the client's connection.
        attempt: its record.
        http: the entry.
        interception: the authority and the budgets of the session.

    """

    def __init__(
        self, connection: Connection, attempt: Attempt, http: Http, interception: Interception
    ) -> None:
        self._connection = connection
        self._client: Stream = connection.stream
        self._attempt = attempt
        self._http = http
        self._interception = interception
        self._server: TlsStream | None = None

    async def serve(self) -> None:
        """Serve requests until one side ends. The caller closes the streams.

        Raises:
            RefusedError: the ClientHello names another host, or offers no HTTP/1.1.
            OSError: a side was reset.

        """
        try:
            async with asyncio.timeout(_FIRST_BYTES_TIMEOUT_S):
                hello = await self._read_hello()
            if hello is not None and not await self._begin_tls(hello):
                return
            while await self._serve_next():
                pass
            if isinstance(self._client, TlsStream):
                self._client.finish()
        except TimeoutError:
            return
        except EndOfStreamError:
            # A part of a message is missing: only a reset shows that.
            self._client.abort()
        finally:
            self.close()

    def close(self) -> None:
        """Close the server's connection."""
        if self._server is not None:
            self._server.close()
            self._server = None

    # The client's side.

    async def _read_hello(self) -> ClientHello | None:
        """Return the ClientHello, which stays in the buffer; None for plain HTTP."""
        data = await self._client.read_some()
        try:
            while (is_tls := looks_like_tls(data)) is None:
                data += await self._more()
            hello = None
            while is_tls and (hello := parse_client_hello(data)) is None:
                data += await self._more()
        except TlsFormatError as exc:
            raise RefusedError(
                self._refused(f"the TLS ClientHello is malformed: {exc}", rule="syntax")
            ) from exc
        self._client.unread(data)
        return hello

    async def _more(self) -> bytes:
        data = await self._client.read_some()
        if not data:
            raise EndOfStreamError
        return data

    async def _begin_tls(self, hello: ClientHello) -> bool:
        """Check the ClientHello and perform the handshake; return whether it succeeded."""
        name = hello.server_name
        try:
            is_same = name is None or parse_host(name) == self._http.host
        except NameSyntaxError:
            is_same = False
        if not is_same:
            raise RefusedError(
                self._refused("the TLS server name differs from the host of the connection")
            )
        if hello.protocols and not {"http/1.1", "http/1.0"}.intersection(hello.protocols):
            raise RefusedError(self._refused(_HTTP2))
        tls = TlsStream(self._client, self._interception.server_context(self._http.host))
        try:
            await tls.handshake()
        except (ssl.SSLError, EndOfStreamError, ConnectionError) as exc:
            reason = getattr(exc, "reason", "") or "the client disconnected"
            self._attempt.error = (
                f"TLS with the client failed ({reason}): the client must trust the file that "
                "SSL_CERT_FILE names inside, and not pin a certificate"
            )
            return False
        self._client = tls
        return True

    def _refused(self, reason: str, *, rule: str = "") -> Verdict:
        return Verdict(allowed=False, rule=rule or self._http.text, reason=reason)

    async def _serve_next(self) -> bool:
        """Serve one request; return whether another may follow."""
        async with asyncio.timeout(_IDLE_TIMEOUT_S):
            try:
                data = await self._client.read_head(MAX_HEAD_BYTES)
            except HeadTooLongError:
                await self._respond(431, "the request head is larger than 64 KiB")
                return False
        if not data:
            return False
        if data.startswith(_HTTP2_PREFACE):
            self._attempt.error = _HTTP2
            return False
        try:
            head = parse_request_head(data)
        except HttpFormatError as exc:
            self._record_malformed(str(exc))
            await self._respond(400, f"malformed request: {exc}")
            return False
        return await self.forward(head, head.target)

    def _record_malformed(self, reason: str) -> None:
        self._connection.record_request(
            HttpRequest(
                time=time.time(),
                method="",
                host=self._http.host,
                path="",
                allowed=False,
                reason=f"malformed request: {reason}",
            )
        )

    async def _respond(self, status: int, text: str) -> None:
        """Send a response of this process itself, and let the client read it."""
        await self._client.send(messages.refusal(status, text))
        if isinstance(self._client, TlsStream):
            self._client.finish()
        await self._connection.linger()

    # One request.

    async def forward(self, head: RequestHead, target: str) -> bool:
        """Decide about one request and forward it; return whether another may follow.

        Args:
            head: the parsed head.
            target: the path with the query.

        Raises:
            EndOfStreamError: a side ended in the middle of a message.
            OSError: a side was reset.

        """
        transfer = Transfer(
            self._client,
            self._attempt,
            self._http,
            self._interception.spent(self._http),
            self._interception.scrub_table(self._http),
        )
        record = _RequestRecord(self._connection, self._http.host, head, target, transfer)
        self._connection.pending_request = record.finish
        try:
            length = messages.check_request(head, target, self._http)
            record.verdict = self._decide(head, target, length)
            if not record.verdict.allowed:
                return await self._refuse(record)
            return await self._exchange(head, target, length, transfer)
        except (HttpFormatError, CredentialRefusedError) as exc:
            record.verdict = RequestVerdict(allowed=False, reason=str(exc))
            status = 400 if isinstance(exc, HttpFormatError) else 403
            return await self._refuse(record, status=status)
        except RefusedError as exc:
            record.verdict = RequestVerdict(
                allowed=False, reason=exc.verdict.reason, suggestion=exc.verdict.suggestion
            )
            return await self._refuse(record)
        except (DialError, ClientBodyError, TransferRefusedError) as exc:
            record.error = str(exc)
            record.finish()
            return await self._fail(exc, transfer)
        except (EndOfStreamError, OSError) as exc:
            record.error = str(exc) or "the connection ended before the end of the response"
            raise
        finally:
            record.finish()
            self._connection.pending_request = None

    async def _fail(self, exc: Exception, transfer: Transfer) -> bool:
        """Report an allowed request that failed, unless its response has begun."""
        if transfer.has_begun:
            raise EndOfStreamError from exc
        status = 502
        if isinstance(exc, ClientBodyError | TransferRefusedError):
            status = exc.status
        await self._respond(status, f"the request is allowed, but it failed: {exc}")
        return False

    async def _refuse(self, record: _RequestRecord, *, status: int = 403) -> bool:
        """Record a refusal before the client knows of it, and respond; no request may follow."""
        record.finish()
        text = f"refused by the sandbox's network policy: {record.verdict.reason}"
        if record.verdict.suggestion:
            text += f"\nrule that would allow it: {record.verdict.suggestion}"
        await self._respond(status, text)
        return False

    def _decide(self, head: RequestHead, target: str, length: int | str | None) -> RequestVerdict:
        """Decide by the rules and the budgets of the entry; count an allowed request."""
        http = self._http
        path, _, query = target.partition("?")
        verdict = decide_request(http, head.method, path)
        if not verdict.allowed:
            return verdict
        if self._connection.policy.binding(http.host, http.port) is not http:
            return RequestVerdict(allowed=False, reason="the network policy changed")
        problem = messages.query_problem(query, http)
        spent = self._interception.spent(http)
        known = length if isinstance(length, int) else 0
        # Once the budget for responses is used up, no request is sent.
        problem = problem or spent.exceeded(requests=1, up=known, down=1)
        if problem:
            return RequestVerdict(allowed=False, reason=problem)
        spent.add(requests=1)
        return verdict

    async def _exchange(
        self, head: RequestHead, target: str, length: int | str | None, transfer: Transfer
    ) -> bool:
        http = self._http
        fields = messages.request_fields(head, http, is_scrubbed=transfer.table is not None)
        if not needs_digest(http.auth, fields):
            return await self._send(head, target, fields, length, transfer)
        async with self._interception.buffering:
            body = await self._whole_body(length, transfer)
            return await self._send(head, target, fields, None, transfer, body=body)

    async def _send(
        self,
        head: RequestHead,
        target: str,
        fields: Headers,
        length: int | str | None,
        transfer: Transfer,
        *,
        body: bytes | None = None,
    ) -> bool:
        """Put the credential in and forward both ways; ``body``: it was read whole."""
        http = self._http
        is_websocket = messages.requests_websocket(head, http)
        if http.auth is not None:
            digest = None if body is None else hashlib.sha256(body).hexdigest()
            target, fields = put_credential(http.auth, head.method, target, fields, digest)
        framing: Headers = (("transfer-encoding", "chunked"),) if length == "chunked" else ()
        if is_websocket:
            framing = (("connection", "Upgrade"), ("upgrade", "websocket"))
        data = encode_head(f"{head.method} {target} HTTP/1.1", (*fields, *framing))
        server = await self._connect()
        transfer.has_credential = http.auth is not None
        if body is not None:
            transfer.count_up(len(body))
            data += body
        try:
            keeps = await transfer.run(server, head, data, length, is_websocket=is_websocket)
        except (EndOfStreamError, HeadTooLongError, HttpFormatError, OSError) as exc:
            self.close()
            if transfer.has_begun or self._attempt.is_revoked:
                raise EndOfStreamError from exc
            raise self._dial_error("the server sent no valid HTTP response") from exc
        except BaseException:
            self.close()
            raise
        if not keeps.server:
            self.close()
        return keeps.client

    async def _whole_body(self, length: int | str | None, transfer: Transfer) -> bytes:
        if isinstance(length, str) or (length or 0) > _MAX_SIGNED_BODY:
            raise CredentialRefusedError(
                f"the body must have a Content-Length of at most {_MAX_SIGNED_BODY} bytes, because "
                "its digest is part of the signature"
            )
        return await transfer.read_body(length or 0)

    def _dial_error(self, text: str) -> DialError:
        self._attempt.error = text
        verdict = self._attempt.verdict
        if verdict is None:
            raise AssertionError("a request was sent before the policy decided about it")
        return DialError(text, verdict=verdict)

    async def _connect(self) -> TlsStream:
        """Return the connection to the server, kept from the previous request if it still is."""
        if self._server is not None and not self._server.is_readable:
            return self._server
        self.close()
        outbound = await self._connection.dial(self._attempt)
        server = TlsStream(outbound.stream, upstream_context(), server_hostname=self._http.host)
        try:
            await server.handshake()
        except ssl.SSLCertVerificationError as exc:
            raise self._dial_error(
                f"the server's certificate was not accepted: {exc.verify_message}"
            ) from exc
        except (ssl.SSLError, EndOfStreamError, OSError) as exc:
            raise self._dial_error(f"TLS with the server failed: {_reason(exc)}") from exc
        self._server = server
        return server


class _RequestRecord:
    """The record of a request in progress; ``finish`` reports it once."""

    def __init__(
        self, connection: Connection, host: str, head: RequestHead, target: str, transfer: Transfer
    ) -> None:
        self.verdict = RequestVerdict(allowed=False, reason="the request was not decided")
        self.error = ""
        self._connection = connection
        self._host = host
        self._method = head.method[:_MAX_SHOWN_METHOD]
        self._path = target.partition("?")[0][:_MAX_SHOWN_PATH]
        self._transfer = transfer
        self._started, self._time = time.monotonic(), time.time()
        self._is_finished = False

    def finish(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        transfer = self._transfer
        self._connection.record_request(
            HttpRequest(
                time=self._time,
                method=self._method,
                host=self._host,
                path=self._path,
                allowed=self.verdict.allowed,
                reason=self.verdict.reason,
                suggestion=self.verdict.suggestion,
                status=transfer.status,
                error=self.error,
                has_credential=transfer.has_credential,
                bytes_up=transfer.bytes_up,
                bytes_down=transfer.bytes_down,
                duration_ms=(time.monotonic() - self._started) * 1000,
            )
        )


def _reason(exc: BaseException) -> str:
    return str(getattr(exc, "reason", None) or str(exc) or type(exc).__name__)
