"""Access to a session on the stand-in: guests, strangers, and sandboxed code."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from tests.plane.sandboxes import LONG_S, in_task, sandbox_plane, settled, until

from union import sandbox as sb
from union.sandbox._wire.endpoint import parse_endpoint
from union.sandbox.remote._http import HttpClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.plane.plane import Plane

pytestmark = [pytest.mark.timeout(120), pytest.mark.spec("I4", "I5")]


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with sandbox_plane() as plane:
        yield plane


@pytest.fixture(autouse=True)
def every_run_is_over(plane: Plane) -> Iterator[None]:
    yield
    settled(plane)


async def asked(endpoint: str, token: str | None, method: str, path: str) -> Any:
    http = HttpClient(parse_endpoint(endpoint), token=token, ca=None)
    try:
        return await http.call(method, path)
    finally:
        await http.close()


async def test_strangers_are_refused_and_guests_cannot_end_the_session(plane: Plane):
    async with asyncio.timeout(LONG_S), await sb.session(timeout=timedelta(minutes=5)) as sbx:
        keys = sbx._handle.keys
        for token in (None, "", "wrong", keys.owner[:-1], sbx.verifier):
            for method, path in (("GET", "sessions"), ("POST", "shutdown")):
                with pytest.raises(sb.SandboxError) as caught:
                    await asked(sbx.endpoint, token, method, path)
                assert "token" in str(caught.value).lower(), caught.value
        for method, path in (("POST", "shutdown"), ("GET", "sessions"), ("GET", "metrics")):
            with pytest.raises(sb.SandboxError):
                await asked(sbx.endpoint, keys.guest, method, path)
        assert not plane.action(sbx.name).is_over
        assert (await sbx.exec("echo still here")).stdout == "still here\n"


async def test_another_certificate_is_refused(plane: Plane):
    async with asyncio.timeout(LONG_S), await sb.session(timeout=timedelta(minutes=5)) as sbx:
        base, mark, digest = sbx.endpoint.partition("#sha256=")
        assert base.startswith("https://")
        assert mark
        other = f"{base}{mark}{'0' * 64}"
        assert len(other) == len(f"{base}{mark}{digest}")
        with pytest.raises(sb.SandboxError):
            await asked(other, sbx._handle.keys.owner, "GET", "sessions")


async def test_announcements_of_others_are_refused(plane: Plane):
    """A line of another run, an old one, one for this run with another key, and an edited one."""
    from union.sandbox._wire.frames import VERSION
    from union.sandbox.cluster._announce import PREFIX, Announcement, announce, new_signing_key

    elsewhere = f"https://127.0.0.1:9#sha256={'0' * 64}"
    forged = announce(
        Announcement(
            run="believed", endpoint=elsewhere, protocol=VERSION, expires=time.time() + 600
        ),
        key=new_signing_key()[0],
    )
    async with asyncio.timeout(LONG_S), await sb.session(name="before") as before:
        await before
        real = [line for line in plane.pod("before").log.splitlines() if PREFIX in line]
    assert len(real) == 1
    edited = real[0].replace('\\"before\\"', '\\"believed\\"')
    assert edited != real[0]
    plane.faults.log_begins = (forged, real[0], edited, PREFIX + "{", PREFIX + "[" * 100_000)
    async with asyncio.timeout(LONG_S), await sb.session(name="believed") as sbx:
        assert sbx.ip == plane.pod("believed").ip
        assert (await sbx.exec("echo hello")).stdout == "hello\n"


async def test_a_passed_session_has_the_rights_of_a_guest(plane: Plane):
    async with asyncio.timeout(LONG_S), await sb.session(timeout=timedelta(minutes=5)) as sbx:
        passed = pickle.loads(pickle.dumps(sbx))
        assert not passed.is_owner
        assert sbx._handle.keys.owner not in repr(passed.__dict__)
        async with passed:
            assert (await passed.exec("echo hello")).stdout == "hello\n"
            await passed.put_bytes(f"{passed.work_dir}/x", b"1")
        assert await sbx.get_bytes(f"{sbx.work_dir}/x") == b"1"
        assert not plane.action(sbx.name).is_over


DIAL = """
import os, socket, ssl, sys
host, port = sys.argv[1], int(sys.argv[2])
ways = {"direct": None}
for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
    value = os.environ.get(name, "")
    if value:
        ways["proxy"] = value.rpartition("//")[2].strip("/").rpartition("@")[2]
for way, proxy in sorted(ways.items()):
    try:
        if proxy is None:
            line = socket.create_connection((host, port), 3)
        else:
            proxy_host, _, proxy_port = proxy.rpartition(":")
            line = socket.create_connection((proxy_host, int(proxy_port)), 3)
            line.settimeout(3)
            asked = f"CONNECT {host}:{port} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\n\\r\\n"
            line.sendall(asked.encode())
            if b" 200" not in line.recv(4096).split(b"\\r\\n")[0]:
                raise OSError("refused by the proxy")
        line.settimeout(3)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        tls = context.wrap_socket(line)
        tls.sendall(f"GET /v1/health HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n".encode())
        answer = tls.recv(100)
        print(way, "REACHED" if answer else "silence")
    except OSError as problem:
        print(way, "refused", type(problem).__name__)
"""


@pytest.mark.parametrize("mode", ["blocked", "allowlist", "open"])
async def test_sandboxed_code_cannot_connect_to_its_own_server(plane: Plane, mode: str):
    options: dict[str, Any] = {"network_mode": mode}
    if mode == "allowlist":
        options["network_allowlist"] = ["127.0.0.0/8", "example.com"]
    async with asyncio.timeout(LONG_S), await sb.session(**options) as sbx:
        url = urlsplit(sbx.endpoint)
        place = [str(url.hostname), str(url.port)]
        outside = subprocess.run(
            [sys.executable, "-c", DIAL, *place], check=True, capture_output=True, text=True,
            env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        assert outside.stdout == "direct REACHED\n", "the control failed"
        await sbx.put_bytes(f"{sbx.work_dir}/dial.py", DIAL.encode())
        done = await sbx.exec(f"python3 {sbx.work_dir}/dial.py {' '.join(place)}")
        assert done.returncode == 0, done
        assert "refused" in done.stdout
        assert "REACHED" not in done.stdout
        assert mode == "blocked" or "proxy refused" in done.stdout, done.stdout


async def test_sandboxed_code_sees_nothing_of_the_platform(plane: Plane):
    async with asyncio.timeout(LONG_S), await sb.session(timeout=timedelta(minutes=5)) as sbx:
        assert "KUBERNETES_SERVICE_HOST" in plane.pod(sbx.name).environment
        seen = await sbx.exec("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; true")
        names = {line.partition("=")[0] for line in seen.stdout.splitlines()}
        foreign = {n for n in names if n.startswith(("KUBERNETES_", "FLYTE_", "_U_", "POD_"))}
        assert foreign == set()
        for key in (sbx._handle.keys.owner, sbx._handle.keys.guest):
            assert key not in seen.stdout


async def test_two_children_use_a_session_concurrently_and_do_not_end_it(plane: Plane):
    import plane_sessions

    assert await in_task(plane_sessions.shares, name="shared") == [
        "1",
        "0",
        "the owner goes on",
    ]
    assert plane.action("shared").is_over
    await until(lambda: not plane.pod("shared").processes())


async def test_a_child_that_gets_the_session_early_finds_its_server(plane: Plane):
    import plane_sessions

    assert await in_task(plane_sessions.passes_early, name="early") == "found"
    assert plane.action("early").is_over
