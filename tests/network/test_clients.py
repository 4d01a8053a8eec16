"""Common clients with an allow-list, with and without the proxy variables."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import json
import os
import shlex
import socket
import ssl
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S, session_of
from tests.network.services import PACKAGE

from union import sandbox as sb
from union.sandbox._policy.addresses import internal_range

if TYPE_CHECKING:
    from tests.network.conftest import Resolver
    from tests.network.services import Services

pytestmark = pytest.mark.spec("F3", "F4", "F8")

SYSTEM_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "SOCKS_PROXY", "NO_PROXY")
WITHOUT = "env " + " ".join(f"-u {name} -u {name.lower()}" for name in VARIABLES)

_PYTHON = {
    "requests": """
        import requests
        with requests.Session() as session:
            session.trust_env = proxied
            answer = session.get(url, verify=os.environ["REQUESTS_CA_BUNDLE"], timeout=10)
            answer.raise_for_status()
            print(answer.text)
    """,
    "urllib": """
        import urllib.request
        handlers = [] if proxied else [urllib.request.ProxyHandler({})]
        print(urllib.request.build_opener(*handlers).open(url, timeout=10).read().decode())
    """,
    "aiohttp": """
        import aiohttp, asyncio
        async def main():
            async with aiohttp.ClientSession(trust_env=proxied, raise_for_status=True) as session:
                async with session.get(url) as answer:
                    print(await answer.text())
        asyncio.run(main())
    """,
    "socket": """
        import socket, ssl
        raw = socket.socket()
        raw.settimeout(10)
        raw.connect((name, port))
        with ssl.create_default_context().wrap_socket(raw, server_hostname=name) as s:
            s.sendall(f"GET /hello HTTP/1.0\\r\\nHost: {name}\\r\\n\\r\\n".encode())
            print(b"".join(iter(lambda: s.recv(4096), b"")).decode())
    """,
}
_SHELL = {
    "curl": "curl -sS --fail-with-body {no_proxy} {url}",
    "git": "rm -rf clone; git clone -q {base}/repo.git clone && echo hello && cat clone/file",
    "uv": f"uv pip install -q --no-cache --reinstall --default-index {{base}}/simple {PACKAGE}"
    f" && python -c 'import {PACKAGE}; print(\"hello\", {PACKAGE}.answer)'",
}


def _command(client: str, *, proxied: bool, name: str, port: int) -> tuple[str, str]:
    base = f"https://{name}:{port}"
    if client in _SHELL:
        no_proxy = "" if proxied else "--noproxy '*'"
        text = _SHELL[client].format(base=base, url=f"{base}/hello", no_proxy=no_proxy)
        return "shell", text if proxied else f"{WITHOUT} sh -c {shlex.quote(text)}"
    given = {"url": f"{base}/hello", "proxied": proxied, "name": name, "port": port}
    head = f"import os, json, time; globals().update(json.loads({json.dumps(json.dumps(given))}))\n"
    lines = _PYTHON[client].split("\n")
    if not proxied:
        head += f"for name_ in {VARIABLES}: os.environ.pop(name_), os.environ.pop(name_.lower())\n"
    return "python", head + "\n".join(line.removeprefix(" " * 8) for line in lines)


@pytest.mark.threat(76)
@pytest.mark.parametrize("proxied", [True, False], ids=["proxied", "direct"])
@pytest.mark.parametrize("client", [*_SHELL, *_PYTHON])
async def test_an_allowed_name_works_and_another_fails_immediately(
    net: sb.Session, served: Services, resolver: Resolver, client: str, *, proxied: bool
) -> None:
    """Run the same command twice; only the name differs."""
    if client in {"requests", "aiohttp"} and importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed: pip install {client}")
    allow = ["allowed.test", f"127.0.0.1:{served.https.port}"]
    took = {}
    procs = {}
    for name in ("allowed.test", "other.test"):
        kind, text = _command(client, proxied=proxied, name=name, port=served.https.port)
        proc = procs[name] = await net.run(
            text,
            script_type=kind,
            network_mode="allowlist",
            network_allowlist=allow,
            # uv tries a refused connection three more times, with seconds between: its own choice.
            env={"UV_HTTP_RETRIES": "0"},
            timeout_s=50,
        )
        took[name] = proc.runtime_ms / 1000
    stdout, stderr = await procs["allowed.test"].communicate_text()
    assert "hello" in stdout, stderr
    assert procs["allowed.test"].returncode == 0
    through = "http" if proxied and client != "socket" else "tcp"
    granted = [d for d in procs["allowed.test"].network if d.allowed]
    assert granted
    assert {(d.door, d.host, d.port) for d in granted} == {
        (through, "allowed.test", served.https.port)
    }
    refused = procs["other.test"]
    assert refused.returncode != 0
    assert (await refused.communicate_text())[1], "a refusal must be seen"
    assert took["other.test"] < took["allowed.test"] + SOON_S
    assert refused.network
    assert {(d.door, d.allowed, d.host) for d in refused.network} == {
        ("http" if through == "http" else "dns", False, "other.test")
    }
    assert "other.test" not in resolver.queries
    assert not [line for line in served.https.requests if "other.test" in line]


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_socks_clients_are_served_by_name(
    net: sb.Session, served: Services, scheme: str
) -> None:
    site = served.http if scheme == "http" else served.https
    for name, wanted in (("allowed.test", 0), ("other.test", 97)):
        proc = await net.run(
            f'curl -sS --proxy "$SOCKS_PROXY" {scheme}://{name}:{site.port}/hello',
            network_mode="allowlist",
            network_allowlist=["allowed.test", "127.0.0.1"],
            timeout_s=20,
        )
        assert proc.returncode == wanted, await proc.communicate_text()
        assert [(d.door, d.allowed) for d in proc.network] == [("socks", wanted == 0)]


@pytest.mark.threat(82)
async def test_plain_http_is_checked_too(net: sb.Session, served: Services) -> None:
    """The policy also applies to requests without CONNECT."""
    for proxy, frontend in (("", "http"), ("--noproxy '*'", "tcp")):
        proc = await net.run(
            f"curl -sS {proxy} http://allowed.test:{served.http.port}/hello; "
            f"curl -sS --fail-with-body {proxy} http://other.test:{served.http.port}/hello",
            network_mode="allowlist",
            network_allowlist=["allowed.test", "127.0.0.1"],
            timeout_s=20,
        )
        stdout, _ = await proc.communicate_text()
        assert stdout.startswith(f"hello from allowed.test:{served.http.port}")
        assert proc.returncode in {6, 22}
        assert [d.door for d in proc.network if d.allowed] == [frontend]
        assert [d.host for d in proc.network if not d.allowed] == ["other.test"]
    assert len(served.http.requests) == 2


def _mirror_of_the_index() -> list[str] | None:
    """Return entries for a mirror that replaces the public index here; None without an index."""
    found = set()
    try:
        for host in sb.PYPI_HOSTS[:2]:
            raw = socket.create_connection((host, 443), timeout=2)
            with raw, ssl.create_default_context().wrap_socket(raw, server_hostname=host):
                pass
            found |= {info[4][0] for info in socket.getaddrinfo(host, 443)}
    except OSError:
        return None
    return [text for text in found if internal_range(ipaddress.ip_address(text))]


@pytest.mark.spec("F6")
async def test_a_package_is_installed_with_the_hosts_of_the_python_index(
    backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the public index if it is reachable, else a server on loopback with its name."""
    package, options, allow = "six", "", list(sb.PYPI_HOSTS)
    mirror = await asyncio.to_thread(_mirror_of_the_index)
    if mirror is not None:
        allow += mirror
        # uv bundles its own certificate authorities; a mirror's is in the system's store.
        if "SSL_CERT_FILE" not in os.environ and os.path.exists(SYSTEM_AUTHORITIES):
            monkeypatch.setenv("SSL_CERT_FILE", SYSTEM_AUTHORITIES)
    else:
        served = request.getfixturevalue("served")
        request.getfixturevalue("resolver")
        port = served.https.port
        package, options = PACKAGE, f"--default-index https://{sb.PYPI_HOSTS[0]}:{port}/simple"
        allow.append(f"127.0.0.1:{port}")
    async with session_of(backend) as session:
        proc = await session.run(
            f"uv pip install -q --no-cache {options} {package} && python -c 'import {package}'",
            network_mode="allowlist",
            network_allowlist=allow,
            timeout_s=40,
        )
        assert proc.returncode == 0, await proc.communicate_text()
        assert {d.host for d in proc.network} <= set(sb.PYPI_HOSTS)
        assert all(d.allowed for d in proc.network)
        installed = await session.exec(f"python -c 'print(__import__(\"{package}\").__file__)'")
        assert installed.stdout.startswith(session.work_dir), "it is installed in the session"
