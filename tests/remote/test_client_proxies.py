"""Upstream proxies of clients: the operator must allow them."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import ISOLATED
from tests.remote.conftest import remote
from tests.servers import ServerProcess

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.threat(151), pytest.mark.spec("F7", "I1")]

OFFERED = [word for backend in ISOLATED for word in ("--backend", backend)]
CEILING = ["--network-mode", "allowlist", "--network-allow", "api.example:80"]
SESSION = {"network_mode": "allowlist", "network_allowlist": ["api.example:80"]}
ASK = """
import urllib.request
try:
    print(urllib.request.urlopen("http://api.example/latest", timeout=10).read().decode())
except Exception as exc:
    print(type(exc).__name__, getattr(exc, "code", ""))
"""


class _Internal(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"internal: " + self.path.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def internal() -> Iterator[int]:
    """Start a service on loopback that accepts requests in absolute form."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Internal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


async def asked(server: ServerProcess, backend: str, **options: Any) -> tuple[str, Any]:
    async with remote(server, backend=backend, **{**SESSION, **options}) as session:
        proc = await session.run(ASK, script_type="python")
        return (await proc.communicate_text())[0].strip(), proc.network


@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_proxy_that_is_not_allowed_is_refused(internal: int, backend: str) -> None:
    """The positive control is a server that allows it: the same session reaches the service."""
    url = f"http://127.0.0.1:{internal}"
    with ServerProcess(*OFFERED, *CEILING, "--allow-proxy", url) as naming:
        answer, _ = await asked(naming, backend, network_proxy_url=url)
        assert answer == "internal: http://api.example:80/latest"
    with ServerProcess(*OFFERED, *CEILING) as server:
        for argument, value in (
            ("network_proxy_url", url),
            ("network_socks_url", f"socks5://127.0.0.1:{internal}"),
        ):
            for mode in (SESSION, {}, {"network_mode": "blocked"}):
                with pytest.raises(sb.PolicyError, match=argument) as caught:
                    async with remote(server, backend=backend, **{argument: value}, **mode) as held:
                        await held.run("true")
                assert caught.value.argument == argument
        payload = {"cmd": "true", "session": {**SESSION, "network_proxy_url": url}}
        status, body = server.request(
            "POST", "/v1/run", json.dumps(payload).encode(), **{"Content-Type": "application/json"}
        )
        assert (status, json.loads(body)["error"]["code"]) == (403, "proxy-refused")


async def test_a_name_with_an_internal_address_requires_the_address(internal: int) -> None:
    named = ["--allow-proxy", f"localhost:{internal}"]
    url = f"http://localhost:{internal}"
    with ServerProcess(*OFFERED, *CEILING, *named) as server:
        answer, decisions = await asked(server, ISOLATED[0], network_proxy_url=url)
        assert "internal" not in answer
        assert [d.rule for d in decisions if not d.allowed] == ["upstream-proxy"]
    both = [*named, "--allow-proxy", f"127.0.0.1:{internal}", "--allow-proxy", "[::1]"]
    with ServerProcess(*OFFERED, *CEILING, *both) as server:
        answer, _ = await asked(server, ISOLATED[0], network_proxy_url=url)
        assert answer.startswith("internal")


async def test_the_server_itself_cannot_be_an_upstream_proxy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = [*OFFERED, *CEILING, "--allow-proxy", url]
    with ServerProcess(*options, bind=f"127.0.0.1:{port}") as server:
        answer, decisions = await asked(server, ISOLATED[0], network_proxy_url=url)
    assert answer == "HTTPError 403"
    assert "runs this sandbox" in decisions[0].reason


@pytest.mark.parametrize("wrong", ["http://me:secret@p.example:1", "ftp://p.example", "a b", "*"])
def test_an_invalid_allow_proxy_is_refused(wrong: str) -> None:
    from union.sandbox.server._config import config_from_arguments

    with pytest.raises(sb.SandboxUsageError, match="allow-proxy") as caught:
        config_from_arguments(["--allow-proxy", wrong], {})
    assert "secret" not in str(caught.value)
