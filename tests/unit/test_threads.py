"""Pools of threads for blocking calls: shares, turns, cancellation, forks, exit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from union.sandbox._session import threads
from union.sandbox._session.threads import Pool, PoolFullError

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20


class Gate:
    """Blocking calls that wait until the test lets them pass."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Semaphore(0)
        self.order: list[object] = []

    def call(self, label: object = None) -> object:
        self.order.append(label)
        self.entered.release()
        assert self.go.wait(PATIENCE_S)
        return label

    async def wait_for(self, calls: int) -> None:
        for _ in range(calls):
            assert await asyncio.to_thread(self.entered.acquire, timeout=PATIENCE_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.go.set()


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_returns_its_result_or_its_error() -> None:
    pool = Pool("test", threads=2, share=1)
    assert await pool.run("a", divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run("a", divmod, 7, 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.run("a", next, iter(()))
    assert await pool.start("a", lambda: 5) == 5


async def test_no_thread_is_started_before_the_first_call() -> None:
    before = threading.active_count()
    pool = Pool("test", threads=2, share=2)
    assert threading.active_count() == before
    await pool.run("a", int)
    await pool.run("a", int)
    assert threading.active_count() == before + 1, "an idle thread takes the next call"


async def test_a_key_never_holds_more_than_its_share(gate: Gate) -> None:
    pool = Pool("test", threads=4, share=2)
    greedy = [asyncio.create_task(pool.run("greedy", gate.call)) for _ in range(50)]
    await gate.wait_for(2)
    # Two threads are left for others, at once.
    async with asyncio.timeout(PATIENCE_S):
        assert await pool.run("other", divmod, 7, 2) == (3, 1)
    assert len(gate.order) == 2
    gate.go.set()
    await asyncio.gather(*greedy)
    assert len(gate.order) == 50


async def test_without_shares_one_key_delays_all_others(gate: Gate) -> None:
    """The control: the same calls, in a pool that one key may take."""
    pool = Pool("test", threads=4, share=4)
    greedy = [asyncio.create_task(pool.run("greedy", gate.call)) for _ in range(50)]
    await gate.wait_for(4)
    other = asyncio.create_task(pool.run("other", divmod, 7, 2))
    done, _ = await asyncio.wait({other}, timeout=0.2)
    assert not done
    gate.go.set()
    await asyncio.gather(other, *greedy)


async def test_keys_take_turns_when_all_threads_are_busy(gate: Gate) -> None:
    pool = Pool("test", threads=1, share=1)
    calls = [asyncio.create_task(pool.run("holder", gate.call, "first"))]
    await gate.wait_for(1)
    for label in ("a1", "a2", "a3", "b1", "b2"):
        calls.append(asyncio.create_task(pool.run(label[0], gate.call, label)))
        await _turns()
    gate.go.set()
    await asyncio.gather(*calls)
    assert gate.order == ["first", "a1", "b1", "a2", "b2", "a3"]


async def test_two_calls_at_once_wake_two_threads(gate: Gate) -> None:
    pool = Pool("test", threads=4, share=4)
    await pool.run("a", int)  # leaves one idle thread
    calls = [asyncio.create_task(pool.run("a", gate.call)) for _ in range(3)]
    await gate.wait_for(3)  # none waits for another one's thread
    gate.go.set()
    await asyncio.gather(*calls)


async def test_a_full_queue_refuses_further_calls_of_that_key_only(gate: Gate) -> None:
    pool = Pool("test", threads=2, share=1, queue=3)
    calls = [asyncio.create_task(pool.run("a", gate.call))]
    await gate.wait_for(1)
    calls += [asyncio.create_task(pool.run("a", gate.call)) for _ in range(3)]
    await _turns()
    with pytest.raises(PoolFullError, match="3 calls are waiting"):
        await pool.run("a", gate.call)
    assert await pool.run("b", divmod, 7, 2) == (3, 1)
    gate.go.set()
    await asyncio.gather(*calls)
    assert await pool.run("a", divmod, 7, 2) == (3, 1)


async def test_a_cancelled_call_is_waited_for(gate: Gate) -> None:
    """The caller may close the files that the thread uses."""
    pool = Pool("test", threads=1, share=1)
    finished = []

    def work() -> None:
        gate.call()
        finished.append(True)
        raise ValueError("no caller gets this")

    task = asyncio.create_task(pool.run("a", work))
    await gate.wait_for(1)
    for _ in range(3):
        task.cancel()
        await _turns()
        assert not task.done()
    gate.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished


async def test_a_cancelled_call_is_abandoned_where_it_cannot_be_interrupted(gate: Gate) -> None:
    pool = Pool("test", threads=2, share=1, abandon=True)
    task = asyncio.create_task(pool.run("a", gate.call))
    await gate.wait_for(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Its thread is still counted: abandoned calls do not add up beyond the share.
    second = asyncio.create_task(pool.run("a", gate.call))
    await _turns()
    assert len(gate.order) == 1
    gate.go.set()
    await second


async def test_a_call_that_is_cancelled_while_it_waits_never_runs(gate: Gate) -> None:
    pool = Pool("test", threads=1, share=1)
    first = asyncio.create_task(pool.run("a", gate.call, "first"))
    await gate.wait_for(1)
    waiting = asyncio.create_task(pool.run("b", gate.call, "waiting"))
    await _turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.go.set()
    await first
    await pool.run("b", int)
    assert gate.order == ["first"]


async def test_keys_are_forgotten_when_their_calls_have_ended(gate: Gate) -> None:
    pool = Pool("test", threads=2, share=1)
    calls = [asyncio.create_task(pool.run(n, gate.call)) for n in range(6)]
    await gate.wait_for(2)
    gate.go.set()
    await asyncio.gather(*calls)
    await pool.run("last", int)
    with pool._condition:
        assert not pool._waiting
        assert set(pool._running) <= {"last"}


async def test_a_thread_that_cannot_be_started_is_an_error_or_waits_for_another(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool("test", threads=4, share=4)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(PoolFullError, match="no thread can be started"):
            await pool.run("a", int)
    first = asyncio.create_task(pool.run("a", gate.call, "first"))
    await gate.wait_for(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        second = asyncio.create_task(pool.run("a", gate.call, "second"))
        await _turns()
    gate.go.set()
    assert await asyncio.gather(first, second) == ["first", "second"]


def test_loops_of_several_threads_share_a_pool() -> None:
    pool = Pool("test", threads=4, share=2)

    async def many(key: int) -> list[tuple[int, int]]:
        return await asyncio.gather(*(pool.run(key, divmod, n, 3) for n in range(100)))

    results: list[object] = []
    workers = [
        threading.Thread(target=lambda n=n: results.append(asyncio.run(many(n))))  # type: ignore[misc]
        for n in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert results == [[divmod(n, 3) for n in range(100)]] * 4


def test_a_loop_that_was_closed_does_not_harm_the_thread(gate: Gate) -> None:
    pool = Pool("test", threads=1, share=1)

    async def leave() -> None:
        pool.start("a", gate.call)
        await gate.wait_for(1)

    asyncio.run(leave())
    gate.go.set()
    assert asyncio.run(pool.run("a", divmod, 7, 2)) == (3, 1)


def test_a_forked_process_has_threads_of_its_own() -> None:
    asyncio.run(threads.files.run("a", int))
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            code = 0 if asyncio.run(threads.files.run("a", divmod, 7, 2)) == (3, 1) else 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


STUCK = """
import asyncio, threading
from union.sandbox._session import threads
entered = threading.Event()
def stuck():
    entered.set()
    threading.Event().wait()
async def main():
    task = asyncio.create_task(threads.names.run("a", stuck))
    while not entered.is_set():
        await asyncio.sleep(0.01)
asyncio.run(main())
print("over")
"""


def test_a_stuck_call_does_not_delay_the_interpreters_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], timeout=60, check=True, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("over\n", "")


@pytest.mark.threat(149)
def test_the_engine_uses_no_thread_of_the_default_executor() -> None:
    """The default executor is the caller's: one session could take all of it."""
    import union.sandbox

    root = os.path.dirname(union.sandbox.__file__)
    found = []
    for layer in ("_core", "_files", "_linux", "_session", "_backends", "on_device"):
        for folder, _, names in os.walk(os.path.join(root, layer)):
            for name in names:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8") as source:
                        text = source.read()
                    found += [
                        (path, use) for use in ("to_thread", "run_in_executor") if use in text
                    ]
    assert not found
