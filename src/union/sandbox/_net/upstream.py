"""Connections made through the caller's own proxy."""

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
    """Speaks to one proxy, at addresses that are resolved and judged once.

    Args:
        upstream: where the proxy is.
        resolver: resolves its name.
        rules: judge its addresses; None where the caller chose the proxy on their own machine.
        own_server: the server that runs the sandbox, which is never a proxy.

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
        """Whether an ordinary request can be handed to it as it is.

        Not with credentials: they would be in a request whose answer the sandbox reads, and a
        proxy can be made to repeat a request in its answer (TRACE, error pages). A tunnel's
        credentials are in a request of ours, and nothing of its answer is passed on.
        """
        return self._upstream.kind == "http" and not self._upstream.username

    @property
    def _authorization(self) -> str:
        """The value of ``Proxy-Authorization``; empty without a user name."""
        if not self._upstream.username:
            return ""
        pair = self._upstream.username + b":" + self._upstream.password
        return "Basic " + base64.b64encode(pair).decode("ascii")

    async def open(self) -> Stream:
        """Connect to the proxy itself.

        Raises:
            OSError: it could not be reached.

        """
        async with asyncio.timeout(_TIMEOUT_S):
            addresses = await self._addresses()
            sock, _address = await connect_any(addresses, self._upstream.port)
        stream = Stream(sock)
        peer = parse_address(str(sock.getpeername()[0]).partition("%")[0])
        refusal = None if peer is None else self._own_refusal(peer)
        if refusal is not None:
            stream.abort()
            raise RefusedError(refusal)
        return stream

    async def _addresses(self) -> tuple[Address, ...]:
        """Return the addresses of the proxy: the first answer counts, later ones change nothing."""
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
            raise ConnectionError("the upstream proxy's name has no usable address")
        self._pinned = self._pinned or tuple(passed)
        return self._pinned

    def _refusal(self, address: Address, *, name: str | None) -> Verdict | None:
        if self._rules is not None:
            verdict = decide_address(self._rules, address, self._upstream.port, name=name)
            if not verdict.allowed:
                return _refused(verdict.reason)
        return self._own_refusal(address)

    def _own_refusal(self, address: Address) -> Verdict | None:
        if self._own_server is None:
            return None
        reason = self._own_server.refusal(address, self._upstream.port)
        return _refused(reason) if reason else None

    async def connect(self, host: str, port: int) -> Stream:
        """Return a connection to ``host`` through the proxy.

        Raises:
            OSError: the proxy could not be reached, or said no.

        """
        async with asyncio.timeout(_TIMEOUT_S):
            stream = await self.open()
            try:
                if self._upstream.kind == "http":
                    await self._connect_http(stream, format_host_port(host, port))
                else:
                    await self._connect_socks(stream, host, port)
            except (EndOfStreamError, HeadTooLongError, HttpFormatError) as exc:
                stream.close()
                raise ConnectionError("the upstream proxy did not answer properly") from exc
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
                f"the upstream proxy answered {head.status} to CONNECT {authority}"
            )

    async def _connect_socks(self, stream: Stream, host: str, port: int) -> None:
        up = self._upstream
        methods = b"\x00\x02" if up.username else b"\x00"
        await stream.send(bytes((5, len(methods))) + methods)
        version, method = await stream.read_exactly(2)
        if version != 5 or method not in methods:
            raise ConnectionError("the upstream proxy accepts no way of ours to log in")
        if method == 2:
            user, secret = up.username, up.password
            await stream.send(b"\x01" + bytes((len(user),)) + user + bytes((len(secret),)) + secret)
            if (await stream.read_exactly(2))[1] != 0:
                raise ConnectionError("the upstream proxy refused the user name or password")
        await stream.send(b"\x05\x01\x00" + _socks_address(host) + struct.pack(">H", port))
        _version, reply, _reserved, kind = await stream.read_exactly(4)
        if reply != 0:
            what = _SOCKS_FAILURES.get(reply, f"code {reply}")
            raise ConnectionError(f"the upstream proxy could not connect: {what}")
        length = {1: 4, 4: 16}.get(kind)
        if length is None:
            length = (await stream.read_exactly(1))[0]
        await stream.read_exactly(length + 2)


def _refused(reason: str) -> Verdict:
    return Verdict(
        allowed=False,
        rule="upstream-proxy",
        reason=f"the address of the upstream proxy is refused: {reason}",
    )


def _socks_address(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return b"\x03" + bytes((len(host),)) + host.encode("ascii")
    return (b"\x01" if address.version == 4 else b"\x04") + address.packed
