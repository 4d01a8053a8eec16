"""Attacks on the host's network from a blocked sandbox; an open one is the positive control."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import os
import secrets
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.escape.inside import attack, outside, program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import OpenSession

    from union import sandbox as sb

pytestmark = pytest.mark.spec("F1")

_CONNECT = """
def connect(family, kind, address):
    with socket.socket(family, kind) as s:
        s.settimeout(2)
        s.connect(tuple(address) if isinstance(address, list) else address)
        kind == socket.SOCK_DGRAM and s.send(b"from inside")
for name, (family, kind, address) in given["plants"].items():
    out[name] = attempt(connect, family, kind, address)
"""


def _of_datagrams(jail: sb.Session) -> str:
    """Return the error of local datagram sockets: with the id of the caller there are none."""
    return "EPROTONOSUPPORT" if jail.isolation.ids == "caller" else ""


@contextmanager
def _listening(family: int, kind: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family, kind) as sock:
        sock.bind(address)  # type: ignore[arg-type]  # as the family wants it
        if kind == socket.SOCK_STREAM:
            sock.listen()
        sock.setblocking(False)
        yield sock


def _silent(sock: socket.socket) -> bool:
    try:
        if sock.type == socket.SOCK_STREAM:
            sock.accept()[0].close()
        else:
            sock.recv(100)
    except BlockingIOError:
        return True
    return False


@pytest.mark.threat(76, 77)
@pytest.mark.parametrize(
    "family, address",
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "0.0.0.0")],
    ids=["v4", "v6", "any"],
)
@pytest.mark.spec("F2")
async def test_a_listener_on_the_hosts_loopback_is_unreachable(
    jail: sb.Session, family: int, address: str
) -> None:
    """Plain TCP; a call with network_mode='open' reaches the same plant."""
    with _listening(family, socket.SOCK_STREAM, (address, 0)) as plant:
        port = plant.getsockname()[1]
        target = "127.0.0.1" if address == "0.0.0.0" else address
        given = {"plants": {"tcp": (family, socket.SOCK_STREAM, (target, port))}}
        assert (await attack(jail, _CONNECT, given=given))["tcp"] == "ECONNREFUSED"
        assert _silent(plant)
        opened = await attack(jail, _CONNECT, given=given, network_mode="open")
        assert opened["tcp"] == "ok"
        assert not _silent(plant)


@pytest.mark.threat(76, 80)
async def test_a_datagram_does_not_reach_the_host(jail: sb.Session) -> None:
    """UDP, and from an open call as the control."""
    with _listening(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)) as plant:
        given = {"plants": {"udp": (socket.AF_INET, socket.SOCK_DGRAM, plant.getsockname())}}
        await attack(jail, _CONNECT, given=given)
        assert _silent(plant)
        await attack(jail, _CONNECT, given=given, network_mode="open")
        assert not _silent(plant)


@pytest.mark.threat(76, 80)
async def test_no_address_but_loopback_can_be_reached(jail: sb.Session) -> None:
    """Fails in the kernel, at once; no resolver is asked."""
    code = (
        _CONNECT
        + """
