"""A session through a reverse proxy (nginx)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import statistics
import subprocess
import textwrap
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually
from tests.remote.conftest import remote
from tests.servers import ServerProcess

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
pytestmark = [
    pytest.mark.spec("I2"),
    pytest.mark.skipif(NGINX is None, reason="needs nginx (Debian: apt-get install nginx-light)"),
]
MIB = 1024 * 1024
# The settings of docs/guides/remote.md, and the paths that nginx writes to.
SETTINGS = """
daemon off;
worker_processes 1;
pid {place}/pid;
error_log {place}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {place}/body;
    proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi;
    scgi_temp_path {place}/scgi;
    server {{
        listen unix:{place}/front;
        location / {{
            proxy_pass http://{host}:{port};
            proxy_http_version 1.1;
            proxy_set_header Host $proxy_host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $http_connection;
            proxy_buffering off;
            proxy_request_buffering off;
            client_max_body_size 0;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as found:
        yield found


@pytest.fixture
def front(server: ServerProcess, tmp_path: Path) -> Iterator[str]:
    """Start nginx in front of the server; yield its endpoint."""
    assert NGINX is not None
    host, port = server.address
    settings = tmp_path / "nginx.conf"
    settings.write_text(textwrap.dedent(SETTINGS.format(place=tmp_path, host=host, port=port)))
    argv = [NGINX, "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(settings)]
    # As root, nginx would start its worker as a user who cannot enter this directory.
    if os.geteuid() == 0:
        argv += ["-g", "user root;"]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        assert eventually((tmp_path / "front").is_socket), (tmp_path / "error.log").read_text()
        yield f"unix://{tmp_path / 'front'}"
    finally:
        process.terminate()
        process.wait(10)


async def test_runs_streams_and_files_pass_through(server: ServerProcess, front: str) -> None:
    async with remote(server, endpoint=front) as session:
        proc = await session.run(
            "for i in 1 2 3; do echo $i; read x; done", stdout=True, stdin=sb.PIPE
        )
        lines = proc.iter_stdout_lines()
        assert proc.stdin is not None
        for wanted in ("1", "2", "3"):
            # Each line arrives before the next is written: the proxy does not buffer.
            assert await anext(lines) == wanted
            proc.stdin.write(b"go\n")
        assert await proc.wait() == 0
        many = await asyncio.gather(*(session.exec(f"echo {n}; exit {n}") for n in range(20)))
        assert [(r.stdout, r.returncode) for r in many] == [(f"{n}\n", n) for n in range(20)]
        data = os.urandom(8 * MIB)
        assert await session.put_bytes("f", data) == len(data)
        assert await session.get_bytes("f") == data
        out, _ = await (await session.run("cat f f f f", stdout=True)).communicate()
        assert hashlib.sha256(out).digest() == hashlib.sha256(data * 4).digest()


@pytest.mark.slow
async def test_latency_and_throughput_through_the_proxy(
    server: ServerProcess, front: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are printed for docs/decisions/0007; no speed is asserted."""
    measured = []
    async with remote(server) as near, remote(server, endpoint=front) as far:
        for _ in range(60):
            times = []
            for session in (near, far):
                began = time.perf_counter()
                await session.exec("true")
                times.append(time.perf_counter() - began)
            measured.append(times)
        rates = []
        for session in (near, far):
            began = time.perf_counter()
            proc = await session.run("head -c 67108864 /dev/zero", stdout=True)
            out, _ = await proc.communicate()
            rates.append(len(out) / MIB / (time.perf_counter() - began))
            assert len(out) == 64 * MIB
    direct, proxied = (statistics.median(times) * 1000 for times in zip(*measured, strict=True))
    with capsys.disabled():
        print(
            f"\n  run('true'): {direct:.2f} ms, through nginx {proxied:.2f} ms;"
            f" 64 MiB: {rates[0]:.0f} MiB/s, through nginx {rates[1]:.0f} MiB/s"
        )
