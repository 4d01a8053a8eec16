"""Build the heads of intercepted requests and responses. No input or output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_plus

from union.sandbox._codecs.http1 import (
    HttpFormatError,
    body_length,
    encode_head,
    forwarded_headers,
    split_authority,
)
from union.sandbox._policy.credentials import Headers, SigV4, is_identity_header
from union.sandbox._policy.names import NameSyntaxError
from union.sandbox._policy.rules import parse_host

if TYPE_CHECKING:
    from union.sandbox._codecs.http1 import RequestHead, ResponseHead
    from union.sandbox._policy.http_entries import Http

__all__ = [
    "authority",
    "check_request",
    "client_keeps_alive",
    "is_compressed",
    "refusal",
    "request_fields",
    "requests_websocket",
    "response_head",
    "server_keeps_alive",
]

_OVERRIDES: Final = frozenset(
    {
        "forwarded",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
        "x-original-url",
        "x-rewrite-url",
        "x-override-url",
        "x-host",
        "max-forwards",
    }
)
"""Headers by which some servers replace the method, the path or the host that was checked."""
_PARTIAL: Final = frozenset({"range", "if-range", "accept-encoding", "sec-websocket-extensions"})
"""Headers that make a server split or compress its response: a secret would not be found."""
_METHOD_PARAMETER: Final = "_method"
_REASONS: Final = {
    400: "Bad Request",
    403: "Forbidden",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
}


def authority(http: Http) -> str:
    """Return the Host header for the server."""
    return http.place


def check_request(head: RequestHead, target: str, http: Http) -> int | str | None:
    """Check that the request names this host once and has one length; return the length.

    Raises:
        HttpFormatError: it does not.

    """
    hosts = head.values("host")
    if len(hosts) != 1:
        raise HttpFormatError(f"expected exactly one Host header, got {len(hosts)}")
    name, port = split_authority(hosts[0], default_port=http.port)
    try:
        is_same = name == http.host or parse_host(name) == http.host
    except NameSyntaxError as exc:
        raise HttpFormatError(f"the Host header {exc}") from exc
    if not is_same or port not in {http.port, 80}:
        raise HttpFormatError("the Host header differs from the host of the connection")
    if not target.startswith("/") or "#" in target:
        raise HttpFormatError("the request target is not a path")
    return body_length(head.headers, minor=head.minor)


def query_problem(query: str, http: Http) -> str:
    """Return why a query may change what the rules decided; empty otherwise."""
    if http.rules is None:
        return ""
    for pair in re.split("[&;]", query):
        if unquote_plus(pair.partition("=")[0]).lower() == _METHOD_PARAMETER:
            return "the query parameter _method can replace the method of the request"
    return ""


def requests_websocket(head: RequestHead, http: Http) -> bool:
    """Return whether the request asks for an upgrade that the entry allows."""
    options = [token.strip().lower() for v in head.values("connection") for token in v.split(",")]
    return (
        http.websockets
        and head.method == "GET"
        and head.minor == 1
        and "upgrade" in options
        and [value.lower() for value in head.values("upgrade")] == ["websocket"]
    )


def request_fields(head: RequestHead, http: Http, *, is_scrubbed: bool) -> Headers:
    """Return the fields for the server, before the credential is put in."""
    fields = []
    for name, value in forwarded_headers(head.headers):
        plain = name.replace("_", "-")
        if plain == "host" or plain in _OVERRIDES or plain.startswith("x-forwarded-"):
            continue
        if name != plain and plain in {"content-length", "transfer-encoding"}:
            continue
        if is_scrubbed and plain in _PARTIAL:
            continue
        if http.auth is not None and is_identity_header(name) and not _is_signature(http, name):
            continue
        fields.append((name, value))
    if is_scrubbed:
        fields.append(("accept-encoding", "identity"))
    return (("host", authority(http)), *fields)


def _is_signature(http: Http, name: str) -> bool:
    return isinstance(http.auth, SigV4) and name in {"authorization", "x-amz-security-token"}


def is_compressed(head: ResponseHead) -> bool:
    """Return whether the body is encoded, so that a secret in it would not be found."""
    return any(
        token.strip().lower() not in {"", "identity"}
        for name, value in head.headers
        if name == "content-encoding"
        for token in value.split(",")
    )


def response_head(
    head: ResponseHead, http: Http, *, chunked: bool, close: bool, is_upgrade: bool = False
) -> bytes:
    """Encode the head of a response for the client."""
    fields = [
        (name, value)
        for name, value in forwarded_headers(head.headers)
        # Another protocol would bypass the entry. Cookies are credentials of the account.
        if name != "alt-svc" and not (name == "set-cookie" and http.auth is not None)
    ]
    if is_upgrade:
        fields += [("connection", "Upgrade"), ("upgrade", "websocket")]
    elif chunked:
        fields.append(("transfer-encoding", "chunked"))
    if close:
        fields.append(("connection", "close"))
    return encode_head(f"HTTP/1.1 {head.status} {head.reason}", tuple(fields))


def refusal(status: int, text: str) -> bytes:
    """Encode a response of this process itself."""
    body = (text + "\n").encode("utf-8", "replace")
    fields = (
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", str(len(body))),
        ("connection", "close"),
    )
    return encode_head(f"HTTP/1.1 {status} {_REASONS[status]}", fields) + body


def client_keeps_alive(head: RequestHead) -> bool:
    """Return whether the client may send another request on its connection."""
    options = " ".join(
        value.lower() for key, value in head.headers if key in {"connection", "proxy-connection"}
    )
    return head.minor == 1 and "close" not in options


def server_keeps_alive(head: ResponseHead) -> bool:
    """Return whether the server accepts another request on its connection."""
    options = " ".join(value.lower() for key, value in head.headers if key == "connection")
    return head.minor == 1 and "close" not in options
