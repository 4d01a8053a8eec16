"""The resolver of a run. It forwards no query: an allowed name gets a synthetic address.

A name that is not allowed gets NXDOMAIN immediately and is not sent anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

from union.sandbox._codecs import dns
from union.sandbox._net.ledger import Attempt
from union.sandbox._net.stream import EndOfStreamError
from union.sandbox._policy.names import NameSyntaxError
from union.sandbox._policy.rules import parse_host
from union.sandbox._policy.synthetic import MAX_NAMES

if TYPE_CHECKING:
    import socket

    from union.sandbox._net.connection import Connection
    from union.sandbox._net.ledger import Ledger
    from union.sandbox._net.policy import Policy
    from union.sandbox._policy.rules import Verdict
    from union.sandbox._policy.synthetic import SyntheticNames

__all__ = ["DnsFrontend", "StubResolver"]

_IDLE_S: Final = 10.0
_DATAGRAMS_PER_TURN: Final = 2
"""Few, because other sessions wait for the event loop meanwhile."""
_REPEAT_WINDOW_S: Final = 2.0
_MAX_RECENT_REFUSALS: Final = 4096


class StubResolver:
    """Build the response to a query. Uses no socket.

    Args:
        policy: decides about names.
        names: assigns the synthetic addresses.
        ledger: records refused names.
        ipv6: whether AAAA queries get an address.
        ttl_s: how long a client may cache an address. Default: 60 s.

    """

    def __init__(
        self,
        policy: Policy,
        names: SyntheticNames,
        ledger: Ledger,
        *,
        ipv6: bool,
        ttl_s: int = dns.TTL_S,
    ) -> None:
        self._policy = policy
        self._names = names
        self._ledger = ledger
        self._ipv6 = ipv6
        self._ttl_s = ttl_s
        self._recent_refusals: dict[str, float] = {}

    def respond(self, data: bytes) -> bytes | None:
        """Return the response to one message; None if it must not get one."""
        try:
            query = dns.parse_query(data)
        except dns.DnsFormatError as exc:
            return dns.encode_error_response(data, exc.rcode)
        name = query.name.lower()
        if not name:
            return dns.encode_response(query)
        if name.endswith((".in-addr.arpa", ".ip6.arpa")):
            return self._respond_reverse(query, name)
        if name == "localhost" or name.endswith(".localhost"):
            return self._respond_addresses(query, IPv4Address("127.0.0.1"), IPv6Address("::1"))
        try:
            parsed = parse_host(query.name)
        except NameSyntaxError:
            parsed = None
        verdict = self._policy.decide_name(query.name, None)
        if not isinstance(parsed, str) or not verdict.allowed:
            if not verdict.allowed:
                self._record_refusal(parsed if isinstance(parsed, str) else query.name, verdict)
            return dns.encode_response(query, rcode=dns.NXDOMAIN, extended_error=verdict.reason)
        addresses = self._names.addresses(parsed)
        if addresses is None:
            return dns.encode_response(
                query,
                rcode=dns.SERVFAIL,
                extended_error=f"limit of {MAX_NAMES} names in one run reached",
            )
        return self._respond_addresses(query, *addresses)

    def forget_refusals(self) -> None:
        """Record the next refusal of each name, even if the same was recorded just before."""
        self._recent_refusals.clear()

    def _respond_addresses(self, query: dns.Query, four: IPv4Address, six: IPv6Address) -> bytes:
        if query.kind in {dns.A, dns.ANY}:
            return dns.encode_response(query, records=(four.packed,), ttl_s=self._ttl_s)
        if query.kind == dns.AAAA and self._ipv6:
            return dns.encode_response(query, records=(six.packed,), ttl_s=self._ttl_s)
        # The name exists but has no record of this type.
        return dns.encode_response(query)

    def _respond_reverse(self, query: dns.Query, name: str) -> bytes:
        known = None
        parts = name.removesuffix(".in-addr.arpa").split(".")
        if query.kind == dns.PTR and len(parts) == 4:
            with contextlib.suppress(ValueError):
                known = self._names.name(IPv4Address(".".join(reversed(parts))))
        if known is None:
            return dns.encode_response(query, rcode=dns.NXDOMAIN)
        return dns.encode_response(query, records=(dns.encode_name(known),))

    def _record_refusal(self, name: str, verdict: Verdict) -> None:
        # Clients query A and AAAA together and retry: that is one attempt of the program.
        now = time.monotonic()
        if now - self._recent_refusals.get(name, -_REPEAT_WINDOW_S) < _REPEAT_WINDOW_S:
            return
        if len(self._recent_refusals) >= _MAX_RECENT_REFUSALS:
            self._recent_refusals.clear()
        self._recent_refusals[name] = now
        attempt = Attempt(frontend="dns", host=name, port=0)
        attempt.verdict = verdict
        self._ledger.record(attempt)


class DnsFrontend:
    """Serves a StubResolver over UDP and TCP."""

    name: Final = "dns"

    def __init__(self, stub: StubResolver) -> None:
        self._stub = stub

    def on_readable(self, sock: socket.socket) -> None:
        """Respond to the queued datagrams."""
        for _ in range(_DATAGRAMS_PER_TURN):
            try:
                data, sender = sock.recvfrom(4096)
                response = self._stub.respond(data)
                if response is not None:
                    sock.sendto(response, sender)
            except OSError:
                # No datagram is left, or the sender is gone. UDP clients retry.
                return

    def destination_of(self, _sock: socket.socket) -> tuple[str, int]:
        """Return no destination: it is unknown before the first request."""
        return "", 0

    async def serve(self, connection: Connection) -> None:
        """Respond to the length-prefixed queries of one TCP connection."""
        stream = connection.stream
        with contextlib.suppress(EndOfStreamError, TimeoutError):
            while True:
                async with asyncio.timeout(_IDLE_S):
                    size = int.from_bytes(await stream.read_exactly(2), "big")
                    response = self._stub.respond(await stream.read_exactly(size))
                    if response is None:
                        return
                    await stream.send(len(response).to_bytes(2, "big") + response)
