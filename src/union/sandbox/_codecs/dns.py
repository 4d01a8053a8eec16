"""The small part of the DNS message format that a stub resolver's queries need.

The parser is strict: one question, no compression in it, nothing after the records that the
header counts. What it accepts can be answered without looking at the rest of the protocol.
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
_TTL_S: Final = 60


class DnsFormatError(ValueError):
    """These bytes are not a query that can be answered; ``rcode`` says how to refuse it."""

    def __init__(self, message: str, *, rcode: int = FORMERR) -> None:
        super().__init__(message)
        self.rcode = rcode


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question. ``name`` is as it was asked, without the trailing dot; empty for the root."""

    id: int
    flags: int
    name: str
    kind: int
    question: bytes
    edns: bool


def parse_query(data: bytes) -> Query:
    """Read a query.

    Raises:
        DnsFormatError: anything but one ordinary question in the internet class.

    """
    if len(data) < _HEADER.size or len(data) > _MAX_QUERY_BYTES:
        raise DnsFormatError("not the size of a query")
    ident, flags, questions, answers, authorities, additional = _HEADER.unpack_from(data)
    if flags & _RESPONSE:
        raise DnsFormatError("a response")
    if flags & _OPCODE:
        raise DnsFormatError("not a standard query", rcode=NOTIMP)
    if (questions, answers, authorities) != (1, 0, 0) or additional > 1:
        raise DnsFormatError("not exactly one question")
    labels, offset = _read_name(data, _HEADER.size)
    if offset + 4 > len(data):
        raise DnsFormatError("question cut short")
    kind, klass = struct.unpack_from(">HH", data, offset)
    offset += 4
    if klass != _CLASS_IN:
        raise DnsFormatError("not the internet class", rcode=NOTIMP)
    question = data[_HEADER.size : offset]
    if additional:
        offset = _skip_opt(data, offset)
    if offset != len(data):
        raise DnsFormatError("bytes after the end")
    return Query(
        id=ident,
        flags=flags,
        name=".".join(labels),
        kind=kind,
        question=question,
        edns=additional == 1,
    )


def encode_response(
    query: Query, *, rcode: int = NOERROR, records: tuple[bytes, ...] = (), extended_error: str = ""
) -> bytes:
    """Answer with ``records`` (data of the kind that was asked for); ``why`` explains a refusal."""
    body = b"".join(
        # 0xC00C points at the name in the question.
        struct.pack(">HHHIH", 0xC00C, _record_kind(query.kind), _CLASS_IN, _TTL_S, len(record))
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
    """Answer bytes that are no good query; None for what must not be answered at all."""
    if len(data) < _HEADER.size:
        return None
    ident, flags, *_ = _HEADER.unpack_from(data)
    if flags & _RESPONSE:
        # Answering an answer is how two servers come to talk for ever.
        return None
    kept = flags & (_OPCODE | _RECURSION_DESIRED)
    return _HEADER.pack(ident, _RESPONSE | kept | _RECURSION_AVAILABLE | rcode, 0, 0, 0, 0)


def encode_name(name: str) -> bytes:
    """Encode a normalised name, uncompressed."""
    return b"".join(bytes((len(part),)) + part.encode("ascii") for part in name.split(".")) + b"\0"


def _record_kind(kind: int) -> int:
    return A if kind == ANY else kind


def _read_name(data: bytes, offset: int) -> tuple[list[str], int]:
    labels: list[str] = []
    start = offset
    while True:
        if offset >= len(data):
            raise DnsFormatError("name cut short")
        length = data[offset]
        offset += 1
        if length == 0:
            return labels, offset
        if length > 63:
            raise DnsFormatError("compressed or extended label in a question")
        label = data[offset : offset + length]
        offset += length
        if len(label) != length or offset - start >= _MAX_NAME_BYTES:
            raise DnsFormatError("name cut short, or too long")
        # A dot inside a label would read as two labels once the name is text.
        if b"." in label or not all(0x20 < byte < 0x7F for byte in label):
            raise DnsFormatError("label with bytes that no host name has")
        labels.append(label.decode("ascii"))


def _skip_opt(data: bytes, offset: int) -> int:
    if len(data) < offset + 11 or data[offset] != 0:
        raise DnsFormatError("additional record cut short or not OPT")
    kind, _size, _flags, length = struct.unpack_from(">HHIH", data, offset + 1)
    if kind != _OPT:
        raise DnsFormatError("additional record that is not OPT")
    return int(offset + 11 + length)
