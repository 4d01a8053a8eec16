"""The policy of one egress: every frontend asks it, and it can be replaced at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._policy.names import NameSyntaxError
from union.sandbox._policy.rules import (
    Verdict,
    decide_address,
    decide_name,
    decide_server_name,
    parse_host,
)

if TYPE_CHECKING:
    from union.sandbox._net.own_server import OwnServer
    from union.sandbox._policy.addresses import Address
    from union.sandbox._policy.rules import NetworkRules

__all__ = ["Policy"]


class Policy:
    """Judges names, addresses and TLS server names by the rules that are in force now.

    No frontend keeps a copy of the rules. ``generation`` counts replacements, so that a judgement
    made before an ``await`` can be recognised as outdated after it.

    Args:
        rules: the rules at the start.
        own_server: the listening sockets of the server that runs this sandbox; None elsewhere.

    """

    def __init__(self, rules: NetworkRules, *, own_server: OwnServer | None = None) -> None:
        self._rules = rules
        self._own_server = own_server
        self.generation = 0

    @property
    def rules(self) -> NetworkRules:
        """The rules that are in force."""
        return self._rules

    def replace(self, rules: NetworkRules) -> None:
        """Put other rules in force for every later judgement."""
        self._rules = rules
        self.generation += 1

    def decide_name(self, host: str, port: int | None) -> Verdict:
        """Judge a destination as the program wrote it."""
        verdict = decide_name(self._rules, host, port)
        if verdict.allowed and port is not None and self._own_server is not None:
            try:
                parsed = parse_host(host)
            except NameSyntaxError:
                return verdict
            if not isinstance(parsed, str):
                return self._unless_own(verdict, parsed, port)
        return verdict

    def decide_address(self, address: Address, port: int, *, name: str | None) -> Verdict:
        """Judge an address that was asked for (``name`` None) or that ``name`` resolved to.

        On a server this asks the kernel whether the address is local at this moment. So the
        answer also covers addresses that the host gained after the session was opened.
        """
        verdict = decide_address(self._rules, address, port, name=name)
        return self._unless_own(verdict, address, port) if verdict.allowed else verdict

    def decide_server_name(self, server_name: str, port: int, *, name: str | None) -> Verdict:
        """Judge the server name in a TLS greeting on a connection that was allowed."""
        return decide_server_name(self._rules, server_name, port, name=name)

    def recheck(
        self, host: str, port: int, *, address: Address | None, server_names: tuple[str, ...]
    ) -> Verdict:
        """Judge a connection that exists by the rules that are in force now."""
        verdict = self.decide_name(host, port)
        if not verdict.allowed:
            return verdict
        parsed = parse_host(host)
        name = parsed if isinstance(parsed, str) else None
        if address is not None:
            verdict = self.decide_address(address, port, name=name)
        for server_name in server_names:
            if verdict.allowed:
                verdict = self.decide_server_name(server_name, port, name=name)
        return verdict

    def own_server_refusal(self, address: Address, port: int) -> Verdict | None:
        """Return the refusal of a connected peer that is the server itself, or None."""
        if self._own_server is None:
            return None
        reason = self._own_server.refusal(address, port)
        return Verdict(allowed=False, rule="own-server", reason=reason) if reason else None

    def _unless_own(self, verdict: Verdict, address: Address, port: int) -> Verdict:
        return self.own_server_refusal(address, port) or verdict
