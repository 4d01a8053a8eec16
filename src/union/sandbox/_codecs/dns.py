"""The part of the DNS message format that a stub resolver needs.

The parser is strict: one question without compression, and nothing after the records that the
header counts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

__all__ = [
    "AAAA",
    "ANY",
    "FORMERR",
    "NOERROR",
    "NOTIMP",
    "NXDOMAIN",
    "PTR",
    "SERVFAIL",
    "A",
    "DnsFormatError",
    "Query",
    "encode_error_response",
    "encode_name",
    "encode_response",
    "parse_query",
]

A: Final = 1
PTR: Final = 12
AAAA: Final = 28
ANY: Final = 255
NOERROR: Final = 0
FORMERR: Final = 1
SERVFAIL: Final = 2
NXDOMAIN: Final = 3
NOTIMP: Final = 4

_HEADER: Final = struct.Struct(">HHHHHH")
_CLASS_IN: Final = 1
_OPT: Final = 41
_RESPONSE: Final = 0x8000
_RECURSION_DESIRED: Final = 0x0100
_RECURSION_AVAILABLE: Final = 0x0080
_CHECKING_DISABLED: Final = 0x0010
_OPCODE: Final = 0x7800
_EXTENDED_ERROR: Final = 15
_PROHIBITED: Final = 18
_EDNS_SIZE: Final = 1232
_MAX_NAME_BYTES: Final = 255
_MAX_QUERY_BYTES: Final = 4096
TTL_S: Final = 60


class DnsFormatError(ValueError):
    """The message is not a supported query; ``rcode`` is the response code for it."""

    def __init__(self, message: str, *, rcode: int = FORMERR) -> None:
        super().__init__(message)
        self.rcode = rcode


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question. ``name`` keeps its case and has no trailing dot; empty for the root."""

    id: int
    flags: int
    name: str
    kind: int
    question: bytes
    edns: bool


def parse_query(data: bytes) -> Query:
    """Parse a query.

    Raises:
        DnsFormatError: the message is not a standard query with one question of class IN.

    """
    if len(data) < _HEADER.size or len(data) > _MAX_QUERY_BYTES:
        raise DnsFormatError(
            f"message of {len(data)} bytes, expected {_HEADER.size} to {_MAX_QUERY_BYTES}"
        )
    ident, flags, questions, answers, authorities, additional = _HEADER.unpack_from(data)
    if flags & _RESPONSE:
        raise DnsFormatError("the message is a response, expected a query")
    if flags & _OPCODE:
        raise DnsFormatError("the opcode is not a standard query", rcode=NOTIMP)
    if (questions, answers, authorities) != (1, 0, 0) or additional > 1:
        raise DnsFormatError("the message does not have exactly one question")
    labels, offset = _read_name(data, _HEADER.size)
    if offset + 4 > len(data):
        raise DnsFormatError("truncated question")
    kind, klass = struct.unpack_from(">HH", data, offset)
    offset += 4
    if klass != _CLASS_IN:
        raise DnsFormatError(f"class {klass}, expected {_CLASS_IN} (IN)", rcode=NOTIMP)
    question = data[_HEADER.size : offset]
    if additional:
        offset = _skip_opt(data, offset)
    if offset != len(data):
        raise DnsFormatError("bytes after the end of the message")
    return Query(
        id=ident,
        flags=flags,
        name=".".join(labels),
        kind=kind,
        question=question,
        edns=additional == 1,
    )


def encode_response(
    query: Query,
    *,
    rcode: int = NOERROR,
    records: tuple[bytes, ...] = (),
    extended_error: str = "",
    ttl_s: int = TTL_S,
) -> bytes:
    """Encode a response with ``records`` (data of the requested type).

    Args:
        query: the query to respond to.
        rcode: response code. Default: NOERROR.
        records: record data of the requested type. Default: none.
        extended_error: text of an Extended DNS Error (RFC 8914), sent if the client supports
            EDNS. Default: none.
        ttl_s: how long the client may cache the records. Default: 60 s.

    """
    body = b"".join(
        # 0xC00C points at the name in the question.
        struct.pack(">HHHIH", 0xC00C, _record_kind(query.kind), _CLASS_IN, ttl_s, len(record))
        + record
        for record in records
    )
    opt = b""
    if query.edns:
        option = b""
        if extended_error:
            text = extended_error.encode("utf-8", "replace")[:200]
            option = struct.pack(">HHH", _EXTENDED_ERROR, 2 + len(text), _PROHIBITED) + text
        opt = struct.pack(">BHHIH", 0, _OPT, _EDNS_SIZE, 0, len(option)) + option
    flags = (
        _RESPONSE
        | (query.flags & (_RECURSION_DESIRED | _CHECKING_DISABLED))
        | _RECURSION_AVAILABLE
        | rcode
    )
    header = _HEADER.pack(query.id, flags, 1, len(records), 0, 1 if opt else 0)
    return header + query.question + body + opt


def encode_error_response(data: bytes, rcode: int) -> bytes | None:
    """Encode the response to a malformed query; None if there must be no response."""
    if len(data) < _HEADER.size:
        return None
    ident, flags, *_ = _HEADER.unpack_from(data)
    if flags & _RESPONSE:
        # Responding to a response could make two servers loop forever.
        return None
    kept = flags & (_OPCODE | _RECURSION_DESIRED)
    return _HEADER.pack(ident, _RESPONSE | kept | _RECURSION_AVAILABLE | rcode, 0, 0, 0, 0)


def encode_name(name: str) -> bytes:
    """Encode a normalised name without compression."""
    return b"".join(bytes((len(part),)) + part.encode("ascii") for part in name.split(".")) + b"\0"


def _record_kind(kind: int) -> int:
    return A if kind == ANY else kind


def _read_name(data: bytes, offset: int) -> tuple[list[str], int]:
    labels: list[str] = []
    start = offset
    while True:
        if offset >= len(data):
            raise DnsFormatError("truncated name")
        length = data[offset]
        offset += 1
        if length == 0:
            return labels, offset
        if length > 63:
            raise DnsFormatError("compressed or extended label in a question")
        label = data[offset : offset + length]
        offset += length
        if len(label) != length or offset - start >= _MAX_NAME_BYTES:
            raise DnsFormatError(f"truncated name, or longer than {_MAX_NAME_BYTES} bytes")
        # A dot inside a label would look like two labels in the text form of the name.
        if b"." in label or not all(0x20 < byte < 0x7F for byte in label):
            raise DnsFormatError("label with a byte that is not allowed in host names")
        labels.append(label.decode("ascii"))


def _skip_opt(data: bytes, offset: int) -> int:
    if len(data) < offset + 11 or data[offset] != 0:
        raise DnsFormatError("truncated additional record, or not OPT")
    kind, _size, _flags, length = struct.unpack_from(">HHIH", data, offset + 1)
    if kind != _OPT:
        raise DnsFormatError(f"additional record of type {kind}, expected {_OPT} (OPT)")
    return int(offset + 11 + length)
