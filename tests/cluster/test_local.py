"""Tier 1: sessions with no cluster; the same server, keys and ends, in a local process."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tests.cluster.local import LONG_S, all_gone, family, home_of, is_alive, server_of
from tests.conftest import SOON_S, eventually

from union import sandbox as sb
from union.sandbox.cluster import _local
from union.sandbox.cluster._request import BACKENDS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.spec("I8", "I4")
async def test_a_session_is_returned_at_once_and_is_soon_ready():
    begun = time.perf_counter()
    sbx = await sb.session()
    submitted = time.perf_counter() - begun
    try:
        assert await sbx.run_code("print(6 * 7)") == "42\n"
        print(f"submit {submitted * 1000:.0f} ms, first {time.perf_counter() - begun:.3f} s")
        assert re.fullmatch("sbx-[0-9a-f]{16}", sbx.name)
        assert sbx.is_owner
        assert (sbx.url, sbx.ip) == (None, None)
        assert abs(sbx.created_at - datetime.now(UTC)) < timedelta(minutes=1)
        assert sbx.expires_at - sbx.created_at == timedelta(hours=1)
        assert sbx.endpoint.startswith("unix:///")
        assert (sbx.backend, sbx.isolation.backend) == ("userns", "userns")
        assert isinstance(sbx, sb.Session)
    finally:
        await sbx.close()
    assert not os.path.exists(home_of(sbx))


@pytest.mark.spec("I4", "B3")
async def test_the_whole_session_api_works(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    async with await sb.session(name="my-session", environment="anything") as sbx:
        assert sbx.name == "my-session"
        assert sbx.work_dir == "/tmp/sandbox-work"
        await sbx.put_bytes("/tmp/sandbox-work/in.json", b'{"values": [1, 2]}')
        proc = await sbx.run("cat in.json; pwd", stdout=True)
        assert [line async for line in proc.iter_stdout_lines()] == [
            '{"values": [1, 2]}/tmp/sandbox-work'
        ]
        assert await proc.wait() == 0
        await sbx.upload(tmp_path / "a.txt", "b.txt")
        assert [entry.path.rpartition("/")[2] for entry in await sbx.list_dir() if entry.size] >= []
        assert await sbx.get_bytes("b.txt") == b"a"
        assert await sbx.exists("b.txt")
        assert (await sbx.exec("exit 5")).returncode == 5
        with pytest.raises(sb.SandboxCommandError):
            await sbx.exec("false", check=True)
        assert "/tmp/sandbox-work" in sbx.fs_allowlist()["read_write"]
    with pytest.raises(sb.SessionClosedError):
        await sbx.exec("true")


@pytest.mark.spec("I5")
async def test_references_work_concurrently_and_only_the_owner_ends_the_session():
    async with await sb.session() as sbx:
        one, two = copy.copy(sbx), pickle.loads(pickle.dumps(sbx))
        assert (one.is_owner, two.is_owner) == (False, False)
        results = await asyncio.gather(
            one.exec("echo one > one; sleep 0.2; cat two"),
            two.exec("echo two > two; sleep 0.2; cat one"),
        )
        assert [result.stdout for result in results] == ["two\n", "one\n"]
        await one.close()
        await one.close()
        with pytest.raises(sb.SessionClosedError):
            await one.exec("true")
        assert (await two.exec("cat one")).stdout == "one\n"
        assert (await sbx.exec("cat two")).stdout == "two\n"
        pids = family(server_of(sbx))
        begun = time.perf_counter()
        await sbx.close()
        print(f"the owner's close took {time.perf_counter() - begun:.3f} s")
        assert all_gone(pids, within_s=3.0)
        with pytest.raises(sb.SandboxError):
            await two.exec("true")
        await two.close()


@pytest.mark.spec("I5")
async def test_closing_a_reference_ends_only_its_own_commands():
    async with await sb.session() as sbx:
        other = copy.copy(sbx)
        theirs = await other.run("sleep 1000", background=True)
        ours = await sbx.run("sleep 1000", background=True)
        await other.close()
        assert theirs.termination_reason == "closed"
        assert ours.returncode is None
        assert (await sbx.exec("echo still")).stdout == "still\n"


@pytest.mark.spec("I5")
async def test_a_reference_that_is_dropped_leaves_no_connection(recwarn):
    async with await sb.session() as sbx:
        for _ in range(3):
            other = copy.copy(sbx)
            assert (await other.exec("echo x")).stdout == "x\n"
            del other
        await asyncio.sleep(0.1)
        assert (await sbx.exec("echo y")).stdout == "y\n"
    assert not [w for w in recwarn if issubclass(w.category, ResourceWarning)]


@pytest.mark.spec("I5")
async def test_a_reference_passed_before_the_server_is_ready_waits():
    sbx = await sb.session()
    early = copy.copy(sbx)
    try:
        assert (await early.exec("echo early")).stdout == "early\n"
    finally:
        await early.close()
        await sbx.close()


@pytest.mark.spec("I4", "B7")
async def test_the_timeout_ends_the_session_and_all_its_processes():
    begun = time.monotonic()
    # Long enough for a server to start on a busy machine.
    sbx = await sb.session(timeout=timedelta(seconds=8))
    proc = await sbx.run("sleep 1000", stdout=True)
    pids = family(server_of(sbx))
    await proc.communicate()
    print(f"ended after {time.monotonic() - begun:.2f} s")
    assert proc.termination_reason == "timeout"
    assert proc.returncode in {137, 143}
    assert time.monotonic() - begun > 7.5
    assert all_gone(pids)
    with pytest.raises(sb.SessionClosedError, match="timeout"):
        await sbx.exec("true")
    assert eventually(lambda: not os.path.exists(home_of(sbx)))
    await sbx.close()


@pytest.mark.spec("I4", "B7")
async def test_a_timeout_before_the_server_is_ready_is_reported(servers):
    sbx = await sb.session(timeout=0.001)
    with pytest.raises(sb.SessionClosedError, match="timeout has passed"):
        await sbx
    assert nothing_left(servers)


@pytest.mark.spec("I4")
async def test_a_server_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr("union.sandbox.cluster._supervisor._KILL_AFTER_S", 0.5)
    async with await sb.session() as sbx:
        await sbx.exec("true")
        pids = family(server_of(sbx))
        os.kill(server_of(sbx), signal.SIGSTOP)
    assert all_gone(pids)


@pytest.mark.spec("I4", "D4")
async def test_a_server_that_dies_is_an_error_and_never_an_exit_code():
    async with await sb.session() as sbx:
        proc = await sbx.run("sleep 1000", stdout=True)
        os.kill(server_of(sbx), signal.SIGKILL)
        with pytest.raises(sb.SandboxExecutionError):
            async with asyncio.timeout(LONG_S * 1.5):
                await proc.communicate()


OWNER = """
import asyncio, sys
from union import sandbox as sb
async def main():
    sbx = await sb.session()
    await sbx.run("sleep 1000 & setsid sleep 1000", background=True)
    print(sbx._handle.pid, sbx.endpoint, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.spec("I8", "G4")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_outlives_an_owner_that_is_killed(number):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert owner.stdout is not None
        pid, endpoint = owner.stdout.readline().split()
        pids = family(int(pid))
        assert len(pids) > 3
        owner.send_signal(number)
        owner.wait(LONG_S)
        assert all_gone(pids)
        home = os.path.dirname(endpoint.removeprefix("unix://"))
        assert eventually(lambda: not os.path.exists(home), within_s=LONG_S)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[_local.LocalServer]:
    """Every server that a test starts."""
    found: list[_local.LocalServer] = []
    start = _local.LocalServer

    def recorded(request: object) -> _local.LocalServer:
        found.append(start(request))
        return found[-1]

    monkeypatch.setattr(_local, "LocalServer", recorded)
    return found


def nothing_left(servers: list[_local.LocalServer]) -> bool:
    return all(
        not is_alive(server.pid or 0) and not os.path.exists(server._home) for server in servers
    )


@pytest.mark.spec("I4")
async def test_a_session_can_be_closed_while_its_server_starts(servers):
    at_once = await sb.session()
    await at_once.close()
    a_bit_later = await sb.session()
    await asyncio.sleep(0.05)
    await asyncio.gather(a_bit_later.close(), a_bit_later.close())
    assert nothing_left(servers)
    with pytest.raises(sb.SessionClosedError):
        await at_once


@pytest.mark.spec("I4")
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.6])
async def test_cancelling_at_any_moment_leaves_nothing_behind(servers, after_s):
    async def whole() -> None:
        async with await sb.session() as sbx:
            await sbx.put_bytes("a", b"a" * 100_000)
            await sbx.exec("sleep 0.2")
            await sbx.get_bytes("a")

    task = asyncio.create_task(whole())
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(SOON_S):
        while not nothing_left(servers):  # Cancelled during close(), which continues.
            await asyncio.sleep(0.01)


