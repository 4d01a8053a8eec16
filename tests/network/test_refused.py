"""Destinations outside the allow-list are unreachable by any means."""

# ruff: noqa: E501 - an attack program keeps each attempt on one line
from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S
from tests.network.conftest import received_nothing
from tests.network.inside import run_inside

if TYPE_CHECKING:
    from tests.network.conftest import Dialled, Resolver
    from tests.network.services import Services

    from union import sandbox as sb

pytestmark = pytest.mark.spec("F3", "F5", "F8")

ALLOW = ["allowed.test", "8.8.4.4:53"]
FAILED = {"ECONNRESET", "ECONNREFUSED", "EPIPE", "ENETUNREACH", "EHOSTUNREACH", "EACCES", "EINVAL",
          "gaierror"}  # fmt: skip
METADATA = {
    "plain": "169.254.169.254",
    "mapped": "::ffff:169.254.169.254",
    "mapped hex": "::ffff:a9fe:a9fe",
    "decimal": "2852039166",
    "octal": "0251.0376.0251.0376",
    "hex": "0xa9.0xfe.0xa9.0xfe",
    "one hex": "0xa9fea9fe",
    "short": "169.254.43518",
    "mixed": "0xa9.254.0251.254",
    "nat64": "64:ff9b::a9fe:a9fe",
    "aws v6": "fd00:ec2::254",
    "google v6": "fd20:ce::254",
}
INTERNAL = {
    "ten": "10.0.0.1",
    "oneninetwo": "192.168.0.1",
    "oneseventwo": "172.17.0.1",
    "shared": "100.64.0.1",
    "all": "0.0.0.0",
    "broadcast": "255.255.255.255",
    "private v6": "fd00::1",
    "link v6": "fe80::1",
    "public": "93.184.216.34",
    "public v6": "2606:2800:220:1:248:1893:25c8:1946",
    "allowed address, other port": "8.8.4.4",
    "an unassigned synthetic address": "198.18.77.77",
}

_CONNECT = """
def connect(host, port):
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as s:
        s.settimeout(5)
        s.connect(address)
        s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        return "served" if s.recv(10) else "ECONNRESET"
for name, (host, port) in given["places"].items():
    out[name] = attempt(connect, host, port)
"""


@pytest.mark.threat(76, 88, 89, 93)
@pytest.mark.parametrize("places", [METADATA, INTERNAL], ids=["metadata", "addresses"])
async def test_a_raw_connect_to_an_address_that_is_not_allowed(
    net: sb.Session, dialled: Dialled, resolver: Resolver, places: dict[str, str]
) -> None:
    """Every spelling is refused without a lookup or a connection."""
    given = {"places": {name: (host, 80) for name, host in places.items()}}
    seen = await run_inside(net, _CONNECT, allow=ALLOW, given=given)
    assert {found for found, _ in seen.out.values()} <= FAILED, seen.out
    assert max(took for _, took in seen.out.values()) < SOON_S
    assert dialled.addresses == []
    assert resolver.queries == []
    assert not seen.grants


async def test_the_refusal_names_the_address_whatever_its_spelling(net: sb.Session) -> None:
    given = {"places": {"hex": ("0xa9fea9fe", 80), "mapped": ("::ffff:169.254.169.254", 8080)}}
    seen = await run_inside(net, _CONNECT, allow=ALLOW, given=given)
    assert [(d.door, d.host, d.port, d.suggestion) for d in seen.refusals] == [
        ("tcp", "169.254.169.254", 80, "169.254.169.254:80"),
        ("tcp", "169.254.169.254", 8080, "169.254.169.254:8080"),
    ]


@pytest.mark.threat(77)
async def test_the_hosts_own_addresses_are_unreachable(
    net: sb.Session, served: Services, host_sockets, dialled: Dialled
) -> None:
    """Test loopback v4 and v6, a listener on all addresses, and this machine's address."""
    listening = {"v4": host_sockets(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
                 "any": host_sockets(socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0)),
                 "v6": host_sockets(socket.AF_INET6, socket.SOCK_STREAM, ("::", 0))}  # fmt: skip
    ports = {name: sock.getsockname()[1] for name, sock in listening.items()}
    places = {"v4": ("127.0.0.1", ports["v4"]), "other loopback": ("127.7.7.7", ports["any"]),
              "all": ("0.0.0.0", ports["any"]), "v6": ("::1", ports["v6"]),
              "mapped": ("::ffff:127.0.0.1", ports["v4"])}  # fmt: skip
    if own := _own_address():
        places["own"] = (own, ports["any"])
    seen = await run_inside(net, _CONNECT, allow=ALLOW, given={"places": places})
    assert {found for found, _ in seen.out.values()} <= FAILED, seen.out
    assert all(map(received_nothing, listening.values()))
    assert dialled.addresses == []


