"""Fixtures of the network tests: servers on loopback, a fake resolver, sessions."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, session_of
from tests.network.services import services

from union import sandbox as sb
from union.sandbox._net import dialer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.conftest import OpenSession
    from tests.network.services import Services

NAMES = [
    "allowed.test",
    "*.allowed.test",
    "other.test",
    "xn--bcher-kva.test",
    *sb.PYPI_HOSTS,
]
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO")
PUBLIC = "93.184.216.34"
"""An address of the internet. No test connects to it: `Dialled` redirects it to loopback."""


@pytest.fixture(scope="session")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    for tool in ("openssl", "git", "curl"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: apt-get install {tool}")
    place = tmp_path_factory.mktemp("services")
    for directory in (place, *place.parents[:2]):
        directory.chmod(0o755)
    with services(place, names=NAMES) as found:
        yield found


@pytest.fixture
def served(_served: Services, monkeypatch: pytest.MonkeyPatch) -> Services:
    """Return the servers. Sessions opened in this test trust their certificate authority."""
    for name in CA_VARIABLES:
        monkeypatch.setenv(name, str(_served.ca))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    for site in _served.sites:
        site.requests.clear()
        site.connections = 0
    return _served


class Resolver:
    """Replaces the host's resolver: resolves names from a table and records the queries."""

    def __init__(self) -> None:
        self.table: dict[str, list[str]] = {}
        self.turns: dict[str, list[list[str]]] = {}
        self.queries: list[str] = []
        self._real = socket.getaddrinfo

    def __call__(self, host, port, *args, **options):
        if isinstance(host, bytes):
            host = host.decode()
        try:
            socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
        except OSError:
            pass
        else:
            return self._real(host, port, *args, **options)
        self.queries.append(host)
        turns = self.turns.get(host)
        answers = turns.pop(0) if turns else self.table.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [entry for text in answers for entry in self._real(text, port, *args, **options)]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """Resolve every name of the tests to loopback, where the servers are."""
    found = Resolver()
    names = [name for name in NAMES if "*" not in name]
    found.table = {name: ["127.0.0.1"] for name in [*names, "sub.allowed.test"]}
    monkeypatch.setattr(socket, "getaddrinfo", found)
    return found


class Dialled:
    """Records every outbound connection; other than to loopback it is redirected or refused."""

    def __init__(self, real) -> None:
        self.addresses: list[str] = []
        self.to_loopback: set[str] = set()
        self._real = real

    async def __call__(self, addresses, port, **options):
        self.addresses += [str(address) for address in addresses]
        first = addresses[0]
        if str(first) in self.to_loopback:
            sock, _ = await self._real([type(first)("127.0.0.1")], port, **options)
            return sock, first
        if not first.is_loopback:
            raise ConnectionRefusedError(111, "tests connect to loopback only")
        return await self._real(addresses, port, **options)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> Dialled:
    """Record the addresses that the dialer connects to."""
    found = Dialled(dialer.connect_any)
    monkeypatch.setattr(dialer, "connect_any", found)
    return found


@pytest.fixture(params=ISOLATED)
def backend(request: pytest.FixtureRequest) -> str:
    """Return the name of an isolating backend."""
    return request.param


@pytest.fixture
def open_isolated(backend: str, served: Services, resolver: Resolver) -> OpenSession:
    """Return a function that makes isolated sessions with the servers and the resolver."""
    return lambda **options: session_of(backend, **options)


@pytest.fixture
async def net(open_isolated: OpenSession) -> AsyncIterator[sb.Session]:
    """Open a session whose network is blocked unless a call sets a mode."""
    async with open_isolated() as session:
        if not await _redirects(session):
            pytest.skip("this kernel lacks nf_tables: as root, modprobe nf_tables nft_chain_nat")
        yield session


async def _redirects(session: sb.Session) -> bool:
    proc = await session.run("true", network_mode="allowlist", network_allowlist=["a.test"])
    return proc.isolation.egress == "kernel"


@pytest.fixture
def host_sockets() -> Iterator[Callable[[int, int, object], socket.socket]]:
    """Return a function that makes sockets of the host that must receive nothing."""
    made: list[tuple[socket.socket, object]] = []

    def make(family: int, kind: int, address: object) -> socket.socket:
        sock = socket.socket(family, kind)
        made.append((sock, address))
        sock.bind(address)  # type: ignore[arg-type]  # as the family wants it
        if kind == socket.SOCK_STREAM:
            sock.listen()
        sock.setblocking(False)
        return sock

    yield make
    for sock, address in made:
        sock.close()
        if isinstance(address, str) and address.startswith("/"):
            Path(address).unlink(missing_ok=True)


def received_nothing(sock: socket.socket) -> bool:
    """Return whether ``sock`` has received no connection and no datagram."""
    try:
        if sock.type == socket.SOCK_STREAM:
            sock.accept()[0].close()
        else:
            sock.recv(100)
    except BlockingIOError:
        return True
    return False
