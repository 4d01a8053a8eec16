"""Without nf_tables only the proxies work, and the reported isolation shows it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S
from tests.network.inside import run_inside

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
    """Send each rule to an unknown netfilter subsystem, so that it fails as without the module."""
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
out["direct"] = attempt(send_and_read, ("allowed.test", given["port"]))
out["address"] = attempt(send_and_read, ("93.184.216.34", 80))
out["metadata"] = attempt(send_and_read, ("169.254.169.254", 80))
out["loopback"] = attempt(send_and_read, ("127.0.0.1", given["port"]))
out["proxy"] = attempt(connect, "allowed.test")
out["socks"] = attempt(socks, "allowed.test", given["port"])
out["proxy refused"] = attempt(connect, "other.test")
out["socks refused"] = attempt(socks, "other.test", given["port"])
out["name refused"] = attempt(send_and_read, ("other.test", given["port"]))
"""


@pytest.mark.threat(76)
@pytest.mark.usefixtures("no_nf_tables")
@pytest.mark.parametrize("first", ["session", "call"])
async def test_only_the_proxies_work(
    open_isolated: OpenSession, served: Services, resolver: Resolver, dialled: Dialled, first: str
) -> None:
    """The first allow-list comes from the session or from a call."""
    policy = {"network_mode": "allowlist", "network_allowlist": ALLOW}
    given = {"port": served.echo.port}
    async with open_isolated(**(policy if first == "session" else {})) as session:
        seen = await run_inside(session, _EACH, given=given, **(policy if first == "call" else {}))
        assert seen.proc.isolation.egress == "proxy-only"
        if first == "session":
            assert session.isolation.egress == "proxy-only"
            assert "proxy-only" in str(session.isolation)
        blocked = await run_inside(session, 'out["x"] = 1', network_mode="blocked")
        assert blocked.proc.isolation.egress == "kernel"
    found = {name: result for name, (result, _) in seen.out.items()}
    assert max(took for _, took in seen.out.values()) < SOON_S
    assert (found.pop("proxy"), found.pop("socks")) == ("hellobye", 0)
    assert (found.pop("proxy refused"), found.pop("socks refused")) == ("EACCES", 2)
    assert set(found.values()) <= {"ENETUNREACH", "ECONNREFUSED", "gaierror"}, found
    assert dialled.addresses == ["127.0.0.1"] * 2
    assert set(resolver.queries) == {"allowed.test"}


@pytest.mark.usefixtures("no_nf_tables")
async def test_ordinary_clients_work_through_the_variables(
    open_isolated: OpenSession, served: Services
) -> None:
    async with open_isolated() as session:
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


async def _masked(open_isolated: OpenSession) -> bool:
    """Return whether /proc is masked here, so that strict=True fails before the network."""
    async with open_isolated() as session:
        return session.isolation.proc == "inherited"


@pytest.mark.spec("G1")
@pytest.mark.usefixtures("no_nf_tables")
async def test_strict_refuses_with_the_remedy(open_isolated: OpenSession) -> None:
    with pytest.raises(sb.BackendUnavailableError) as raised:
        await open_isolated(network_mode="allowlist", network_allowlist=ALLOW, strict=True).open()
    remedy = "procMount" if await _masked(open_isolated) else "modprobe nf_tables"
    assert remedy in str(raised.value.hint)


@pytest.mark.spec("G1")
@pytest.mark.usefixtures("no_nf_tables")
async def test_strict_refuses_a_call_and_the_session_continues(open_isolated: OpenSession) -> None:
    if await _masked(open_isolated):
        with pytest.raises(sb.BackendUnavailableError):
            await open_isolated(strict=True).open()
        return
    async with open_isolated(strict=True) as session:
        with pytest.raises(sb.BackendUnavailableError) as raised:
            await session.run("true", network_mode="allowlist", network_allowlist=ALLOW)
        assert "modprobe" in str(raised.value.hint)
        assert (await session.exec("echo alive")).stdout == "alive\n"
