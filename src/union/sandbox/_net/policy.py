"""The live policy of one egress. All frontends use it, and its rules can be replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

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
    from union.sandbox._policy.http_entries import Http
    from union.sandbox._policy.rules import NetworkRules

__all__ = ["Policy"]

_PLAIN_HTTP_PORT: Final = 80


class Policy:
    """Decide about names, addresses and TLS server names by the current rules.

    No frontend keeps a copy of the rules. ``generation`` counts replacements, so that a verdict
    from before an ``await`` can be recognised as outdated after it.

    Args:
        rules: the initial rules.
        own_server: the server that runs this sandbox. Default None: there is none.

    """

    def __init__(self, rules: NetworkRules, *, own_server: OwnServer | None = None) -> None:
        self._rules = rules
        self._own_server = own_server
        self._suspended: asyncio.Future[None] | None = None
        self._bound: dict[str, tuple[Http, ...]] | None = None
        self.generation = 0

    @property
    def rules(self) -> NetworkRules:
        """The current rules."""
        return self._rules

    def replace(self, rules: NetworkRules) -> None:
        """Replace the rules for every later decision."""
        self._rules = rules
        self._bound = None
        self.generation += 1

    @property
    def is_suspended(self) -> bool:
        """Whether connections must wait before they forward a byte."""
        return self._suspended is not None

    def suspend(self) -> None:
        """Make every connection wait until ``resume()``."""
        if self._suspended is None:
            self._suspended = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        """Let connections that wait continue."""
        if self._suspended is not None:
            self._suspended.set_result(None)
            self._suspended = None

    async def until_resumed(self) -> None:
        """Wait while connections must not forward."""
        while self._suspended is not None:
            await asyncio.shield(self._suspended)

    def binding(self, host: str, port: int) -> Http | None:
        """Return the ``Http`` entry that handles connections to this host and port, or None.

        An entry also handles port 80, because plain HTTP is upgraded.
        """
        if self._bound is None:
            self._bound = {}
            for entry in self._rules.allow or ():
                if entry.http is not None:
                    known = self._bound.get(entry.name, ())
                    self._bound[entry.name] = (*known, entry.http)
        if not self._bound:
            return None
        found = self._bound.get(host, ())  # most hosts are in the canonical spelling already
        if not found:
            try:
                name = parse_host(host)
            except NameSyntaxError:
                return None
            found = self._bound.get(name, ()) if isinstance(name, str) else ()
        exact = next((http for http in found if http.port == port), None)
        return exact or (found[0] if found and port == _PLAIN_HTTP_PORT else None)

    def decide_name(self, host: str, port: int | None) -> Verdict:
        """Decide about a destination as the program wrote it."""
        verdict = decide_name(self._rules, host, port)
        if verdict.allowed and port is not None and self._own_server is not None:
            try:
                parsed = parse_host(host)
            except NameSyntaxError:
                return verdict
            if not isinstance(parsed, str):
                return self.own_server_refusal(parsed, port) or verdict
        return verdict

    def decide_address(self, address: Address, port: int, *, name: str | None) -> Verdict:
        """Decide about a requested address (``name`` None) or an address of ``name``.

        On a server this queries the kernel whether the address is local at this moment, which
        covers addresses that the host gained after the session was opened.
        """
        verdict = decide_address(self._rules, address, port, name=name)
        if not verdict.allowed:
            return verdict
        return self.own_server_refusal(address, port) or verdict

    def decide_server_name(self, server_name: str, port: int, *, name: str | None) -> Verdict:
        """Decide about the server name in a ClientHello on an allowed connection."""
        bound = self.binding(server_name, port)
        if bound is not None:
            # Another allowed destination may be a front of the same server: the rules of the entry
            # must not be avoided through it.
            return Verdict(
                allowed=False,
                rule=bound.text,
                reason=f"the TLS server name {server_name} has an Http entry: connect by name",
            )
        return decide_server_name(self._rules, server_name, port, name=name)

    def recheck(
        self, host: str, port: int, *, address: Address | None, server_names: tuple[str, ...]
    ) -> Verdict:
        """Decide about an existing connection by the current rules."""
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
        """Return a refusal if this address and port belong to the server itself, else None."""
        if self._own_server is None:
            return None
        reason = self._own_server.refusal(address, port)
        return Verdict(allowed=False, rule="own-server", reason=reason) if reason else None
