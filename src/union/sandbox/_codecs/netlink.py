"""Netlink messages that set up a network namespace whose only ways out are our listeners.

This module sends nothing: the messages are encoded in advance, and the launcher sends them in
order inside the new namespace without parsing them. Their effects:

1. loopback is brought up;
2. every IPv4 and every IPv6 address becomes a *local* address of the namespace, so that a
   connection to any destination is delivered to the namespace itself instead of failing for want
   of a route. There is no other interface: nothing can leave, whatever the rules below say.
   UDP to any address meets no socket and fails at once with "connection refused";
3. one nat rule per address family sends every outgoing TCP connection that is not for loopback to
   the transparent listener, on 127.0.0.1 or ::1. The original destination stays readable there
   (``SO_ORIGINAL_DST``).

Numbers are the kernel's own, from its uapi headers; netlink itself is in host byte order, and the
values inside nf_tables attributes are big-endian.
"""

from __future__ import annotations

import functools
import struct
from typing import Final, NamedTuple

__all__ = [
    "NETLINK_NETFILTER",
    "NETLINK_ROUTE",
    "NetlinkStep",
    "egress_setup",
    "encode_route_query",
    "half_routes",
    "is_local_route",
    "loopback_setup",
]

NETLINK_ROUTE: Final = 0
NETLINK_NETFILTER: Final = 12

_F_REQUEST: Final = 0x001
_F_ACK: Final = 0x004
_F_REPLACE: Final = 0x100
_F_CREATE: Final = 0x400
_F_APPEND: Final = 0x800

_RTM_NEWLINK: Final = 16
_RTM_NEWROUTE: Final = 24
_RTM_GETROUTE: Final = 26
_NLMSG_ERROR: Final = 2
_IFF_UP: Final = 1
_LOOPBACK_INDEX: Final = 1
"""The first interface of every network namespace is its loopback."""

_AF_UNSPEC: Final = 0
_AF_INET: Final = 2
_AF_INET6: Final = 10

_RT_TABLE_MAIN: Final = 254
_RT_TABLE_LOCAL: Final = 255
_RTPROT_STATIC: Final = 4
_RT_SCOPE_LINK: Final = 253
_RT_SCOPE_HOST: Final = 254
_RTN_UNICAST: Final = 1
_RTN_LOCAL: Final = 2
_HEADER: Final = 16
_NO_ROUTE: Final = frozenset({101, 113})
"""ENETUNREACH, EHOSTUNREACH."""
_RTA_DST: Final = 1
_RTA_OIF: Final = 4

_NFNL_SUBSYS_NFTABLES: Final = 10
_BATCH_BEGIN: Final = 0x10
_BATCH_END: Final = 0x11
_NFT_NEWTABLE: Final = 0
_NFT_NEWCHAIN: Final = 3
_NFT_NEWRULE: Final = 6
_NFPROTO_IPV4: Final = 2
_NFPROTO_IPV6: Final = 10
_NF_INET_LOCAL_OUT: Final = 3
_NAT_OUTPUT_PRIORITY: Final = -100
_NESTED: Final = 0x8000
_REGISTER: Final = 1
_META_L4PROTO: Final = 16
_NETWORK_HEADER: Final = 1
_CMP_EQ: Final = 0
_CMP_NEQ: Final = 1
_IPPROTO_TCP: Final = 6

_TABLE: Final = b"sandbox\0"
_CHAIN: Final = b"egress\0"


class NetlinkStep(NamedTuple):
    """One datagram to send on a raw netlink socket of ``protocol``, and its acknowledgements.

    The kernel replies with ``acks`` messages of type ``NLMSG_ERROR``; each must carry error 0. Any
    other number is a negated errno and means that the step had no effect (a netfilter step is one
    transaction). After an error, do not wait for the remaining acknowledgements.
    """

    protocol: int
    data: bytes
    acks: int
    description: str


@functools.cache
def loopback_setup() -> tuple[NetlinkStep, ...]:
    """Return the step that brings loopback up, for a namespace without a way out."""
    body = struct.pack("=BxHiII", _AF_UNSPEC, 0, _LOOPBACK_INDEX, _IFF_UP, _IFF_UP)
    return (
        NetlinkStep(
            description="loopback up",
            protocol=NETLINK_ROUTE,
            data=_message(_RTM_NEWLINK, _F_REQUEST | _F_ACK, 1, body),
            acks=1,
        ),
    )


