"""A caller's own proxy: used for what is allowed, never asked about the rest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.network.conftest import PUBLIC
from tests.network.inside import look
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
    out[name] = [attempt(ask, (name, given["port"]))[0], attempt(connect, name)[0],
                 attempt(socks, name, given["port"])[0]]
"""


@pytest.mark.parametrize("kind", ["http", "socks"])
async def test_allowed_connections_go_through_it(
    jailed: OpenSession, served: Services, resolver: Resolver, dialled: Dialled, kind: str
) -> None:
    """From all three doors; a name that only the proxy knows works too."""
    given = {"names": ["allowed.test", "known.to.proxy.test", "other.test"],
             "port": served.echo.port}  # fmt: skip
    with upstream_proxy(kind) as proxy:
        async with jailed(
            network_mode="allowlist",
            network_allowlist=["allowed.test", "*.proxy.test", "127.0.0.1"],
            **{_ARGUMENT[kind]: f"{_SCHEME[kind]}://127.0.0.1:{proxy.port}"},
        ) as session:
            seen = await look(session, _EACH_FRONTEND, given=given)
    good = ["hellobye", "hellobye", 0]
    assert seen.out == {
        "allowed.test": good,
        "known.to.proxy.test": good,
        "other.test": ["gaierror", "EACCES", 2],
    }
    asked = [line.removeprefix("CONNECT ").removesuffix(" HTTP/1.1") for line in proxy.requests]
    assert sorted(asked) == [
        f"{name}:{served.echo.port}" for name in sorted(given["names"][:2] * 3)
    ]
    assert dialled.addresses == [], "nothing goes around it"
    assert "other.test" not in resolver.queries


@pytest.mark.threat(91)
@pytest.mark.parametrize("kind", ["http", "socks"])
async def test_our_rules_stay_before_it(
    jailed: OpenSession, served: Services, resolver: Resolver, kind: str
) -> None:
    """An allowed name that leads inwards, denied addresses; the proxy hears nothing."""
    resolver.table["inwards.test"] = ["10.0.0.1"]
    given = {"names": ["inwards.test", "denied.test", "169.254.169.254"], "port": served.echo.port}
    with upstream_proxy(kind) as proxy:
        async with jailed(
            network_mode="allowlist",
            network_allowlist=["inwards.test", "denied.test", "169.254.169.254"],
            network_denylist=["denied.test", "169.254.0.0/16"],
            **{_ARGUMENT[kind]: f"{_SCHEME[kind]}://127.0.0.1:{proxy.port}"},
        ) as session:
            seen = await look(session, _EACH_FRONTEND, given=given)
    for tcp, http, socks in seen.out.values():
        assert tcp in {"gaierror", "ECONNRESET"}
        assert (http, socks) == ("EACCES", 2)
    assert proxy.requests == []
    assert served.echo.connections == 0


@pytest.mark.parametrize("kind", ["http", "socks"])
async def test_with_open_and_a_deny_list_it_is_used_and_hidden(
    jailed: OpenSession, served: Services, resolver: Resolver, kind: str
) -> None:
    resolver.table["allowed.test"] = [PUBLIC]
    given = {"names": ["allowed.test", "denied.test"], "port": served.echo.port}
    with upstream_proxy(kind) as proxy:
        url = f"{_SCHEME[kind]}://127.0.0.1:{proxy.port}"
        async with jailed(
            network_mode="open", network_denylist=["denied.test"], **{_ARGUMENT[kind]: url}
        ) as session:
            seen = await look(session, _EACH_FRONTEND, given=given)
            shown = (await session.exec("env")).stdout
    assert seen.out["allowed.test"] == ["hellobye", "hellobye", 0]
    assert seen.out["denied.test"] == ["gaierror", "EACCES", 2]
    assert len(proxy.requests) == 3
    assert url not in shown


@pytest.mark.parametrize("kind", ["http", "socks"])
async def test_with_open_it_is_handed_on_as_variables(jailed: OpenSession, kind: str) -> None:
    url = f"{_SCHEME[kind]}://127.0.0.1:9"
    async with jailed(network_mode="open", **{_ARGUMENT[kind]: url}) as session:
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
async def test_one_that_is_not_there_is_an_error_of_the_connection(
    jailed: OpenSession, served: Services
) -> None:
    async with jailed(
        network_mode="allowlist",
        network_allowlist=["allowed.test", "127.0.0.1"],
        network_proxy_url="http://127.0.0.1:1",
    ) as session:
        seen = await look(
            session, _EACH_FRONTEND, given={"names": ["allowed.test"], "port": served.echo.port}
        )
    assert seen.out == {"allowed.test": ["ECONNRESET", "EACCES", 4]}
    assert [d.allowed for d in seen.proc.network] == [True] * 3
    assert all(d.error for d in seen.proc.network)
    assert served.echo.connections == 0
