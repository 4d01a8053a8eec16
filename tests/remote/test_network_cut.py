"""Client and server in two network namespaces, with a connection that is cut."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.spec("I2", "D4"),
    pytest.mark.slow,
    pytest.mark.needs_root,
    pytest.mark.skipif(
        os.geteuid() != 0, reason="making two hosts needs root: run the tests as root"
    ),
    pytest.mark.skipif(
        shutil.which("ip") is None, reason="needs ip (Debian: apt-get install iproute2)"
    ),
]
# Both addresses exist in these two namespaces only.
SERVER, CLIENT = "10.213.7.1", "10.213.7.2"
TOKEN = "cable-" + "0" * 26
GRACE_S = 4.0

CLIENT_PROGRAM = """
import asyncio, hashlib, json, sys, time
from union import sandbox as sb

TALK = '''
import os, time
for n in range(120):
    os.write(1, bytes([n]) * 20_000)
    time.sleep(PAUSE)
raise SystemExit(7)
'''

async def main(endpoint, token, pause):
    async with sb.remote.session(endpoint=endpoint, token=token) as sbx:
        print("up", flush=True)
        proc = await sbx.run(TALK.replace("PAUSE", pause), script_type="python", stdout=True)
        print("running", flush=True)
        try:
            out, _ = await proc.communicate()
            result = {"code": await proc.wait(), "digest": hashlib.sha256(out).hexdigest()}
        except sb.SandboxExecutionError as exc:
            result = {"error": type(exc).__name__, "code": exc.returncode}
        print(json.dumps(result), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


class Cable:
    """Two network namespaces with a veth pair that can be set down."""

    def __init__(self) -> None:
        mark = f"{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self.server, self.client = f"sbx-s-{mark}", f"sbx-c-{mark}"

    def __enter__(self) -> Self:
        try:
            for name in (self.server, self.client):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            pair = ("link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", self.client)
            ip("-n", self.server, *pair)
            for name, address in ((self.server, SERVER), (self.client, CLIENT)):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self.server, self.client):
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=20)

    def pull(self) -> None:
        ip("-n", self.client, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        ip("-n", self.client, "link", "set", "eth0", "up")

    def start(self, where: str, *argv: str, **options: object) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", where, sys.executable, *argv]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **options)


@pytest.fixture
def hosts() -> Iterator[tuple[Cable, str, Path]]:
    """Yield the cable, the endpoint of the server and the directory of its work dirs."""
    place = Path(tempfile.mkdtemp(prefix="cable-test-", dir="/var/tmp"))
    with Cable() as cable, (place / "log").open("wb") as log:
        server = cable.start(
            cable.server,
            *("-m", "union.sandbox.server", "--bind", f"{SERVER}:0", "--tls-self-signed"),
            *("--work-dir", str(place / "work"), "--grace", f"{GRACE_S:g}"),
            env={**os.environ, "SANDBOX_SERVER_TOKEN": TOKEN},
            stderr=log,
        )
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line, (place / "log").read_text()
            yield cable, json.loads(line)["ready"][0], place / "work"
        finally:
            server.terminate()
            server.wait(20)
            assert server.stdout is not None
            server.stdout.close()
            shutil.rmtree(place)


def talking(cable: Cable, endpoint: str, *, pause_s: float) -> subprocess.Popen[str]:
    client = cable.start(cable.client, "-c", CLIENT_PROGRAM, endpoint, TOKEN, f"{pause_s:g}")
    assert client.stdout is not None
    assert client.stdout.readline() == "up\n"
    assert client.stdout.readline() == "running\n"
    return client


def result_of(client: subprocess.Popen[str]) -> dict[str, object]:
    out, _ = client.communicate(timeout=90)
    return json.loads(out)


@pytest.mark.timeout(150)
def test_short_cuts_lose_nothing(hosts: tuple[Cable, str, Path]) -> None:
    cable, endpoint, work = hosts
    whole = b"".join(bytes([n]) * 20_000 for n in range(120))
    wanted = {"code": 7, "digest": hashlib.sha256(whole).hexdigest()}
    chance = random.Random(17)
    cuts = 0
    while cuts < 8:
        client = talking(cable, endpoint, pause_s=0.03)
        while client.poll() is None and cuts < 8:
            time.sleep(chance.uniform(0.2, 1.0))
            cable.pull()
            cuts += 1
            time.sleep(chance.uniform(0.05, 1.2))
            cable.plug_in()
        assert result_of(client) == wanted
    assert eventually(lambda: not list(work.iterdir()), within_s=GRACE_S + 15)


@pytest.mark.timeout(150)
def test_a_lasting_cut_is_an_error_and_leaves_nothing(hosts: tuple[Cable, str, Path]) -> None:
    """The client reports no exit code, and the server removes the session."""
    cable, endpoint, work = hosts
    client = talking(cable, endpoint, pause_s=1)
    assert list(work.iterdir()), "positive control: the session exists"
    cable.pull()
    assert eventually(lambda: not list(work.iterdir()), within_s=GRACE_S + 30)
    result = result_of(client)
    assert result["code"] == -1
    assert result["error"] in {"SandboxConnectionError", "SandboxExecutionError"}
