"""The caller's proxy carries allowed connections and gets no other request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.network.conftest import PUBLIC
from tests.network.inside import run_inside
from tests.network.services import upstream_proxy

if TYPE_CHECKING:
    from tests.conftest import OpenSession
    from tests.network.conftest import Dialled, Resolver
    from tests.network.services import Services

pytestmark = pytest.mark.spec("F7")

_ARGUMENT = {"http": "network_proxy_url", "socks": "network_socks_url"}
_SCHEME = {"http": "http", "socks": "socks5h"}
_EACH_FRONTEND = """
def connect(name):
    with tunnel(name, given["port"]) as s:
        s.sendall(b"hello")
        s.shutdown(socket.SHUT_WR)
        return read_all(s).decode()
for name in given["names"]:
    out[name] = [attempt(send_and_read, (name, given["port"]))[0], attempt(connect, name)[0],
                 attempt(socks, name, given["port"])[0]]
"""


@pytest.mark.parametrize("kind", ["http", "socks"])
async def test_allowed_connections_use_the_upstream_proxy(
    open_isolated: OpenSession, served: Services, resolver: Resolver, dialled: Dialled, kind: str
) -> None:
    """All three frontends use it; a name that only the proxy resolves works too."""
    given = {"names": ["allowed.test", "known.to.proxy.test", "other.test"],
             "port": served.echo.port}  # fmt: skip
    with upstream_proxy(kind) as proxy:
        async with open_isolated(
            network_mode="allowlist",
            network_allowlist=["allowed.test", "*.proxy.test", "127.0.0.1"],
            **{_ARGUMENT[kind]: f"{_SCHEME[kind]}://127.0.0.1:{proxy.port}"},
        ) as session:
            seen = await run_inside(session, _EACH_FRONTEND, given=given)
    good = ["hellobye", "hellobye", 0]
    assert seen.out == {
        "allowed.test": good,
        "known.to.proxy.test": good,
        "other.test": ["gaierror", "EACCES", 2],
    }
    targets = [line.removeprefix("CONNECT ").removesuffix(" HTTP/1.1") for line in proxy.requests]
    assert sorted(targets) == [
        f"{name}:{served.echo.port}" for name in sorted(given["names"][:2] * 3)
    ]
    assert dialled.addresses == [], "no connection bypasses the proxy"
    assert "other.test" not in resolver.queries


@pytest.mark.threat(91)
@pytest.mark.parametrize("kind", ["http", "socks"])
async def test_the_policy_applies_before_the_upstream_proxy(
    open_isolated: OpenSession, served: Services, resolver: Resolver, kind: str
) -> None:
    """The proxy gets no request for internal or denied addresses."""
    resolver.table["inwards.test"] = ["10.0.0.1"]
    given = {"names": ["inwards.test", "denied.test", "169.254.169.254"], "port": served.echo.port}
    with upstream_proxy(kind) as proxy:
        async with open_isolated(
            network_mode="allowlist",
            network_allowlist=["inwards.test", "denied.test", "169.254.169.254"],
            network_denylist=["denied.test", "169.254.0.0/16"],
            **{_ARGUMENT[kind]: f"{_SCHEME[kind]}://127.0.0.1:{proxy.port}"},
        ) as session:
            seen = await run_inside(session, _EACH_FRONTEND, given=given)
    for tcp, http, socks in seen.out.values():
        assert tcp in {"gaierror", "ECONNRESET"}
        assert (http, socks) == ("EACCES", 2)
    assert proxy.requests == []
    assert served.echo.connections == 0


@pytest.mark.parametrize("kind", ["http", "socks"])
async def test_open_with_a_deny_list_uses_and_hides_the_proxy(
    open_isolated: OpenSession, served: Services, resolver: Resolver, kind: str
) -> None:
    resolver.table["allowed.test"] = [PUBLIC]
    given = {"names": ["allowed.test", "denied.test"], "port": served.echo.port}
    with upstream_proxy(kind) as proxy:
        url = f"{_SCHEME[kind]}://127.0.0.1:{proxy.port}"
        async with open_isolated(
            network_mode="open", network_denylist=["denied.test"], **{_ARGUMENT[kind]: url}
        ) as session:
            seen = await run_inside(session, _EACH_FRONTEND, given=given)
            shown = (await session.exec("env")).stdout
    assert seen.out["allowed.test"] == ["hellobye", "hellobye", 0]
    assert seen.out["denied.test"] == ["gaierror", "EACCES", 2]
    assert len(proxy.requests) == 3
    assert url not in shown


@pytest.mark.parametrize("kind", ["http", "socks"])
async def test_open_passes_the_proxy_as_variables(open_isolated: OpenSession, kind: str) -> None:
    url = f"{_SCHEME[kind]}://127.0.0.1:9"
    async with open_isolated(network_mode="open", **{_ARGUMENT[kind]: url}) as session:
        text = await session.run_code("import json, os; print(json.dumps(dict(os.environ)))")
        blocked = await session.exec("env", network_mode="blocked")
    found = {name: value for name, value in json.loads(text).items() if "proxy" in name.lower()}
    named = ["HTTP_PROXY", "HTTPS_PROXY"] if kind == "http" else ["SOCKS_PROXY"]
    expected = dict.fromkeys([*named, "ALL_PROXY"], url)
    expected |= {name.lower(): url for name in expected}
    for name in ("NO_PROXY", "no_proxy"):
        assert "127.0.0.1" in found.pop(name)
    assert found == expected
    assert "proxy" not in blocked.stdout.lower()


@pytest.mark.spec("F8")
async def test_an_unreachable_proxy_is_a_connection_error(
    open_isolated: OpenSession, served: Services
) -> None:
    async with open_isolated(
        network_mode="allowlist",
        network_allowlist=["allowed.test", "127.0.0.1"],
        network_proxy_url="http://127.0.0.1:1",
    ) as session:
        seen = await run_inside(
            session, _EACH_FRONTEND, given={"names": ["allowed.test"], "port": served.echo.port}
        )
    assert seen.out == {"allowed.test": ["ECONNRESET", "EACCES", 4]}
    assert [d.allowed for d in seen.proc.network] == [True] * 3
    assert all(d.error for d in seen.proc.network)
    assert served.echo.connections == 0
