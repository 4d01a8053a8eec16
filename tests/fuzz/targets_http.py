"""Fuzz targets for requests and responses of hosts with an ``Http`` entry."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.fuzz.targets_net import LOOP

from union.sandbox._codecs.http1 import HttpFormatError, parse_request_head
from union.sandbox._codecs.scrubber import Scrubber, ScrubTable
from union.sandbox._net.http_exchange import HttpExchange
from union.sandbox._net.interception import Interception
from union.sandbox._net.ledger import Attempt
from union.sandbox._net.stream import EndOfStreamError, HeadTooLongError, Stream
from union.sandbox._policy.credentials import Bearer
from union.sandbox._policy.http_entries import Http, covers, path_problem
from union.sandbox._policy.rules import Verdict
from union.sandbox._policy.secret import Secret
from union.sandbox._policy.stored_secrets import parse_stored
from union.sandbox._wire import frames as wire
from union.sandbox._wire.http_values import decode_entry, encode_entry
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._auth import Grant
from union.sandbox.server._http_entries import SessionEntries

TOKEN = "sk-proj-0123456789abcdefghij"
ENTRY = Http("allowed.test", auth=Bearer(Secret(TOKEN)), allow=["GET /v1/**", "POST /v1/x"])
TABLE = ScrubTable(
    ((TOKEN.encode(), ENTRY.auth.secret.placeholder.encode()),)  # type: ignore[union-attr]
)
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
INTERCEPTION = Interception()
"""Shared: it has no state but budgets, and the entry has none."""
REQUEST = b"GET /v1/x HTTP/1.1\r\nhost: allowed.test\r\n\r\n"


class _Pipe(Stream):
    """A stream that reads given bytes and keeps what is sent."""

    def __init__(self, data: bytes) -> None:
        self._buffer = bytearray(data)
        self.sent = bytearray()
        self.is_readable = False

    async def _receive(self, _size: int) -> bytes:
        return b""

    async def send(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        """Keep everything."""

    abort = close


class _Policy:
    def binding(self, _host: str, _port: int) -> Http:
        return ENTRY


class _Connection:
    """The operations of a connection that an exchange uses."""

    def __init__(self, client: _Pipe) -> None:
        self.stream = client
        self.policy = _Policy()
        self.requests: list[Any] = []
        self.pending_request: Any = None

    def record_request(self, request: Any) -> None:
        self.requests.append(request)

    async def linger(self) -> None:
        """Do not wait."""


class _Exchange(HttpExchange):
    """An exchange whose server is a pipe."""

    def __init__(self, connection: Any, server: _Pipe) -> None:
        attempt = Attempt(frontend="tcp", host=ENTRY.host, port=443)
        attempt.verdict = Verdict(allowed=True, rule="", reason="")
        super().__init__(connection, attempt, ENTRY, INTERCEPTION)
        self._pipe = server

    async def _connect(self) -> Any:
        return self._pipe

    async def run(self) -> None:
        while await self._serve_next():
            pass


def _run(client: bytes, server: bytes) -> tuple[_Pipe, _Pipe, _Connection]:
    async def serve() -> tuple[_Pipe, _Pipe, _Connection]:
        near, far = _Pipe(client), _Pipe(server)
        connection = _Connection(near)
        with contextlib.suppress(EndOfStreamError, HeadTooLongError, OSError, TimeoutError):
            await _Exchange(connection, far).run()
        return near, far, connection

    # An input that hangs is found by the time limit of the fuzzer.
    return LOOP.run_until_complete(serve())


def requests(data: bytes) -> None:
    """Whatever a client sends: the server reads allowed requests with the credential only."""
    _near, far, connection = _run(data, RESPONSE * 64)
    sent = bytes(far.sent)
    allowed = [request for request in connection.requests if request.allowed]
    assert sent.count(b"authorization: Bearer " + TOKEN.encode()) <= len(allowed) + data.count(
        TOKEN.encode()
    )
    head, found, _rest = sent.partition(b"\r\n\r\n")
    if not found:
        return
    parsed = parse_request_head(head + found)
    path = parsed.target.partition("?")[0]
    assert path.startswith("/v1/")
    assert not path_problem(path)
    assert parsed.method == "GET" or (parsed.method, path) == ("POST", "/v1/x")
    assert parsed.values("host") == ["allowed.test"]
    assert parsed.values("authorization") == [f"Bearer {TOKEN}"]
    assert not parsed.values("cookie")


def responses(data: bytes) -> None:
    """Whatever a server sends: the client never receives the secret."""
    near, _far, connection = _run(REQUEST * 3, data.replace(b"<TOKEN>", TOKEN.encode()))
    assert TOKEN.encode() not in near.sent
    assert connection.requests


def scrubbing(data: bytes) -> None:
    """However content is split, the result is the same, of the same length, without a secret."""
    size = 1 + (data[0] % 40 if data else 0)
    content = data[1:].replace(b"<TOKEN>", TOKEN.encode())
    scrubber, out = Scrubber(TABLE), b""
    for at in range(0, len(content), size):
        out += scrubber.feed(content[at : at + size])
    out += scrubber.finish()
    assert len(out) == len(content)
    assert TOKEN.encode() not in out
    with contextlib.suppress(HttpFormatError):
        parse_request_head(data)


STORED = parse_stored(
    {"stored": {"host": "stored.test", "value": TOKEN, "allow": ["GET /v1/**"]}}, argument="x"
)


def _refusal(fields: dict[str, Any], registry: SessionEntries, *, is_private: bool) -> str | None:
    """Return the text and the code of a refusal; None if the entries are accepted."""
    try:
        registry.resolve(fields, Grant(), is_private=is_private)
    except (wire.WireError, SandboxUsageError) as exc:
        return f"{exc} {getattr(exc, 'code', '')}"
    return None


def entries(data: bytes) -> None:
    """Whatever a client sends: no error has a value, and no entry exceeds the operator's."""
    try:
        fields = wire.parse_json(data)
    except wire.WireError:
        return
    registry, wide = SessionEntries(STORED), STORED["stored"].http
    refusal = _refusal(fields, registry, is_private=True)
    if refusal is not None:
        # An error may quote the name of an unknown field, which the client chose.
        assert TOKEN not in refusal or TOKEN.encode() in data
        return
    listed = registry.resolve(fields, Grant(), is_private=True).get("network_allowlist")
    for item in listed if isinstance(listed, list) else ():
        if not isinstance(item, Http):
            continue
        assert item.auth is not wide.auth or covers(wide, item)
        assert TOKEN not in repr(item) or TOKEN.encode() in data
        if item.auth is not None and not item.is_stored:
            again = encode_entry(item, "a" * 32, lambda _: "b" * 32)
            assert decode_entry(again, lambda _: Secret(TOKEN)).allow == item.allow
    refusal = _refusal(fields, registry, is_private=False)
    assert "unencrypted" in refusal if refusal else not fields.get("secrets")