def _own_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(sock.getsockname()[0])


@pytest.mark.threat(88, 89, 91)
async def test_the_proxies_refuse_addresses_in_every_spelling(
    net: sb.Session, served: Services, dialled: Dialled, resolver: Resolver
) -> None:
    """Test CONNECT, plain HTTP and SOCKS to metadata and to the host's loopback."""
    code = """
    for name, (host, port) in given["places"].items():
        written = f"[{host}]" if ":" in host else host
        out[f"connect {name}"] = attempt(status, f"CONNECT {written}:{port} HTTP/1.1\\r\\nHost: {written}:{port}\\r\\n\\r\\n")
        out[f"plain {name}"] = attempt(status, f"GET http://{written}:{port}/ HTTP/1.1\\r\\nHost: {written}:{port}\\r\\n\\r\\n")
        out[f"socks {name}"] = attempt(socks, host, port)
    """
    port = served.http.port
    places = {name: (host, 80) for name, host in METADATA.items()}
    places |= {host: (host, port) for host in ("127.0.0.1", "0x7f000001", "0177.1", "2130706433",
                                               "127.1", "0", "::1", "::ffff:7f00:1")}  # fmt: skip
    seen = await run_inside(net, code, allow=ALLOW, given={"places": places})
    for name, (found, took) in seen.out.items():
        assert found in ({2} if name.startswith("socks") else {403, 400}), (name, found)
        assert took < SOON_S
    assert dialled.addresses == []
    assert resolver.queries == []
    assert served.http.connections == 0


@pytest.mark.threat(76, 80)
async def test_no_datagram_leaves(net: sb.Session, host_sockets) -> None:
    """Datagrams to loopback, name servers and other addresses are refused immediately."""
    sock = host_sockets(socket.AF_INET, socket.SOCK_DGRAM, ("0.0.0.0", 0))
    sock6 = host_sockets(socket.AF_INET6, socket.SOCK_DGRAM, ("::1", 0))
    code = """
    def datagram(family, host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.settimeout(1)
            s.connect((host, port))
            s.send(b"from inside")
            return s.recv(100).decode("latin-1")
    for host, port in given["places"]:
        out[host] = attempt(datagram, socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)
    """
    port = sock.getsockname()[1]
    places = [("127.0.0.1", port), ("::1", sock6.getsockname()[1]), ("192.0.2.1", 53),
              ("8.8.4.4", 53), ("10.0.0.1", port), ("169.254.169.254", 123), ("2001:db8::1", 443),
              ("224.0.0.251", 5353)]  # fmt: skip
    if own := _own_address():
        places.append((own, port))
    seen = await run_inside(net, code, allow=ALLOW, given={"places": places})
    multicast, _ = seen.out.pop("224.0.0.251")
    assert multicast in FAILED | {"TimeoutError"}
    assert {found for found, _ in seen.out.values()} <= FAILED, seen.out
    assert received_nothing(sock)
    assert received_nothing(sock6)


@pytest.mark.threat(76)
async def test_no_raw_packet_or_ping_socket(net: sb.Session) -> None:
    """Other address families are refused too."""
    code = """
    def opened(family, kind, protocol=0):
        socket.socket(family, kind, protocol).close()
    def ping():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as s:
            s.sendto(b"\\x08\\0\\0\\0\\0\\0\\0\\0", ("192.0.2.1", 0))
    out["ping"] = attempt(ping)
    out["raw"] = attempt(opened, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    out["raw tcp"] = attempt(opened, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)
    out["raw v6"] = attempt(opened, socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    out["packet"] = attempt(opened, socket.AF_PACKET, socket.SOCK_RAW, 0x300)
    out["packet datagram"] = attempt(opened, socket.AF_PACKET, socket.SOCK_DGRAM, 0x300)
    out["vsock"] = attempt(opened, socket.AF_VSOCK, socket.SOCK_STREAM)
    out["nftables"] = attempt(opened, socket.AF_NETLINK, socket.SOCK_RAW, 12)
    """
    seen = await run_inside(net, code, allow=ALLOW)
    refused = {"EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"}
    assert seen.out.pop("nftables")[0] in refused | {None}, "opening the socket changes nothing"
    assert {found for found, _ in seen.out.values()} <= refused, seen.out