out["name"] = attempt(socket.getaddrinfo, "example.com", 80)
out["resolv"] = [line for line in read("/etc/resolv.conf").splitlines() if "nameserver" in line]
out["ping"] = attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1).sendto(b"\\x08\\0\\0\\0\\0\\0\\0\\0", ("192.0.2.1", 0)))
"""
    )
    places = {"v4": (2, 1, ("192.0.2.1", 80)), "v6": (10, 1, ("2001:db8::1", 80)),
              "metadata": (2, 1, ("169.254.169.254", 80)), "udp": (2, 2, ("192.0.2.1", 53)),
              "multicast": (2, 2, ("224.0.0.1", 5353)), "broadcast": (2, 1, ("255.255.255.255", 80)),
              "mapped": (10, 1, ("::ffff:192.0.2.1", 80))}  # fmt: skip
    found = await attack(jail, code, given={"plants": places}, timeout_s=10)
    assert found.pop("resolv") == []
    assert found.pop("name") not in {"ok", "TimeoutError"}
    assert found.pop("ping") in {"ENETUNREACH", "EACCES", "EPERM"}
    assert set(found.values()) <= {"ENETUNREACH", "EACCES"}, found


@pytest.mark.threat(78)
async def test_abstract_sockets_of_the_host_are_unreachable(jail: sb.Session) -> None:
    """Stream and datagram; a bare child reaches them."""
    name = f"\0sbx-plant-{secrets.token_hex(6)}"
    with (
        _listening(socket.AF_UNIX, socket.SOCK_STREAM, name) as stream,
        _listening(socket.AF_UNIX, socket.SOCK_DGRAM, name + "d") as datagram,
    ):
        given = {"plants": {"stream": (1, 1, name), "datagram": (1, 2, name + "d")}}
        found = await attack(jail, _CONNECT, given=given)
        assert found.pop("stream") == "ECONNREFUSED"
        assert found == {"datagram": _of_datagrams(jail) or "ECONNREFUSED"}
        assert _silent(stream)
        assert _silent(datagram)
        assert await outside(_CONNECT, given=given) == {"stream": "ok", "datagram": "ok"}


@pytest.mark.threat(79)
@pytest.mark.parametrize("mode", ["blocked", "open"])
async def test_path_sockets_of_the_host_are_unreachable(jail: sb.Session, mode: str) -> None:
    """In /tmp and /dev/shm, open to everybody: out of view in either mode."""
    paths = [f"{place}/sbx-{secrets.token_hex(4)}" for place in ("/tmp", "/dev/shm")]
    with (
        _listening(socket.AF_UNIX, socket.SOCK_STREAM, paths[0]) as one,
        _listening(socket.AF_UNIX, socket.SOCK_DGRAM, paths[1]) as two,
    ):
        try:
            for path in paths:
                Path(path).chmod(0o777)
            given = {"plants": {paths[0]: (1, 1, paths[0]), paths[1]: (1, 2, paths[1])}}
            found = await attack(jail, _CONNECT, given=given, network_mode=mode)
            assert found == {paths[0]: "ENOENT", paths[1]: _of_datagrams(jail) or "ENOENT"}
            assert _silent(one)
            assert _silent(two)
            assert set((await outside(_CONNECT, given=given)).values()) == {"ok"}
        finally:
            for path in paths:
                os.unlink(path)


@pytest.mark.threat(76)
async def test_the_network_cannot_be_reconfigured(jail: sb.Session) -> None:
    """No route, address or interface can be added; loopback is the only one."""
    code = """
    import fcntl
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    out["flags"] = attempt(fcntl.ioctl, s, 0x8914, struct.pack("16sH14x", b"lo", 0))
    out["address"] = attempt(fcntl.ioctl, s, 0x8916, struct.pack("16sHH4s8x", b"lo", 2, 0, b"\\x0a\\0\\0\\1"))
    route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    route.send(struct.pack("IHHII", 44, 16, 0x605, 1, 0) + struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH", 12, 3) + b"plant0\\0\\0")
    out["link"] = errno.errorcode.get(-struct.unpack_from("i", route.recv(4096), 16)[0], "ok")
    out["names"] = [name for _, name in socket.if_nameindex()]
    """
    found = await attack(jail, code)
    assert found.pop("names") == ["lo"]
    assert set(found.values()) == {"EPERM"}, found


@pytest.mark.threat(77, 98)
@pytest.mark.spec("B8")
async def test_loopback_works_inside_and_is_each_runs_own(jailed: OpenSession) -> None:
    """A server of one run is not seen by another run, session, or the host."""
    serve = """
    s = socket.create_server(("127.0.0.1", 38999))
    socket.create_connection(("127.0.0.1", 38999)).close()
    print("serving", flush=True)
    time.sleep(20)
    """
    given = {"plants": {"tcp": (2, 1, ("127.0.0.1", 38999))}}
    async with jailed() as one, jailed() as two:
        proc = await one.run(program(serve), script_type="python", stdout=True, timeout_s=25)
        assert await anext(proc.iter_stdout_lines()) == "serving"
        for session in (one, two):
            assert (await attack(session, _CONNECT, given=given))["tcp"] == "ECONNREFUSED"
        assert (await outside(_CONNECT, given=given))["tcp"] == "ECONNREFUSED"
        assert proc.returncode is None
