"""Connections through the caller's own proxy."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import struct
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs.http1 import MAX_HEAD_BYTES, HttpFormatError, parse_response_head
from union.sandbox._net.dialer import RefusedError
from union.sandbox._net.happy_eyeballs import connect_any
from union.sandbox._net.stream import EndOfStreamError, HeadTooLongError, Stream
from union.sandbox._policy.addresses import format_host_port, parse_address
from union.sandbox._policy.rules import Verdict, decide_address

if TYPE_CHECKING:
    from union.sandbox._net.happy_eyeballs import Resolver
    from union.sandbox._net.own_server import OwnServer
    from union.sandbox._policy.addresses import Address
    from union.sandbox._policy.rules import NetworkRules
    from union.sandbox._policy.upstream import Upstream

__all__ = ["UpstreamDialer"]

_TIMEOUT_S: Final = 30.0
_SOCKS_FAILURES: Final = {
    2: "not allowed by its rules",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
}


class UpstreamDialer:
    """Connect through one proxy. Its addresses are resolved and checked once.

    Args:
        upstream: address and credentials of the proxy.
        resolver: resolves its name.
        rules: rules for its addresses. Default None: all are allowed, because the caller chose
            the proxy on their own machine.
        own_server: the server that runs the sandbox and is never a proxy. Default None.

    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        resolver: Resolver,
        rules: NetworkRules | None = None,
        own_server: OwnServer | None = None,
    ) -> None:
        self._upstream = upstream
        self._resolver = resolver
        self._rules = rules
        self._own_server = own_server
        self._pinned: tuple[Address, ...] = ()

    @property
    def accepts_plain_http(self) -> bool:
        """Whether the proxy gets plain requests in absolute form instead of a tunnel.

        False with credentials: they would be part of a request whose response the sandbox reads,
        and a proxy may repeat a request in its response (TRACE, error pages). The credentials of
        a tunnel are in a CONNECT request whose response is not forwarded.
        """
        return self._upstream.kind == "http" and not self._upstream.username

    @property
    def _authorization(self) -> str:
        """The value of ``Proxy-Authorization``; empty without a user name."""
        if not self._upstream.username:
            return ""
        pair = self._upstream.username + b":" + self._upstream.password
        return "Basic " + base64.b64encode(pair).decode("ascii")

    async def connect_to_proxy(self) -> Stream:
        """Connect to the proxy itself.

        Raises:
            RefusedError: its address is refused.
            OSError: it could not be reached.

        """
        async with asyncio.timeout(_TIMEOUT_S):
            addresses = await self._addresses()
            sock, _address = await connect_any(addresses, self._upstream.port)
        stream = Stream(sock)
        peer = parse_address(str(sock.getpeername()[0]).partition("%")[0])
        refusal = None if peer is None else self._own_server_refusal(peer)
        if refusal is not None:
            stream.abort()
            raise RefusedError(refusal)
        return stream

    async def _addresses(self) -> tuple[Address, ...]:
        """Return the addresses of the proxy. The first lookup pins them."""
        if self._pinned:
            return self._pinned
        host = self._upstream.host
        literal = parse_address(host)
        found = [host] if literal is not None else await self._resolver.resolve(host)
        passed: list[Address] = []
        refusal: Verdict | None = None
        for text in found:
            address = parse_address(text)
            if address is None:
                continue
            refused = self._refusal(address, name=None if literal is not None else host)
            if refused is None:
                passed.append(address)
            refusal = refusal or refused
        if not passed and refusal is not None:
            raise RefusedError(refusal)
        if not passed:
            # The sandbox reads this text: it does not contain the name of the proxy.
            raise ConnectionError("the upstream proxy's name has no usable address")
        self._pinned = self._pinned or tuple(passed)
        return self._pinned

    def _refusal(self, address: Address, *, name: str | None) -> Verdict | None:
        if self._rules is not None:
            verdict = decide_address(self._rules, address, self._upstream.port, name=name)
            if not verdict.allowed:
                return _proxy_refusal(verdict.reason)
        return self._own_server_refusal(address)

    def _own_server_refusal(self, address: Address) -> Verdict | None:
        if self._own_server is None:
            return None
        reason = self._own_server.refusal(address, self._upstream.port)
        return _proxy_refusal(reason) if reason else None

    async def connect(self, host: str, port: int) -> Stream:
        """Return a connection to ``host`` through the proxy.

        Raises:
            RefusedError: the address of the proxy is refused.
            OSError: the proxy could not be reached or refused the connection.

        """
        async with asyncio.timeout(_TIMEOUT_S):
            stream = await self.connect_to_proxy()
            try:
                if self._upstream.kind == "http":
                    await self._connect_http(stream, format_host_port(host, port))
                else:
                    await self._connect_socks(stream, host, port)
            except (EndOfStreamError, HeadTooLongError, HttpFormatError) as exc:
                stream.close()
                raise ConnectionError("the upstream proxy sent a malformed response") from exc
            except BaseException:
                stream.close()
                raise
            return stream

    async def _connect_http(self, stream: Stream, authority: str) -> None:
        lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}"]
        if self._authorization:
            lines.append(f"Proxy-Authorization: {self._authorization}")
        await stream.send(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        head = parse_response_head(await stream.read_head(MAX_HEAD_BYTES))
        if not 200 <= head.status < 300:
            raise ConnectionError(
                f"the upstream proxy responded with {head.status} to CONNECT {authority}"
            )

    async def _connect_socks(self, stream: Stream, host: str, port: int) -> None:
        up = self._upstream
        methods = b"\x00\x02" if up.username else b"\x00"
        await stream.send(bytes((5, len(methods))) + methods)
        version, method = await stream.read_exactly(2)
        if version != 5 or method not in methods:
            raise ConnectionError(
                f"the upstream proxy accepts no offered SOCKS authentication method (got {method})"
            )
        if method == 2:
            user, secret = up.username, up.password
            await stream.send(b"\x01" + bytes((len(user),)) + user + bytes((len(secret),)) + secret)
            if (await stream.read_exactly(2))[1] != 0:
                raise ConnectionError("the upstream proxy rejected the user name or password")
        await stream.send(b"\x05\x01\x00" + _encode_socks_address(host) + struct.pack(">H", port))
        _version, reply, _reserved, kind = await stream.read_exactly(4)
        if reply != 0:
            reason = _SOCKS_FAILURES.get(reply, f"SOCKS reply code {reply}")
            raise ConnectionError(f"the upstream proxy could not connect: {reason}")
        length = {1: 4, 4: 16}.get(kind)
        if length is None:
            length = (await stream.read_exactly(1))[0]
        await stream.read_exactly(length + 2)


def _proxy_refusal(reason: str) -> Verdict:
    return Verdict(
        allowed=False,
        rule="upstream-proxy",
        reason=f"the address of the upstream proxy is refused: {reason}",
    )


def _encode_socks_address(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return b"\x03" + bytes((len(host),)) + host.encode("ascii")
    return (b"\x01" if address.version == 4 else b"\x04") + address.packed
