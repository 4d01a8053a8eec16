"""Slow names of one session delay neither another session's names nor its files."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from tests.conftest import ISOLATED, session_of

from union.sandbox._net.happy_eyeballs import HostResolver


@pytest.fixture
def slow_names(monkeypatch):
    """Names under ``slow.example`` get no answer until the test ends."""
    release = threading.Event()
    started = []
    real = socket.getaddrinfo

    def look_up(host, *args, **options):
        if str(host).endswith("slow.example"):
            started.append(host)
            release.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield started
    release.set()


async def cancelled(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.threat(155)
async def test_another_sessions_names_are_resolved_meanwhile(slow_names):
    greedy, modest = HostResolver("greedy"), HostResolver("modest")
    stuck = [asyncio.create_task(greedy.resolve(f"n{i}.slow.example")) for i in range(64)]
    for _ in range(500):
        if len(slow_names) >= 4:
            break
        await asyncio.sleep(0.01)
    # The control: the session itself waits behind its own slow names.
    own = asyncio.create_task(greedy.resolve("quick.example"))
    assert await asyncio.wait_for(modest.resolve("quick.example"), 10) == ["127.0.0.1"]
    assert not own.done()
    assert len(slow_names) == 4, "its share of the threads"
    await cancelled([*stuck, own])


@pytest.mark.threat(155)
async def test_too_many_waiting_names_are_refused_at_once(slow_names):
    greedy = HostResolver("flooding")
    stuck = [asyncio.create_task(greedy.resolve(f"n{i}.slow.example")) for i in range(400)]
    done, _ = await asyncio.wait(stuck, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
    assert done
    assert all(isinstance(task.exception(), OSError) for task in done)
    await cancelled(stuck)


@pytest.mark.threat(155)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_files_and_sessions_of_others_go_on(slow_names, backend):
    program = """
    import socket, threading
    def go(i):
        with socket.socket() as s:
            s.connect((f"n{i}.slow.example", 443))
            s.recv(1)
    threads = [threading.Thread(target=go, args=(i,), daemon=True) for i in range(16)]
    [t.start() for t in threads]
    print("up", flush=True)
    [t.join() for t in threads]
    """
    async with session_of(backend) as victim, session_of(backend) as greedy:
        runs = [
            await greedy.run(
                program,
                script_type="python",
                stdout=True,
                network_mode="allowlist",
                network_allowlist=["*.slow.example"],
            )
            for _ in range(4)
        ]
        for run in runs:
            assert await anext(run.iter_stdout_lines()) == "up"
        for _ in range(1000):
            if len(slow_names) >= 4:
                break
            await asyncio.sleep(0.01)
        assert slow_names, "the control: lookups hang at this moment"
        async with asyncio.timeout(20):
            await victim.put_bytes("a", b"x")
            assert await victim.get_bytes("a") == b"x"
            async with session_of(backend) as fresh:
                assert (await fresh.exec("true")).ok
        for run in runs:
            run.kill()
            await run.wait()