@pytest.mark.spec("I4")
async def test_a_cancelled_close_still_closes(servers):
    sbx = await sb.session()
    await sbx.exec("true")
    closing = asyncio.create_task(sbx.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await sbx.close()
    assert nothing_left(servers)


def test_the_end_of_the_event_loop_ends_the_server():
    found = {}

    async def careless() -> None:
        sbx = await sb.session()
        await sbx.exec("true")
        found["pids"], found["home"] = family(server_of(sbx)), home_of(sbx)

    asyncio.run(careless())
    assert all_gone(found["pids"])
    assert not os.path.exists(found["home"])


@pytest.mark.spec("I4", "G1")
async def test_a_missing_backend_is_reported_as_unavailable(monkeypatch, servers):
    monkeypatch.setitem(BACKENDS, "bwrap", "sandbox-exec")  # A backend of another operating system.
    with pytest.raises(sb.BackendUnavailableError) as caught:
        async with await sb.session(sandbox_mode="bwrap"):
            pytest.fail("it was entered")
    assert caught.value.backend == "sandbox-exec"
    assert nothing_left(servers)
    sbx = await sb.session(sandbox_mode="bwrap")
    with pytest.raises(sb.BackendUnavailableError):
        await sbx
    assert nothing_left(servers)


@pytest.mark.spec("I4", "J")
async def test_an_invalid_argument_starts_nothing(servers):
    with pytest.raises(sb.SandboxUsageError):
        await sb.session(timeout=0)
    with pytest.raises(sb.SandboxUsageError, match="GPU"):
        await sb.session(resources=sb.Resources(gpu=1))
    assert servers == []


@pytest.mark.spec("I4", "C9")
@pytest.mark.threat(172)
async def test_the_network_of_the_session_is_the_ceiling_of_every_call():
    async with await sb.session() as sbx:
        allow = {"network_mode": "allowlist", "network_allowlist": ["a.example"]}
        for either in (sbx, copy.copy(sbx)):
            assert "HTTP_PROXY" not in (await either.exec("env")).stdout, "blocked by default"
            assert "HTTP_PROXY" in (await either.exec("env", **allow)).stdout
    async with await sb.session(network_mode="blocked") as sbx:
        with pytest.raises(sb.PolicyError):
            await sbx.exec("true", network_mode="open")
        with pytest.raises(sb.PolicyError):
            await copy.copy(sbx).exec("true", network_mode="open")
    async with await sb.session(
        network_mode="allowlist", network_allowlist=["example.com", "*.example.org"]
    ) as sbx:
        narrow = {"network_mode": "allowlist", "network_allowlist": ["a.example.org"]}
        assert (await copy.copy(sbx).exec("echo ok", **narrow)).stdout == "ok\n"
        with pytest.raises(sb.PolicyError):
            await sbx.exec("true", network_mode="allowlist", network_allowlist=["example.net"])
