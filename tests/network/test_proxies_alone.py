"""A kernel without nf_tables: the proxies serve, all else is blocked, and we say so."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from tests.network.inside import look

from union import sandbox as sb
from union.sandbox._codecs.netlink import NETLINK_NETFILTER
from union.sandbox.on_device import _network, _probe

if TYPE_CHECKING:
    from tests.conftest import OpenSession
    from tests.network.conftest import Dialled, Resolver
    from tests.network.services import Services

pytestmark = pytest.mark.spec("F3", "F4", "F8")

ALLOW = ["allowed.test", "127.0.0.1"]


@pytest.fixture
def no_nf_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send each rule to a part of netfilter that no kernel has: it fails as without the module."""
    real = _network.egress_setup

    def setup(*args, **options):
        message = struct.pack("=IHHII", 20, 0x7F00, 5, 1, 0) + struct.pack(">BBH", 2, 0, 0)
        return tuple(
            step._replace(data=message, acks=1) if step.protocol == NETLINK_NETFILTER else step
            for step in real(*args, **options)
        )

    monkeypatch.setattr(_network, "egress_setup", setup)
    monkeypatch.setattr(_probe, "_known", {})
    monkeypatch.setattr(_probe, "verified", set())


_EACH = """
def connect(name):
    with tunnel(name, given["port"]) as s:
        s.sendall(b"hello")
        s.shutdown(socket.SHUT_WR)
        return read_all(s).decode()
out["direct"] = attempt(ask, ("allowed.test", given["port"]))
out["address"] = attempt(ask, ("93.184.216.34", 80))
out["metadata"] = attempt(ask, ("169.254.169.254", 80))
out["loopback"] = attempt(ask, ("127.0.0.1", given["port"]))
out["proxy"] = attempt(connect, "allowed.test")
out["socks"] = attempt(socks, "allowed.test", given["port"])
out["proxy refused"] = attempt(connect, "other.test")
out["socks refused"] = attempt(socks, "other.test", given["port"])
out["name refused"] = attempt(ask, ("other.test", given["port"]))
"""


@pytest.mark.threat(76)
@pytest.mark.usefixtures("no_nf_tables")
@pytest.mark.parametrize("first", ["session", "call"])
async def test_the_proxies_serve_and_nothing_else_does(
    jailed: OpenSession, served: Services, resolver: Resolver, dialled: Dialled, first: str
) -> None:
    """Whether the session or a call is the first to ask for a list."""
    policy = {"network_mode": "allowlist", "network_allowlist": ALLOW}
    given = {"port": served.echo.port}
    async with jailed(**(policy if first == "session" else {})) as session:
        seen = await look(session, _EACH, given=given, **(policy if first == "call" else {}))
        assert seen.proc.isolation.egress == "proxy-only"
        if first == "session":
            assert session.isolation.egress == "proxy-only"
            assert "proxy-only" in str(session.isolation)
        blocked = await look(session, 'out["x"] = 1', network_mode="blocked")
        assert blocked.proc.isolation.egress == "kernel"
    found = {name: result for name, (result, _) in seen.out.items()}
    assert max(took for _, took in seen.out.values()) < 2
    assert (found.pop("proxy"), found.pop("socks")) == ("hellobye", 0)
    assert (found.pop("proxy refused"), found.pop("socks refused")) == ("EACCES", 2)
    assert set(found.values()) <= {"ENETUNREACH", "ECONNREFUSED", "gaierror"}, found
    assert dialled.addresses == ["127.0.0.1"] * 2
    assert set(resolver.queries) == {"allowed.test"}


@pytest.mark.usefixtures("no_nf_tables")
async def test_ordinary_clients_work_through_the_variables(
    jailed: OpenSession, served: Services
) -> None:
    async with jailed() as session:
        proc = await session.run(
            f"curl -sS https://allowed.test:{served.https.port}/hello && "
            f"git clone -q https://allowed.test:{served.https.port}/repo.git && "
            f"! curl -sS --noproxy '*' https://allowed.test:{served.https.port}/hello",
            network_mode="allowlist",
            network_allowlist=ALLOW,
            timeout_s=20,
        )
        stdout, stderr = await proc.communicate_text()
        assert proc.returncode == 0, stderr
        assert stdout == f"hello from allowed.test:{served.https.port}"


async def _masked(jailed: OpenSession) -> bool:
    """Whether this place masks /proc, so that strict=True rules it out before any network."""
    async with jailed() as session:
        return session.isolation.proc == "inherited"


@pytest.mark.spec("G1")
@pytest.mark.usefixtures("no_nf_tables")
async def test_strict_refuses_with_the_remedy(jailed: OpenSession) -> None:
    with pytest.raises(sb.BackendUnavailableError) as raised:
        await jailed(network_mode="allowlist", network_allowlist=ALLOW, strict=True).open()
    remedy = "procMount" if await _masked(jailed) else "modprobe nf_tables"
    assert remedy in str(raised.value.hint)


@pytest.mark.spec("G1")
@pytest.mark.usefixtures("no_nf_tables")
async def test_strict_refuses_a_call_and_the_session_lives_on(jailed: OpenSession) -> None:
    if await _masked(jailed):
        with pytest.raises(sb.BackendUnavailableError):
            await jailed(strict=True).open()
        return
    async with jailed(strict=True) as session:
        with pytest.raises(sb.BackendUnavailableError) as raised:
            await session.run("true", network_mode="allowlist", network_allowlist=ALLOW)
        assert "modprobe" in str(raised.value.hint)
        assert (await session.exec("echo alive")).stdout == "alive\n"