@pytest.mark.threat(76)
async def test_the_rules_cannot_be_removed_from_inside(net: sb.Session, dialled: Dialled) -> None:
    """Try to delete the table and the route, and to take loopback down."""
    code = """
    def send(protocol, kind, body):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as s:
            s.settimeout(1)
            s.send(struct.pack("=IHHII", 16 + len(body), kind, 5, 1, 0) + body)
            code = -struct.unpack_from("=i", s.recv(4096), 16)[0]
            if code:
                raise OSError(code, "refused")
    flush = struct.pack("=IHHII", 20, 0x10, 1, 0, 0) + struct.pack(">BBH", 0, 0, 10)
    out["table"] = attempt(send, 12, (10 << 8) | 2, struct.pack(">BBH", 2, 0, 0))
    out["route"] = attempt(send, 0, 25, struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 255, 0, 0, 2, 0))
    out["link"] = attempt(send, 0, 16, struct.pack("=BxHiII", 0, 0, 1, 0, 1))
    out["user namespace"] = attempt(os.unshare, 0x10000000) if hasattr(os, "unshare") else ["EPERM", 0]
    """
    seen = await run_inside(net, code, allow=ALLOW)
    assert {found for found, _ in seen.out.values()} <= {"EPERM", "EACCES", "EAFNOSUPPORT",
            "EPROTONOSUPPORT", "ENOSYS", "ENOSPC"}, seen.out  # fmt: skip


@pytest.mark.threat(78, 79)
@pytest.mark.spec("F1")
async def test_unix_sockets_of_the_host_are_unreachable(net: sb.Session, host_sockets) -> None:
    """Test abstract names and paths, stream and datagram sockets."""
    name = f"\0sbx-net-{secrets.token_hex(6)}"
    paths = [f"{place}/sbx-net-{secrets.token_hex(4)}" for place in ("/tmp", "/dev/shm")]
    made = [host_sockets(socket.AF_UNIX, socket.SOCK_STREAM, name),
            host_sockets(socket.AF_UNIX, socket.SOCK_DGRAM, name + "d"),
            host_sockets(socket.AF_UNIX, socket.SOCK_STREAM, paths[0]),
            host_sockets(socket.AF_UNIX, socket.SOCK_DGRAM, paths[1])]  # fmt: skip
    for path in paths:
        os.chmod(path, 0o777)
    code = """
    def connect(kind, address):
        with socket.socket(socket.AF_UNIX, kind) as s:
            s.connect(address)
            s.send(b"hello")
    for number, (kind, address) in enumerate(given["host_sockets"]):
        out[number] = attempt(connect, kind, address)
    """
    given = {"host_sockets": [(1, name), (2, name + "d"), (1, paths[0]), (2, paths[1])]}
    seen = await run_inside(net, code, allow=ALLOW, given=given)
    # Who shares the id of its caller has no local datagrams.
    has_datagrams = net.isolation.ids != "caller"
    assert [found for found, _ in seen.out.values()] == [
        "ECONNREFUSED",
        "ECONNREFUSED" if has_datagrams else "EPROTONOSUPPORT",
        "ENOENT",
        "ENOENT" if has_datagrams else "EPROTONOSUPPORT",
    ]
    assert all(map(received_nothing, made))


async def test_the_transparent_listener_itself_leads_nowhere(
    net: sb.Session, dialled: Dialled
) -> None:
    """A direct connection to the listener has no original destination."""
    code = """
    out["v4"] = attempt(send_and_read, ("127.0.0.1", 3129))
    out["v6"] = attempt(send_and_read, ("::1", 3129))
    out["dns"] = attempt(send_and_read, ("127.0.0.53", 53), b"\\xff\\xff" + b"x" * 100)
    """
    seen = await run_inside(net, code, allow=[*ALLOW, "127.0.0.0/8", "::1"])
    assert {found for found, _ in seen.out.values()} <= FAILED | {""}, seen.out
    assert dialled.addresses == []
    assert {d.rule for d in seen.refusals} == {"syntax"}


@pytest.mark.threat(81)
async def test_an_empty_list_allows_nothing(net: sb.Session, served: Services) -> None:
    code = """
    out["name"] = attempt(send_and_read, ("allowed.test", given["port"]))
    out["proxy"] = attempt(tunnel, "allowed.test", given["port"])
    """
    seen = await run_inside(net, code, allow=[], given={"port": served.echo.port})
    assert [found for found, _ in seen.out.values()] == ["gaierror", "EACCES"]
    assert served.echo.connections == 0
