"""The resolver that a run sees. It asks nobody: an allowed name gets an address of our own.

A name that is not allowed does not exist, at once, and is not sent anywhere.
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

if TYPE_CHECKING:
    import socket

    from union.sandbox._net.egress import Connection
    from union.sandbox._net.ledger import Ledger
    from union.sandbox._net.policy import Policy
    from union.sandbox._policy.rules import Verdict
    from union.sandbox._policy.synthetic import SyntheticNames

__all__ = ["DnsFrontend", "StubResolver"]

_IDLE_S: Final = 10.0
_DATAGRAMS_PER_TURN: Final = 64
_REPEAT_WINDOW_S: Final = 2.0
_MAX_RECENT_REFUSALS: Final = 4096


class StubResolver:
    """Answers questions; needs no socket."""

    def __init__(
        self, policy: Policy, names: SyntheticNames, ledger: Ledger, *, ipv6: bool
    ) -> None:
        self._policy = policy
        self._names = names
        self._ledger = ledger
        self._ipv6 = ipv6
        self._refused: dict[str, float] = {}

    def answer(self, data: bytes) -> bytes | None:
        """Return the answer to one message; None for what deserves none."""
        try:
            query = dns.parse_query(data)
        except dns.DnsFormatError as exc:
            return dns.encode_error_response(data, exc.rcode)
        name = query.name.lower()
        if not name:
            return dns.encode_response(query)
        if name.endswith((".in-addr.arpa", ".ip6.arpa")):
            return self._reverse(query, name)
        if name == "localhost" or name.endswith(".localhost"):
            return self._with_addresses(query, IPv4Address("127.0.0.1"), IPv6Address("::1"))
        try:
            parsed = parse_host(query.name)
        except NameSyntaxError:
            parsed = None
        verdict = self._policy.decide_name(query.name, None)
        if not isinstance(parsed, str) or not verdict.allowed:
            if not verdict.allowed:
                self._record(parsed if isinstance(parsed, str) else query.name, verdict)
            return dns.encode_response(query, rcode=dns.NXDOMAIN, extended_error=verdict.reason)
        addresses = self._names.addresses(parsed)
        if addresses is None:
            return dns.encode_response(
                query, rcode=dns.SERVFAIL, extended_error="too many names in this run"
            )
        return self._with_addresses(query, *addresses)

    def _with_addresses(self, query: dns.Query, four: IPv4Address, six: IPv6Address) -> bytes:
        if query.kind in {dns.A, dns.ANY}:
            return dns.encode_response(query, records=(four.packed,))
        if query.kind == dns.AAAA and self._ipv6:
            return dns.encode_response(query, records=(six.packed,))
        # The name exists and has nothing of that kind.
        return dns.encode_response(query)

    def _reverse(self, query: dns.Query, name: str) -> bytes:
        known = None
        parts = name.removesuffix(".in-addr.arpa").split(".")
        if query.kind == dns.PTR and len(parts) == 4:
            with contextlib.suppress(ValueError):
                known = self._names.name(IPv4Address(".".join(reversed(parts))))
        if known is None:
            return dns.encode_response(query, rcode=dns.NXDOMAIN)
        return dns.encode_response(query, records=(dns.encode_name(known),))

    def _record(self, name: str, verdict: Verdict) -> None:
        # A and AAAA are asked together, and again: that is one attempt of the program.
        now = time.monotonic()
        if now - self._refused.get(name, -_REPEAT_WINDOW_S) < _REPEAT_WINDOW_S:
            return
        if len(self._refused) >= _MAX_RECENT_REFUSALS:
            self._refused.clear()
        self._refused[name] = now
        attempt = Attempt(frontend="dns", host=name, port=0)
        attempt.verdict = verdict
        self._ledger.close(attempt)


class DnsFrontend:
    """Carries questions to a StubResolver, over UDP and TCP."""

    name: Final = "dns"

    def __init__(self, stub: StubResolver) -> None:
        self._stub = stub

    def readable(self, sock: socket.socket) -> None:
        """Answer the datagrams that are waiting."""
        for _ in range(_DATAGRAMS_PER_TURN):
            try:
                data, sender = sock.recvfrom(4096)
                answer = self._stub.answer(data)
                if answer is not None:
                    sock.sendto(answer, sender)
            except OSError:
                # Nothing (more) to read, or nobody there to read the answer: it is only UDP.
                return

    def destination_of(self, _sock: socket.socket) -> tuple[str, int]:
        """Return the destination of a connection that is not served: unknown yet."""
        return "", 0

    async def serve(self, connection: Connection) -> None:
        """Answer questions on one TCP connection, each with its length before it."""
        stream = connection.stream
        with contextlib.suppress(EndOfStreamError, TimeoutError):
            while True:
                async with asyncio.timeout(_IDLE_S):
                    size = int.from_bytes(await stream.read_exactly(2), "big")
                    answer = self._stub.answer(await stream.read_exactly(size))
                    if answer is None:
                        return
                    await stream.send(len(answer).to_bytes(2, "big") + answer)
