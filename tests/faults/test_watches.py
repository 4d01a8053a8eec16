"""A user's epoll watches are used up: commands are served all the same, and close() returns."""

from __future__ import annotations

import asyncio
import errno
import os
import select
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, descriptors, eventually, session_of

from union import sandbox as sb
from union.sandbox._linux import reader_set as ears_module
from union.sandbox._linux.reader_set import ReaderSet

if TYPE_CHECKING:
    from collections.abc import Iterator


_WATCH = ReaderSet._watch


class Exhausted:
    """Refuses to watch descriptors, as the kernel does at fs.epoll.max_user_watches."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        self.number = number
        self.refused = 0
        self.active = True

    def watch(self, readers: ReaderSet, fd: int) -> None:
        if self.active:
            self.refused += 1
            raise OSError(self.number, os.strerror(self.number))
        _WATCH(readers, fd)


@contextmanager
def exhausted(number: int = errno.ENOSPC) -> Iterator[Exhausted]:
    made = Exhausted(number)

    def watch(readers: ReaderSet, fd: int) -> None:
        made.watch(readers, fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReaderSet, "_watch", watch)
        yield made


BIG = "import sys; sys.stdout.write('x' * 3_000_000); sys.stderr.write('y' * 300_000)"


@pytest.mark.threat(145)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize("backend", ISOLATED)
async def test_commands_are_served_without_watches(backend: str, number: int) -> None:
    async with asyncio.timeout(60):
        async with session_of(backend) as session:
            await session.exec("true")
            with exhausted(number) as kernel:
                assert (await session.exec("echo out; echo err >&2; exit 3")).returncode == 3
                result = await session.exec(BIG, script_type="python")
                assert (len(result.stdout), len(result.stderr)) == (3_000_000, 300_000)
                proc = await session.run("cat", stdin=sb.PIPE, stdout=sb.PIPE, background=True)
                assert proc.stdin is not None
                proc.stdin.write(b"z" * 1_000_000)
                proc.stdin.close()
                assert len((await proc.communicate())[0]) == 1_000_000
                late = await session.exec("sleep 60", timeout_s=0.3)
                assert late.termination_reason == "timeout"
                proc = await session.run("stty size", pty=(5, 6))
                assert await proc.communicate() == (b"5 6\r\n", b"")
                assert kernel.refused > 5, "the control: it was refused each time"
                again = await session.run("sleep 60", background=True)
                kernel.active = False
                assert (await session.exec("echo works")).stdout == "works\n"
                assert again.returncode is None
        # close() ended what was started without a watch


@pytest.mark.threat(145)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_session_closes_that_had_no_watch_for_its_command(backend: str) -> None:
    with exhausted() as kernel:
        kernel.active = False
        session = await session_of(backend).open()
        await session.exec("true")
        before = descriptors()
        kernel.active = True
        proc = await session.run("sleep 60", background=True)
        async with asyncio.timeout(30):
            await session.close()
        assert (proc.termination_reason, proc.returncode) == ("closed", 137)
        assert descriptors().total() <= before.total()


@pytest.mark.threat(145)
@pytest.mark.parametrize("options", [{}, {"background": True}], ids=["", "background"])
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_command_that_cannot_be_followed_is_ended_and_close_returns(
    backend: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control for the tests above: without polling, a failure after the hand-over."""
    monkeypatch.setattr(ears_module, "_EXHAUSTED", frozenset())
    session = await session_of(backend).open()
    await session.exec("true")
    await asyncio.sleep(0.05)  # what is kept ready is ready; it costs descriptors
    before = descriptors()
    with exhausted() as kernel:
        for _ in range(5):
            with pytest.raises(sb.SandboxExecutionError) as caught:
                await session.run("sleep 60 & sleep 60", **options)
            assert caught.value.code == "spawn-ENOSPC"
        assert kernel.refused >= 5
    assert eventually(lambda: descriptors()["pipe"] <= before["pipe"])
    assert (await session.exec("echo works")).stdout == "works\n"
    async with asyncio.timeout(30):
        await session.close()


@pytest.mark.threat(145)
@pytest.mark.parametrize("backend", ISOLATED)
async def test_a_failure_to_read_output_ends_the_command(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reports are received, its output cannot be: it ends, and says why."""
    monkeypatch.setattr(ears_module, "_EXHAUSTED", frozenset())
    async with asyncio.timeout(60):
        async with session_of(backend) as session:
            await session.exec("true")
            with exhausted() as kernel:
                kernel.active = False
                proc = await session.run("echo begun; sleep 60", background=True, stdout=sb.PIPE)
                kernel.active = True
                with pytest.raises(sb.SandboxExecutionError) as caught:
                    await proc.wait()
            assert caught.value.code == "spawn-ENOSPC"
            assert (await session.exec("echo works")).stdout == "works\n"


async def test_a_session_that_cannot_be_watched_does_not_open_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with session_of("userns"):
        before = descriptors()
        loop = asyncio.get_running_loop()

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(loop, "add_reader", refuse)
            with pytest.raises(sb.SandboxExecutionError) as caught:
                await session_of("userns").open()
        assert caught.value.code == "spawn-ENOSPC"
        assert descriptors() == before


async def test_input_waits_where_the_loop_cannot_watch_the_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with session_of("userns") as session:
        proc = await session.run("sleep 0.2; wc -c", stdin=sb.PIPE, stdout=sb.PIPE, background=True)
        assert proc.stdin is not None
        loop = asyncio.get_running_loop()
        refused = []

        def refuse(*_: object) -> None:
            refused.append(True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(loop, "add_writer", refuse)
        async with asyncio.timeout(30):
            proc.stdin.write(b"x" * 500_000)
            await proc.stdin.drain()
            proc.stdin.close()
            assert (await proc.communicate())[0].split() == [b"500000"]
        assert refused


async def test_a_polled_descriptor_is_watched_as_soon_as_it_can_be() -> None:
    near, far = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    got: list[bytes] = []
    readers = ReaderSet()
    try:
        with exhausted() as kernel:
            readers.add(near, lambda: got.append(os.read(near, 100)))
            os.write(far, b"polled")
            async with asyncio.timeout(40):
                while not got:
                    await asyncio.sleep(0.01)
            kernel.active = False
            async with asyncio.timeout(40):
                while readers._unwatched:
                    await asyncio.sleep(0.01)
        os.write(far, b"watched")
        async with asyncio.timeout(40):
            while len(got) < 2:
                await asyncio.sleep(0.01)
        assert got == [b"polled", b"watched"]
        readers.remove(near)
        assert select.select([near], [], [], 0)[0] == []
    finally:
        readers.close()
        os.close(near)
        os.close(far)
