"""Sandboxed code cannot reach the server that runs it, in any network mode."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED
from tests.remote.conftest import remote
from tests.servers import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Every spelling of the local host, by all ways out of a sandbox.
DIAL = """
import os, socket, sys, urllib.request
port, names = int(sys.argv[1]) if len(sys.argv) > 1 else PORT, NAMES
def ask(host):
    try:
        with socket.create_connection((host, port), timeout=5) as s:
            s.sendall(b"GET /v1/health HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n")
            return "200" if b" 200 OK" in s.recv(4096) else "something"
    except OSError as exc:
        return type(exc).__name__
def proxied(host):
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(
            {"http": os.environ.get("HTTP_PROXY", "http://127.0.0.1:9")}))
        with opener.open(f"http://{host}:{port}/v1/health", timeout=5) as r:
            return str(r.status)
    except Exception as exc:
        return type(exc).__name__
for name in names:
    print("direct", name, ask(name))
    print("proxy", name, proxied(f"[{name}]" if ":" in name else name))
"""
NAMES = ["127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1", "0"]

MODES = {
    "blocked": {"network_mode": "blocked"},
    "open": {"network_mode": "open"},
    "open with a deny-list": {"network_mode": "open", "network_denylist": ["192.0.2.0/24"]},
    "allowlist by address": {
        "network_mode": "allowlist",
        "network_allowlist": ["127.0.0.0/8", "::1", "0.0.0.0/1", "localhost"],
    },
}


def own_names() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells which address would be used
            return [probe.getsockname()[0]]
        except OSError:
            return []


def program(port: int) -> str:
    names = NAMES + own_names() + [socket.gethostname()]
    return DIAL.replace("PORT", str(port)).replace("NAMES", repr(names), 1)


OFFERED = [word for backend in ISOLATED for word in ("--backend", backend)]


@pytest.fixture(scope="module", params=["loopback", "every address"])
def listening(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    bind = {"loopback": "127.0.0.1:0", "every address": "0.0.0.0:0"}[request.param]
    with ServerProcess(*OFFERED, bind=bind) as server:
        if request.param == "every address":
            server.endpoints[0] = f"http://127.0.0.1:{server.address[1]}"
        yield server


@pytest.mark.threat(120)
@pytest.mark.spec("I1", "F5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_no_network_mode_reaches_the_server(
    listening: ServerProcess, mode: str, backend: str
):
    async with remote(listening, backend=backend, **MODES[mode]) as session:
        found = await session.exec(program(listening.address[1]), script_type="python")
    assert found.ok, found.stderr
    assert len(found.stdout.splitlines()) >= 2 * len(NAMES)
    assert " 200" not in found.stdout, found.stdout


@pytest.mark.threat(120)
@pytest.mark.spec("F2")
async def test_the_same_program_reaches_another_service(listening: ServerProcess):
    """Positive control: only the server's own port is out of reach, not this machine."""
    reached = {"open": [f"direct {address} 200" for address in own_names()]}
    # Loopback inside is the sandbox's own, so services of the host are requested by the proxy.
    reached["allowlist by address"] = ["proxy 127.0.0.2 200"]
    with ServerProcess(bind="0.0.0.0:0") as other:
        for mode, lines in reached.items():
            async with remote(listening, backend=ISOLATED[0], **MODES[mode]) as session:
                found = await session.exec(program(other.address[1]), script_type="python")
            assert set(lines) <= set(found.stdout.splitlines()), found.stdout + found.stderr


@pytest.mark.spec("F8")
async def test_the_attempt_is_recorded_as_a_decision(listening: ServerProcess):
    async with remote(listening, backend=ISOLATED[0], network_mode="open") as session:
        port = listening.address[1]
        proc = await session.run(program(port), script_type="python")
        assert proc.returncode == 0
        refused = [d for d in proc.network if not d.allowed]
        assert refused
        assert refused[0].port == port


@pytest.mark.threat(120)
@pytest.mark.spec("I1", "F2")
async def test_a_unix_socket_server_is_invisible_and_shares_the_open_network(tmp_path: Path):
    path = tmp_path / "s.sock"
    with ServerProcess(*OFFERED, bind=f"unix:{path}") as server:
        async with remote(server, backend=ISOLATED[0], network_mode="open") as session:
            host = os.readlink("/proc/self/ns/net")
            assert (await session.exec("readlink /proc/self/ns/net")).stdout.strip() == host
            code = f"""
            import socket
            socket.socket(socket.AF_UNIX).connect({str(path)!r})
            """
            found = await session.exec(code, script_type="python")
            assert "FileNotFoundError" in found.stderr


@pytest.mark.threat(120, 122)
@pytest.mark.spec("C9", "I1")
async def test_a_run_cannot_lift_the_restriction(listening: ServerProcess):
    port = listening.address[1]
    async with remote(listening, backend=ISOLATED[0], network_mode="open") as session:
        found = await session.exec(
            program(port),
            script_type="python",
            network_mode="allowlist",
            network_allowlist=["127.0.0.0/8", f"127.0.0.1:{port}", "localhost"],
        )
    assert found.ok
    assert " 200" not in found.stdout


@pytest.mark.threat(119)
@pytest.mark.spec("I1")
async def test_the_token_is_not_visible_in_sandboxes(listening: ServerProcess):
    """Not in the environment, in files or in /proc."""
    look = f"""
        import glob, os
        seen = dict(os.environ)
        for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
            try:
                seen[path] = open(path, "rb").read().decode("utf-8", "replace")
            except OSError:
                pass
        print([where for where, text in seen.items() if {listening.token!r} in text])
    """
    async with remote(listening, backend=ISOLATED[0]) as session:
        # The source of the program holds the token, in a file and not in a command line.
        assert await session.run_code(look) == "[]\n"