def egress_setup(
    transparent_port: int, *, ipv6: bool = True, redirect: bool = True
) -> tuple[NetlinkStep, ...]:
    """Return the steps that redirect every TCP connection to ``transparent_port``.

    The steps require ``CAP_NET_ADMIN`` over the namespace.

    Args:
        transparent_port: port of the transparent listener, 1 to 65535.
        ipv6: whether to configure IPv6. Default True; False for a kernel without IPv6.
        redirect: whether to redirect connections. Default True; False for a kernel without
            nf_tables: only loopback is brought up, so that only the proxies work.

    Raises:
        ValueError: the port is out of range.

    """
    if not 1 <= transparent_port <= 65535:
        raise ValueError(f"transparent_port must be 1..65535, got {transparent_port!r}")
    steps = list(loopback_setup())
    if not redirect:
        return tuple(steps)
    families = [("IPv4", _AF_INET, _NFPROTO_IPV4)]
    if ipv6:
        families.append(("IPv6", _AF_INET6, _NFPROTO_IPV6))
    for label, family, protocol in families:
        # The rule is added before the route, so that at no time a connection can be delivered
        # to the namespace itself.
        steps.append(_redirect_step(label, protocol, transparent_port))
        steps.append(_local_route_step(label, family))
    return tuple(steps)


def half_routes() -> tuple[NetlinkStep, ...]:
    """Return routes of every IPv4 address to loopback, in two halves.

    For gVisor, which accepts no default route without a gateway.
    """
    steps = []
    for first in (0, 128):
        body = struct.pack(
            "=BBBBBBBBI",
            _AF_INET,
            1,
            0,
            0,
            _RT_TABLE_MAIN,
            _RTPROT_STATIC,
            _RT_SCOPE_LINK,
            _RTN_UNICAST,
            0,
        )
        body += _attribute(_RTA_DST, bytes((first, 0, 0, 0)))
        body += _attribute(_RTA_OIF, struct.pack("=I", _LOOPBACK_INDEX))
        steps.append(
            NetlinkStep(
                description=f"IPv4 route of {first}.0.0.0/1 to loopback",
                protocol=NETLINK_ROUTE,
                data=_message(_RTM_NEWROUTE, _F_REQUEST | _F_ACK | _F_CREATE, 1, body),
                acks=1,
            )
        )
    return tuple(steps)


def _local_route_step(label: str, family: int) -> NetlinkStep:
    # Prefix length 0 in the local table makes every address local.
    body = struct.pack(
        "=BBBBBBBBI",
        family,
        0,
        0,
        0,
        _RT_TABLE_LOCAL,
        _RTPROT_STATIC,
        _RT_SCOPE_HOST,
        _RTN_LOCAL,
        0,
    ) + _attribute(_RTA_OIF, struct.pack("=I", _LOOPBACK_INDEX))
    flags = _F_REQUEST | _F_ACK | _F_CREATE | _F_REPLACE
    return NetlinkStep(
        description=f"{label} local route for all addresses",
        protocol=NETLINK_ROUTE,
        data=_message(_RTM_NEWROUTE, flags, 1, body),
        acks=1,
    )


def _redirect_step(label: str, family: int, port: int) -> NetlinkStep:
    table = _attribute(1, _TABLE)
    hook = _nested(
        4,
        _attribute(1, struct.pack(">I", _NF_INET_LOCAL_OUT)),
        _attribute(2, struct.pack(">i", _NAT_OUTPUT_PRIORITY)),
    )
    chain = _attribute(1, _TABLE) + _attribute(3, _CHAIN) + hook + _attribute(7, b"nat\0")
    rule = (
        _attribute(1, _TABLE)
        + _attribute(2, _CHAIN)
        + _nested(4, *(_nested(1, expression) for expression in _redirect_rule(family, port)))
    )
    create = _F_REQUEST | _F_ACK | _F_CREATE
    data = b"".join(
        (
            _nft_message(
                _BATCH_BEGIN, _F_REQUEST, 1, _AF_UNSPEC, b"", resource=_NFNL_SUBSYS_NFTABLES
            ),
            _nft_message(_nft(_NFT_NEWTABLE), create, 2, family, table),
            _nft_message(_nft(_NFT_NEWCHAIN), create, 3, family, chain),
            _nft_message(_nft(_NFT_NEWRULE), create | _F_APPEND, 4, family, rule),
            _nft_message(
                _BATCH_END, _F_REQUEST, 5, _AF_UNSPEC, b"", resource=_NFNL_SUBSYS_NFTABLES
            ),
        )
    )
    return NetlinkStep(
        description=f"{label} redirect of outgoing TCP",
        protocol=NETLINK_NETFILTER,
        data=data,
        acks=3,
    )


