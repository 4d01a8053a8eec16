"""Names: which are resolved, and to which addresses they may resolve."""

# ruff: noqa: E501 - a program keeps each attempt on one line
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S
from tests.network.conftest import PUBLIC
from tests.network.inside import run_inside

if TYPE_CHECKING:
    from tests.network.conftest import Dialled, Resolver
    from tests.network.services import Services

    from union import sandbox as sb

pytestmark = pytest.mark.spec("F3", "F5")

_QUERY = """
def query(name, kind=1):
    labels = b"".join(bytes((len(l),)) + l for l in name.encode().split(b"."))
    return struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\\0" + struct.pack(">2H", kind, 1)
def by_udp(name, kind=1, server=DNS):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        s.connect(server)
        s.send(query(name, kind))
        return s.recv(4096)[3] & 15
def by_tcp(name, kind=1):
    with socket.create_connection(DNS, timeout=20) as s:
        data = query(name, kind)
        s.sendall(len(data).to_bytes(2, "big") + data)
        return s.recv(4096)[5] & 15
"""


@pytest.mark.threat(80)
async def test_names_that_are_not_allowed_are_not_resolved(
    net: sb.Session, resolver: Resolver
) -> None:
    """A program can use a name with libc, both proxies, and DNS over UDP and TCP."""
    code = (
        _QUERY
        + """
for name in given["names"]:
    out[f"libc {name}"] = attempt(socket.getaddrinfo, name, 80)
    out[f"http {name}"] = attempt(status, f"CONNECT {name}:443 HTTP/1.1\\r\\n\\r\\n")
    out[f"plain {name}"] = attempt(status, f"GET http://{name}/ HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n")
    out[f"socks {name}"] = attempt(socks, name, 80)
    for kind in (1, 28, 16, 5, 15, 33, 65, 255):
        out[f"udp {kind} {name}"] = attempt(by_udp, name, kind)
    out[f"tcp {name}"] = attempt(by_tcp, name)
    out[f"another server {name}"] = attempt(by_udp, name, server=("192.0.2.53", 53))
"""
    )
    names = ["other.test", "c2VjcmV0.other.test", "c2VjcmV0.allowed.test", "a.b.sub.test",
             "pattern.test", "localhost.other.test"]  # fmt: skip
    seen = await run_inside(
        net, code, allow=["allowed.test", "*.pattern.test"], given={"names": names}
    )
    expected = {"libc": "gaierror", "http": 403, "plain": 403, "socks": 2, "udp": 3, "tcp": 3,
                "another": "ECONNREFUSED"}  # fmt: skip
    for name, (found, took) in seen.out.items():
        assert found == expected[name.split()[0]], (name, found)
        assert took < SOON_S
    assert resolver.queries == []
    assert {d.host.lower() for d in seen.refusals} == {name.lower() for name in names}


@pytest.mark.threat(80)
async def test_an_allowed_name_is_resolved_only_when_it_is_connected_to(
    net: sb.Session, served: Services, resolver: Resolver
) -> None:
    """A lookup returns synthetic addresses and sends no query."""
    code = """
    infos = socket.getaddrinfo("allowed.test", given["port"], type=socket.SOCK_STREAM)
    out["addresses"] = [info[4][0] for info in infos]
    out["again"] = socket.gethostbyname("ALLOWED.test.")
    out["reverse"] = socket.gethostbyaddr(out["again"])[0]
    """
    allow = ["allowed.test", "127.0.0.1"]
    seen = await run_inside(net, code, allow=allow, given={"port": served.echo.port})
    assert resolver.queries == []
    assert seen.out["again"] in seen.out["addresses"]
    assert seen.out["reverse"] == "allowed.test"
    assert not {"127.0.0.1", "::1"} & set(seen.out["addresses"])


