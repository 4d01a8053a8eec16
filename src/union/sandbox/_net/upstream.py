"""Connections made through the caller's own proxy."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import struct
from typing import TYPE_CHECKING, Final

from union.sandbox._core.addresses import host_and_port, parse_address
from union.sandbox._core.http1 import MAX_HEAD_BYTES, HttpFormatError, parse_response_head
from union.sandbox._net.connect import HostResolver, connect_any
from union.sandbox._net.stream import EndOfStreamError, HeadTooLongError, Stream

if TYPE_CHECKING:
    from union.sandbox._core.upstream import Upstream

__all__ = ["UpstreamDialer"]

_TIMEOUT_S: Final = 30.0
_SOCKS_FAILURES: Final = {
    2: "not allowed by its rules",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
}


class UpstreamDialer:
    """Speaks to one proxy. Its own address is the caller's choice and is not judged."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    @property
    def takes_plain_http(self) -> bool:
        """Whether an ordinary request can be handed to it as it is."""
        return self._upstream.kind == "http"

    @property
    def authorization(self) -> str:
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
            found = await HostResolver().resolve(self._upstream.host)
            addresses = [address for text in found if (address := parse_address(text)) is not None]
            sock, _address = await connect_any(addresses, self._upstream.port)
        return Stream(sock)

    async def connect(self, host: str, port: int) -> Stream:
        """Return a connection to ``host`` through the proxy.

        Raises:
            OSError: the proxy could not be reached, or said no.

        """
        async with asyncio.timeout(_TIMEOUT_S):
            stream = await self.open()
            try:
                if self._upstream.kind == "http":
                    await self._connect_http(stream, host_and_port(host, port))
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
        if self.authorization:
            lines.append(f"Proxy-Authorization: {self.authorization}")
        await stream.send(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
        head = parse_response_head(await stream.read_head(MAX_HEAD_BYTES))
        if not 200 <= head.status < 300:
            raise ConnectionError(f"the upstream proxy answered {head.status}")

    async def _connect_socks(self, stream: Stream, host: str, port: int) -> None:
        up = self._upstream
        methods = b"\x00\x02" if up.username else b"\x00"
        await stream.send(bytes((5, len(methods))) + methods)
        version, method = await stream.exactly(2)
        if version != 5 or method not in methods:
            raise ConnectionError("the upstream proxy accepts no way of ours to log in")
        if method == 2:
            user, secret = up.username, up.password
            await stream.send(b"\x01" + bytes((len(user),)) + user + bytes((len(secret),)) + secret)
            if (await stream.exactly(2))[1] != 0:
                raise ConnectionError("the upstream proxy refused the user name or password")
        await stream.send(b"\x05\x01\x00" + _socks_address(host) + struct.pack(">H", port))
        _version, reply, _reserved, kind = await stream.exactly(4)
        if reply != 0:
            what = _SOCKS_FAILURES.get(reply, f"code {reply}")
            raise ConnectionError(f"the upstream proxy could not connect: {what}")
        length = {1: 4, 4: 16}.get(kind)
        if length is None:
            length = (await stream.exactly(1))[0]
        await stream.exactly(length + 2)


def _socks_address(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return b"\x03" + bytes((len(host),)) + host.encode("ascii")
    return (b"\x01" if address.version == 4 else b"\x04") + address.packed
