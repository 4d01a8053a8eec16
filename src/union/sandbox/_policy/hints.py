"""Explain a failure that the network policy may have caused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from union.sandbox._policy.decision import Decision
    from union.sandbox._policy.http_request import HttpRequest

__all__ = ["is_network_failure", "network_hint"]

_MAX_SHOWN: Final = 3
_MAX_SEARCHED: Final = 64 * 1024
_NO_NETWORK: Final = re.compile(
    r"could not resolve host|name or service not known|temporary failure in name resolution|"
    r"nodename nor servname provided|network is unreachable|no address associated with hostname|"
    r"\bEAI_AGAIN\b|\bENOTFOUND\b|\bENETUNREACH\b|unknownhostexception|dns error|"
    r"failed to lookup address|no such host",
    re.IGNORECASE,
)
"""Messages of curl, the C library, Python, Node, Java, Rust and Go without a network."""


def is_network_failure(stderr: str) -> bool:
    """Return whether the error output has a message about a missing network."""
    return _NO_NETWORK.search(stderr[-_MAX_SEARCHED:]) is not None


class _Result(Protocol):
    @property
    def network(self) -> tuple[Decision, ...]: ...
    @property
    def requests(self) -> tuple[HttpRequest, ...]: ...
    @property
    def stderr(self) -> str: ...


def network_hint(mode: str, result: _Result) -> str:
    """Return how to allow what the policy refused to a command; empty if it refused nothing.

    A command with a blocked network has no connection to refuse, so it is recognised by its
    messages on stderr.
    """
    refused = [request for request in result.requests if not request.allowed]
    if refused:
        first = refused[0]
        hint = f"refused by an Http entry: {first.reason}"
        if first.suggestion:
            hint += f"; add {first.suggestion!r} to its allow="
        return hint
    suggestions = dict.fromkeys(
        decision.suggestion or decision.host for decision in result.network if not decision.allowed
    )
    if suggestions:
        shown = ", ".join(repr(text) for text in list(suggestions)[:_MAX_SHOWN])
        more = f" and {len(suggestions) - _MAX_SHOWN} more" if len(suggestions) > _MAX_SHOWN else ""
        return f"the network policy refused {shown}{more}; add what is needed to network_allowlist"
    if mode == "blocked" and is_network_failure(result.stderr):
        return (
            "the network is blocked, which is the default; pass network_mode='allowlist' and "
            "network_allowlist=['host', ...], or network_mode='open'"
        )
    return ""
