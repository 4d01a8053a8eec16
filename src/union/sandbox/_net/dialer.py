"""Resolve a name, check every address, dial one of the checked addresses.

The host resolves the name once. The policy decides about each address, and the connection goes to
an allowed address. There is no second lookup that could return a different address.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._net.happy_eyeballs import connect_any
from union.sandbox._net.stream import Stream
from union.sandbox._policy.addresses import canonical, parse_address
from union.sandbox._policy.rules import Verdict, parse_host
from union.sandbox._session.threads import PoolFullError

if TYPE_CHECKING:
    from union.sandbox._net.budget import Share
    from union.sandbox._net.happy_eyeballs import Resolver
    from union.sandbox._net.policy import Policy
    from union.sandbox._net.upstream import UpstreamDialer
    from union.sandbox._policy.addresses import Address

__all__ = ["DialError", "Dialer", "OutboundConnection", "RefusedError"]

RESOLVE_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 20.0
_UPSTREAM_RESOLVE_TIMEOUT_S: Final = 2.0
_MAX_ADDRESSES: Final = 8


class RefusedError(Exception):
    """The policy refuses the destination."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class DialError(Exception):
    """The policy allows the destination, but connecting to it failed."""

    def __init__(self, message: str, *, verdict: Verdict, refused: bool = False) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.refused = refused
        """True if the destination itself refused the connection with a reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundConnection:
    """An allowed connection; ``name`` is None if the client requested an address."""

    stream: Stream
    address: str
    name: str | None
    verdict: Verdict


class Dialer:
    """Open the outbound connections of one run.

    Args:
        policy: decides about names and addresses.
        resolver: resolves names on the host.
        upstream: connects through the caller's proxy. Default None: connect directly.
        share: file descriptors for parallel connection attempts. Default None: no limit.

    """

    def __init__(
        self,
        policy: Policy,
        *,
        resolver: Resolver,
        upstream: UpstreamDialer | None = None,
        share: Share | None = None,
    ) -> None:
        self.upstream = upstream
        self._policy = policy
        self._resolver = resolver
        self._share = share

    async def dial(self, host: str, port: int) -> OutboundConnection:
        """Check the destination against the policy and connect to it.

        Raises:
            RefusedError: the policy refuses the name or all of its addresses.
            DialError: connecting failed.

        """
        generation = self._policy.generation
        verdict = self._policy.decide_name(host, port)
        if not verdict.allowed:
            raise RefusedError(verdict)
        parsed = parse_host(host)
        name = parsed if isinstance(parsed, str) else None
        if self.upstream is not None:
            if name is not None:
                await self.check_before_upstream(name, port)
            try:
                stream = await self.upstream.connect(str(parsed), port)
            except OSError as exc:
                raise DialError(_error_text(exc), verdict=verdict) from exc
            if generation != self._policy.generation:
                verdict = self._policy.decide_name(host, port)
                if not verdict.allowed:
                    stream.abort()
                    raise RefusedError(verdict)
            return OutboundConnection(stream=stream, address="", name=name, verdict=verdict)
        if isinstance(parsed, str):
            addresses, verdict = await self._allowed_addresses(parsed, port, verdict)
        else:
            addresses = [parsed]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                sock, address = await connect_any(addresses, port, share=self._share)
        except TimeoutError as exc:
            raise DialError(
                f"timed out after {CONNECT_TIMEOUT_S:g} s while connecting", verdict=verdict
            ) from exc
        except OSError as exc:
            raise DialError(
                _error_text(exc), verdict=verdict, refused=isinstance(exc, ConnectionRefusedError)
            ) from exc
        stream = Stream(sock)
        refusal = self._refusal_once_connected(stream, address, port, name, generation)
        if refusal is not None:
            stream.abort()
            raise RefusedError(refusal)
        return OutboundConnection(stream=stream, address=str(address), name=name, verdict=verdict)

    def _refusal_once_connected(
        self, stream: Stream, address: Address, port: int, name: str | None, generation: int
    ) -> Verdict | None:
        """Check again before forwarding a byte: rules and local addresses may have changed."""
        if generation != self._policy.generation:
            verdict = self._policy.recheck(
                name or str(address), port, address=address, server_names=()
            )
            if not verdict.allowed:
                return verdict
        peer = parse_address(str(stream.sock.getpeername()[0]).partition("%")[0])
        return None if peer is None else self._policy.own_server_refusal(peer, port)

    async def check_before_upstream(self, name: str, port: int) -> None:
        """Refuse a name if this host resolves it to a refused address.

        The caller's proxy resolves names itself and may resolve names that this host cannot, so a
        name without an address on this host passes. Only in this case is no address checked.

        Raises:
            RefusedError: the policy refuses one of the addresses, or the lookup queue is full.

        """
        try:
            async with asyncio.timeout(_UPSTREAM_RESOLVE_TIMEOUT_S):
                found = await self._resolver.resolve(name)
        except PoolFullError as exc:
            # The name may exist: the sandboxed program itself has filled the lookup queue.
            raise RefusedError(
                Verdict(
                    allowed=False,
                    rule="budget",
                    reason=f"{name} cannot be checked: {_error_text(exc)}",
                )
            ) from exc
        except (OSError, UnicodeError):
            return
        for text in found:
            address = parse_address(text.partition("%")[0])
            if address is None:
                continue
            verdict = self._policy.decide_address(address, port, name=name)
            # The proxy may connect to any of them, so one refused address refuses the name.
            if not verdict.allowed:
                raise RefusedError(verdict)

    async def _allowed_addresses(
        self, name: str, port: int, by_name: Verdict
    ) -> tuple[list[Address], Verdict]:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await self._resolver.resolve(name)
        except TimeoutError as exc:
            raise DialError(
                f"timed out after {RESOLVE_TIMEOUT_S:g} s while resolving the name", verdict=by_name
            ) from exc
        except (OSError, UnicodeError) as exc:
            raise DialError(
                f"cannot resolve the name: {_error_text(exc)}", verdict=by_name
            ) from exc
        passed: list[Address] = []
        refusal: Verdict | None = None
        deciding = by_name
        for text in found:
            address = parse_address(text)
            if address is None or address in passed:
                # An address with a zone is link-local and never the destination of a name.
                continue
            verdict = self._policy.decide_address(address, port, name=name)
            if verdict.allowed:
                passed.append(canonical(address))
                deciding = verdict
            else:
                refusal = refusal or verdict
        if passed:
            return passed[:_MAX_ADDRESSES], deciding
        if refusal is not None:
            raise RefusedError(refusal)
        raise DialError("the name has no usable address", verdict=by_name)


def _error_text(exc: Exception) -> str:
    # The event loop's text repeats the address; the errno of gaierror is an EAI_ code.
    if isinstance(exc, OSError) and exc.errno and not isinstance(exc, socket.gaierror):
        return os.strerror(exc.errno)
    if isinstance(exc, socket.gaierror) and exc.strerror:
        return str(exc.strerror)
    return str(exc) or type(exc).__name__
