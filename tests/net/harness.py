"""An egress on plain loopback sockets, with a fake resolver and local servers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket

from union.sandbox._net.budget import Budget
from union.sandbox._net.egress import Egress
from union.sandbox._net.policy import Policy
from union.sandbox._net.upstream import UpstreamDialer
from union.sandbox._policy.rules import NetworkRules, parse_entries
from union.sandbox._policy.upstream import Upstream


def rules(allow=(), deny=()):
    return NetworkRules(
        allow=None if allow is None else parse_entries(list(allow), argument="network_allowlist"),
        deny=parse_entries(list(deny), argument="network_denylist"),
    )


def policy(allow=(), deny=(), **options):
    return Policy(rules(allow, deny), **options)


class FakeResolver:
    """Resolve names from a table; a list of lists returns another element for each query."""

    def __init__(self, table):
        self.table = table
        self.queries = []

    async def resolve(self, name):
        self.queries.append(name)
        if name not in self.table:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        answers = self.table[name]
        if answers and isinstance(answers[0], list):
            return answers.pop(0) if len(answers) > 1 else answers[0]
        return answers


def listener(host="127.0.0.1", kind=socket.SOCK_STREAM):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, kind)
    sock.bind((host, 0))
    if kind == socket.SOCK_STREAM:
        sock.listen(512)
    return sock


class EgressHarness:
    """An Egress with all its listeners, and functions that connect to them."""

    def __init__(self, policy_or_rules, *, table=None, destination=None, upstream=None, **options):
        self.decisions = []
        self.requests = []
        self.resolver = FakeResolver(table or {})
        self.destination = destination
        sockets = {
            "http": listener(),
            "socks": listener(),
            "dns_tcp": listener(),
            "dns_udp": listener(kind=socket.SOCK_DGRAM),
            "tcp_transparent": listener(),
        }
        self.ports = {name: sock.getsockname()[1] for name, sock in sockets.items()}
        options.setdefault("resolver", self.resolver)
        options.setdefault("share", Budget(4096).share())
        if isinstance(upstream, Upstream):
            upstream = UpstreamDialer(upstream, resolver=self.resolver)
        self.egress = Egress(
            policy_or_rules if isinstance(policy_or_rules, Policy) else Policy(policy_or_rules),
            upstream=upstream,
            on_decision=self.decisions.append,
            on_request=self.requests.append,
            destination=self._destination,
            **sockets,
            **options,
        )
        self.egress.start()

    def _destination(self, sock):
        if self.destination is None:
            raise OSError("not redirected")
        host, port = self.destination
        return ipaddress.ip_address(host), port

    async def connect(self, listener_name):
        return await asyncio.open_connection("127.0.0.1", self.ports[listener_name])

    async def http(self, data, *, end=True):
        """Send bytes to the HTTP frontend and return the whole response."""
        reader, writer = await self.connect("http")
        writer.write(data)
        if end:
            writer.write_eof()
        response = await asyncio.wait_for(read_all(reader), 40)
        writer.close()
        return response

    async def aclose(self):
        await self.egress.aclose()


async def read_all(reader):
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(65536):
            data += piece
    return bytes(data)


@contextlib.asynccontextmanager
async def serving(handler, host="127.0.0.1"):
    """Run a server on loopback; yield its port."""

    async def handle(reader, writer):
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, host, 0, backlog=512)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echo(reader, writer):
    """Send back received data and end after the client has ended."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