@pytest.mark.threat(91)
@pytest.mark.parametrize("frontend", ["tcp", "http", "socks"])
async def test_a_name_with_an_internal_address_is_refused(
    net: sb.Session, served: Services, resolver: Resolver, dialled: Dialled, frontend: str
) -> None:
    """Loopback, private, link-local, unspecified, and their IPv6 spellings."""
    inner = ["127.0.0.1", "10.1.2.3", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.1.1",
             "::1", "fd00::1", "fe80::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"]  # fmt: skip
    names = [f"n{number}.allowed.test" for number in range(len(inner))]
    resolver.table |= {name: [address] for name, address in zip(names, inner, strict=True)}
    code = """
    ways = {"tcp": lambda name: send_and_read((name, given["port"])),
            "http": lambda name: tunnel(name, given["port"]).recv(10),
            "socks": lambda name: socks(name, given["port"])}
    for name in given["names"]:
        out[name] = attempt(ways[given["frontend"]], name)
    """
    given = {"names": names, "port": served.echo.port, "frontend": frontend}
    seen = await run_inside(net, code, allow=["*.allowed.test"], given=given)
    expected = {"tcp": "ECONNRESET", "http": "EACCES", "socks": 2}[frontend]
    assert {found for found, _ in seen.out.values()} == {expected}, seen.out
    assert max(took for _, took in seen.out.values()) < SOON_S
    assert {(d.door, d.rule) for d in seen.refusals} == {(frontend, "internal")}
    assert all(d.suggestion for d in seen.refusals)
    assert dialled.addresses == []
    assert served.echo.connections == 0


@pytest.mark.threat(92)
async def test_rebinding_is_refused(
    net: sb.Session, served: Services, resolver: Resolver, dialled: Dialled
) -> None:
    """There is one lookup per connection, and a checked address is dialled."""
    dialled.to_loopback.add(PUBLIC)
    resolver.turns["rebind.test"] = [[PUBLIC], ["127.0.0.1"], [PUBLIC, "127.0.0.1"], ["::1"]]
    code = """
    socket.gethostbyname("rebind.test")
    for turn in range(4):
        out[turn] = attempt(send_and_read, ("rebind.test", given["port"]))
    """
    seen = await run_inside(net, code, allow=["rebind.test"], given={"port": served.echo.port})
    found = [found for found, _ in seen.out.values()]
    assert found == ["hellobye", "ECONNRESET", "hellobye", "ECONNRESET"]
    assert resolver.queries == ["rebind.test"] * 4
    assert dialled.addresses == [PUBLIC, PUBLIC], "an internal address is never dialled"


@pytest.mark.threat(85, 86, 87)
@pytest.mark.parametrize(
    "entry, requested, reached",
    [
        ("allowed.test", "ALLOWED.Test", True),
        ("Allowed.TEST.", "allowed.test", True),
        ("allowed.test", "allowed.test.", True),
        ("allowed.test", "sub.allowed.test", False),
        ("*.allowed.test", "sub.allowed.test", True),
        ("*.allowed.test", "allowed.test", False),
        ("*.allowed.test", "suballowed.test", False),
        ("allowed.test", "notallowed.test", False),
        ("allowed.test", "allowed.test.other.test", False),
        ("allowed.test", "allowed-test", False),
        ("bücher.test", "xn--bcher-kva.test", True),
        ("xn--bcher-kva.test", "bücher.test", True),
        ("BÜCHER.test", "XN--BCHER-KVA.TEST", True),
        ("bucher.test", "bücher.test", False),
    ],
)
async def test_which_names_an_entry_covers(
    net: sb.Session,
    served: Services,
    resolver: Resolver,
    entry: str,
    requested: str,
    *,
    reached: bool,
) -> None:
    """The result is the same for every frontend."""
    for name in ("suballowed.test", "notallowed.test", "allowed.test.other.test", "allowed-test"):
        resolver.table[name] = ["127.0.0.1"]
    code = """
    name, port = given["name"], given["port"]
    wire = name if name.isascii() else name.encode("idna").decode()
    def connect():
        with tunnel(wire, port):
            return "open"
    out["tcp"] = attempt(send_and_read, (wire, port))[0] == "hellobye"
    out["http"] = attempt(connect)[0] == "open"
    out["socks"] = attempt(socks, name, port)[0] == 0
    """
    given = {"name": requested, "port": served.echo.port}
    seen = await run_inside(net, code, allow=[entry, "127.0.0.1"], given=given)
    assert seen.out == {"tcp": reached, "http": reached, "socks": reached}