def _redirect_rule(family: int, port: int) -> tuple[bytes, ...]:
    """``meta l4proto tcp, daddr is not loopback, redirect to :port``, one bytes per expression."""
    loopback: tuple[bytes, ...]
    if family == _NFPROTO_IPV4:
        loopback = (
            _payload(offset=16, length=4),
            _masked(bytes((255, 0, 0, 0))),
            _compare(_CMP_NEQ, bytes((127, 0, 0, 0))),
        )
    else:
        loopback = (
            _payload(offset=24, length=16),
            _compare(_CMP_NEQ, bytes(15) + b"\x01"),
        )
    return (
        _expression(b"meta", _u32(2, _META_L4PROTO), _u32(1, _REGISTER)),
        _compare(_CMP_EQ, bytes((_IPPROTO_TCP,))),
        *loopback,
        _expression(b"immediate", _u32(1, _REGISTER), _data(2, struct.pack(">H", port))),
        _expression(b"redir", _u32(1, _REGISTER)),
    )


def _payload(*, offset: int, length: int) -> bytes:
    return _expression(
        b"payload", _u32(1, _REGISTER), _u32(2, _NETWORK_HEADER), _u32(3, offset), _u32(4, length)
    )


def _masked(mask: bytes) -> bytes:
    return _expression(
        b"bitwise",
        _u32(1, _REGISTER),
        _u32(2, _REGISTER),
        _u32(3, len(mask)),
        _data(4, mask),
        _data(5, bytes(len(mask))),
    )


def _compare(operation: int, value: bytes) -> bytes:
    return _expression(b"cmp", _u32(1, _REGISTER), _u32(2, operation), _data(3, value))


def _expression(name: bytes, *attributes: bytes) -> bytes:
    return _attribute(1, name + b"\0") + _nested(2, *attributes)


def _data(kind: int, value: bytes) -> bytes:
    return _nested(kind, _attribute(1, value))


def _u32(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _nested(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | _NESTED, b"".join(attributes))


def _attribute(kind: int, value: bytes) -> bytes:
    # The length excludes the padding that aligns the next attribute to four bytes.
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _nft(message: int) -> int:
    return (_NFNL_SUBSYS_NFTABLES << 8) | message


def _nft_message(  # noqa: PLR0917 - the fields of one header, in its order
    kind: int, flags: int, sequence: int, family: int, attributes: bytes, resource: int = 0
) -> bytes:
    return _message(kind, flags, sequence, struct.pack(">BBH", family, 0, resource) + attributes)


def _message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    padded = body + bytes(-len(body) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + padded


def encode_route_query(version: int, packed: bytes) -> bytes:
    """Encode a query for the route of this host to an address."""
    family = _AF_INET if version == 4 else _AF_INET6
    route = struct.pack("=BBBBBBBBI", family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    return _message(_RTM_GETROUTE, _F_REQUEST, 1, route + _attribute(_RTA_DST, packed))


def is_local_route(reply: bytes) -> bool:
    """Return whether the kernel's reply is a route to this host itself.

    Raises:
        OSError: the reply is neither a route nor "no route".

    """
    if len(reply) < _HEADER + 12:
        raise OSError(f"the kernel's reply to a route query is too short ({len(reply)} bytes)")
    (kind,) = struct.unpack_from("=H", reply, 4)
    if kind == _NLMSG_ERROR:
        (code,) = struct.unpack_from("=i", reply, _HEADER)
        if -code in _NO_ROUTE:
            return False
        raise OSError(-code, "the kernel refused to look up a route")
    if kind != _RTM_NEWROUTE:
        raise OSError(f"the kernel replied to a route query with message type {kind}")
    return reply[_HEADER + 7] == _RTN_LOCAL
