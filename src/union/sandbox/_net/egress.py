"""The host's end of one run's network: its frontends and their connections.

The launcher created the listening sockets inside the sandbox's network namespace and passed them
to the host, so only that run can reach them. The caller's event loop serves them, without any
further thread or process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Final, Protocol

from union.sandbox._codecs.dns import TTL_S
from union.sandbox._net.budget import process_budget
from union.sandbox._net.connection import Connection
from union.sandbox._net.dialer import Dialer, DialError, RefusedError
from union.sandbox._net.dns import DnsFrontend, StubResolver
from union.sandbox._net.happy_eyeballs import HostResolver
from union.sandbox._net.http_proxy import HttpFrontend
from union.sandbox._net.ledger import Attempt, Ledger
from union.sandbox._net.socks import SocksFrontend
from union.sandbox._net.stream import Stream, is_disconnect
from union.sandbox._net.transparent import TransparentFrontend, original_destination
from union.sandbox._policy.rules import NetworkRules, Verdict
from union.sandbox._policy.synthetic import SyntheticNames

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from union.sandbox._net.budget import Share
    from union.sandbox._net.happy_eyeballs import Resolver
    from union.sandbox._net.http_exchange import HttpExchange
    from union.sandbox._net.interception import Interception
    from union.sandbox._net.policy import Policy
    from union.sandbox._net.transparent import Destination
    from union.sandbox._net.upstream import UpstreamDialer
    from union.sandbox._policy.decision import Decision, FrontendName
    from union.sandbox._policy.http_entries import Http
    from union.sandbox._policy.http_request import HttpRequest

__all__ = ["Egress"]

_LOGGER: Final = logging.getLogger("union.sandbox.network")
_MAX_CONNECTIONS: Final = 512
_MAX_HALF_OPEN: Final = 256
_ACCEPTS_PER_TURN: Final = 2
"""Few, because other sessions wait for the event loop meanwhile."""
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_ACCEPT_S: Final = 0.1
_NOTHING: Final = NetworkRules(allow=())


class Frontend(Protocol):
    """Serves the connections of one listener."""

    @property
    def name(self) -> FrontendName:
        """Name of the frontend in decisions."""
        ...

    def destination_of(self, sock: socket.socket) -> tuple[str, int]:
        """Return the requested host and port; ``("", 0)`` while they are unknown."""
        ...

    async def serve(self, connection: Connection) -> None:
        """Serve one connection to its end. The caller closes it."""
        ...


class Egress:
    """Serve the frontends of one run until closed. Owns the sockets passed to it.

    Args:
        policy: decides about every destination.
        http: listening socket of the HTTP proxy; None if only `adopt` brings connections.
        socks: listening socket of the SOCKS5 proxy; None likewise.
        on_decision: called with each decision when its connection has ended.
        tcp_transparent: listening socket for redirected IPv4 connections. Default None: none.
        tcp_transparent6: the same for IPv6. Default None: none, and no AAAA records.
        dns_udp: UDP socket of the resolver. Default None: none.
        dns_tcp: listening TCP socket of the resolver. Default None: none.
        upstream: the caller's proxy. Default None: connect directly.
        resolver: resolves names. Default None: the host's resolver.
        share: the session's file descriptors. Default None: a new share of the process's budget.
        credentials: ``user:password`` that both proxies require. Default None: none.
        destination: returns the original destination of a redirected connection.
        ttl_s: how long a client may cache an address. Default: 60 s.
        interception: returns what serves the hosts of ``Http`` entries, at their first use.
            Default None: the policy must have no such entry.
        on_request: called with each HTTP request that such an entry has handled. Default None:
            not recorded.

    """

    def __init__(
        self,
        policy: Policy,
        *,
        http: socket.socket | None,
        socks: socket.socket | None,
        on_decision: Callable[[Decision], None],
        tcp_transparent: socket.socket | None = None,
        tcp_transparent6: socket.socket | None = None,
        dns_udp: socket.socket | None = None,
        dns_tcp: socket.socket | None = None,
        upstream: UpstreamDialer | None = None,
        resolver: Resolver | None = None,
        share: Share | None = None,
        credentials: str | None = None,
        destination: Destination = original_destination,
        ttl_s: int = TTL_S,
        interception: Callable[[], Interception] | None = None,
        on_request: Callable[[HttpRequest], None] | None = None,
    ) -> None:
        self.policy = policy
        self.ledger = Ledger(on_decision, on_request)
        self._interception = interception
        self._share = share or process_budget.share()
        self.dialer = Dialer(
            policy,
            resolver=resolver or HostResolver(self),
            upstream=upstream,
            share=self._share,
        )
        names = self._names = SyntheticNames()
        self._stub = StubResolver(
            policy, names, self.ledger, ipv6=tcp_transparent6 is not None, ttl_s=ttl_s
        )
        self._dns = DnsFrontend(self._stub)
        transparent = TransparentFrontend(names, destination=destination)
        frontends: tuple[tuple[socket.socket | None, Frontend], ...] = (
            (tcp_transparent, transparent),
            (tcp_transparent6, transparent),
            (dns_tcp, self._dns),
            (http, HttpFrontend(credentials)),
            (socks, SocksFrontend(credentials)),
        )
        self._frontends = {frontend.name: frontend for _, frontend in frontends}
        self._listeners = [(sock, frontend) for sock, frontend in frontends if sock is not None]
        self._dns_udp = dns_udp
        self._loop = asyncio.get_running_loop()
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._half_open: dict[Connection, asyncio.Task[None]] = {}
        self._max_connections = _MAX_CONNECTIONS
        self._closed = False

    def start(self) -> None:
        """Start serving in the running event loop."""
        for sock, frontend in self._listeners:
            sock.setblocking(False)
            self._loop.add_reader(sock.fileno(), self._accept, sock, frontend)
        if self._dns_udp is not None:
            self._dns_udp.setblocking(False)
            self._loop.add_reader(self._dns_udp.fileno(), self._dns.on_readable, self._dns_udp)

    def close(self) -> None:
        """Stop serving: close listeners now and connections in the next loop iteration."""
        if self._closed:
            return
        self._closed = True
        listeners = [sock for sock, _frontend in self._listeners]
        if self._dns_udp is not None:
            listeners.append(self._dns_udp)
        for sock in listeners:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        for task in self._connections:
            task.cancel()

    async def aclose(self) -> None:
        """Stop serving and wait until every connection is closed and recorded."""
        self.close()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def switch(self, rules: NetworkRules) -> None:
        """Replace the rules of every frontend at once.

        Connections that the new rules allow continue. All others forward no further byte and are
        reset. The limit on recorded decisions starts again at zero. Ends a suspension.
        """
        self.policy.replace(rules)
        self.ledger.reset_limits()
        self._stub.forget_refusals()
        self._names.clear_if_full()
        for task, connection in tuple(self._connections.items()):
            verdict = connection.recheck()
            if verdict is not None and not verdict.allowed:
                connection.revoke(verdict.reason)
                task.cancel()
        self.policy.resume()

    def suspend(self) -> None:
        """Forward nothing and allow nothing until the next ``switch``.

        Tunnels wait, and the next rules decide about them. All other connections are reset. Each
        decision up to now is recorded before this call returns.
        """
        self.policy.replace(_NOTHING)
        self.policy.suspend()
        for task, connection in tuple(self._connections.items()):
            if connection.is_tunnel:
                connection.record_part()
            else:
                connection.revoke("the network is suspended")
                connection.record_pending_request()
                connection.end_attempts()
                task.cancel()

    def exchange(self, connection: Connection, attempt: Attempt, http: Http) -> HttpExchange:
        """Return the exchange of a connection to the host of an ``Http`` entry."""
        from union.sandbox._net.http_exchange import HttpExchange

        if self._interception is None:
            raise AssertionError("the policy has an Http entry, and nothing serves it")
        return HttpExchange(connection, attempt, http, self._interception())

    @property
    def unrecorded(self) -> int:
        """Number of decisions beyond the limit that is kept for one run."""
        return self.ledger.unrecorded

    def request_received(self, connection: Connection) -> None:
        """Remove a connection from the half-open ones: its client has sent a request."""
        self._half_open.pop(connection, None)

    def _accept(self, listener: socket.socket, frontend: Frontend) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno in _OUT_OF_DESCRIPTORS:
                    self._pause(listener, frontend)
                    return
                # The client disconnected before accept().
                continue
            self._begin(sock, frontend)

    def adopt(self, sock: socket.socket, name: FrontendName) -> bool:
        """Serve a connection that the host made for the sandbox; takes ownership of it.

        Args:
            sock: this process's end of the connection.
            name: the name of the frontend that serves it.

        Returns:
            Whether it is served. A destination that the policy refuses is not.

        """
        frontend = self._frontends[name]
        if name == TransparentFrontend.name and not self._is_allowed(sock, frontend):
            return False
        return self._begin(sock, frontend)

    def _is_allowed(self, sock: socket.socket, frontend: Frontend) -> bool:
        """Decide about a destination before its connection is handed over."""
        host, port = frontend.destination_of(sock)
        bound = self.policy.binding(host, port)
        verdict = self.policy.decide_name(host, port if bound is None else bound.port)
        if not verdict.allowed:
            sock.close()
            self.ledger.record(
                Attempt(frontend=frontend.name, host=host, port=port, verdict=verdict)
            )
        return verdict.allowed

    def _begin(self, sock: socket.socket, frontend: Frontend) -> bool:
        """Serve an accepted connection, unless a limit is reached; then it is reset."""
        stream = Stream(sock)
        if len(self._connections) >= self._max_connections:
            self._refuse(
                stream,
                frontend,
                f"connection limit of this run reached ({self._max_connections})",
            )
            return False
        if not self._share.acquire():
            self._refuse(
                stream,
                frontend,
                f"this session's share of the process's file descriptors is used up "
                f"({self._share.held} in use)",
            )
            return False
        connection = Connection(self, stream)
        task = self._loop.create_task(self._serve(connection, frontend))
        self._connections[task] = connection
        self._half_open[connection] = task
        task.add_done_callback(self._on_task_done)
        if len(self._half_open) > _MAX_HALF_OPEN:
            # A program that opens connections and sends nothing loses the oldest one.
            oldest = next(iter(self._half_open))
            self._half_open.pop(oldest).cancel()
        return True

    def _refuse(self, stream: Stream, frontend: Frontend, reason: str) -> None:
        """Reset a connection that exceeds a limit and record the reason."""
        host, port = frontend.destination_of(stream.sock)
        attempt = Attempt(frontend=frontend.name, host=host, port=port)
        attempt.verdict = Verdict(allowed=False, rule="budget", reason=reason)
        stream.abort()
        self.ledger.record(attempt)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        connection = self._connections.pop(task)
        self._half_open.pop(connection, None)
        # A task that is cancelled before its first step never reaches its own clean-up.
        connection.close(abort=True)
        self._share.release()

    def _pause(self, listener: socket.socket, frontend: Frontend) -> None:
        """Stop accepting for a moment: without file descriptors the event loop would spin."""
        self._loop.remove_reader(listener.fileno())

        def resume() -> None:
            if not self._closed:
                self._loop.add_reader(listener.fileno(), self._accept, listener, frontend)

        self._loop.call_later(_RETRY_ACCEPT_S, resume)

    async def _serve(self, connection: Connection, frontend: Frontend) -> None:
        abort = True
        try:
            await frontend.serve(connection)
            abort = False
        except RefusedError as exc:
            connection.record_refusal(exc)
        except DialError:
            pass
        except OSError as exc:
            if not is_disconnect(exc):
                _LOGGER.warning("%s frontend: %s", frontend.name, exc)
        except Exception:
            # A bug that one connection reaches must not end the frontend for the others.
            _LOGGER.exception(
                "%s frontend: internal error while serving a connection", frontend.name
            )
        finally:
            connection.close(abort=abort)
