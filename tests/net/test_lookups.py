"""Slow lookups of one session delay neither the lookups nor the files of another."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from tests.conftest import ISOLATED, session_of

from union.sandbox._net.happy_eyeballs import HostResolver


@pytest.fixture
def slow_names(monkeypatch):
    """Lookups of names under ``slow.example`` hang until the test ends."""
    release = threading.Event()
    started = []
    real = socket.getaddrinfo

    def slow_getaddrinfo(host, *args, **options):
        if str(host).endswith("slow.example"):
            started.append(host)
            release.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow_getaddrinfo)
    yield started
    release.set()


async def cancelled(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.threat(155)
async def test_slow_lookups_do_not_delay_another_session(slow_names):
    greedy, modest = HostResolver("greedy"), HostResolver("modest")
    stuck = [asyncio.create_task(greedy.resolve(f"n{i}.slow.example")) for i in range(64)]
    for _ in range(500):
        if len(slow_names) >= 4:
            break
        await asyncio.sleep(0.01)
    # Control: the session itself waits for its own slow lookups.
    own = asyncio.create_task(greedy.resolve("quick.example"))
    assert await asyncio.wait_for(modest.resolve("quick.example"), 40) == ["127.0.0.1"]
    assert not own.done()
    assert len(slow_names) == 4, "the session uses only its share of the threads"
    await cancelled([*stuck, own])


@pytest.mark.threat(155)
async def test_too_many_queued_lookups_are_refused(slow_names):
    greedy = HostResolver("flooding")
    stuck = [asyncio.create_task(greedy.resolve(f"n{i}.slow.example")) for i in range(400)]
    done, _ = await asyncio.wait(stuck, timeout=40, return_when=asyncio.FIRST_EXCEPTION)
    assert done
    assert all(isinstance(task.exception(), OSError) for task in done)
    await cancelled(stuck)


@pytest.mark.threat(155)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_slow_lookups_do_not_delay_files_or_new_sessions(slow_names, backend):
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
        assert slow_names, "control: lookups hang at this moment"
        async with asyncio.timeout(40):
            await victim.put_bytes("a", b"x")
            assert await victim.get_bytes("a") == b"x"
            async with session_of(backend) as fresh:
                assert (await fresh.exec("true")).ok
        for run in runs:
            run.kill()
            await run.wait()
