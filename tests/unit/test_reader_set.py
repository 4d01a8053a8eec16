"""Listening to many descriptors through one."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux.reader_set import ReaderSet

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for _ in range(3)]
    yield made
    for ends in made:
        for fd in ends:
            os.close(fd)


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_for_as_long_as_there_is_something_to_read(
    pipes: list[tuple[int, int]],
) -> None:
    near, far = pipes[0]
    readers, received = ReaderSet(), []

    def call() -> None:
        received.append(os.read(near, 1))

    readers.add(near, call)
    await _turns()
    assert received == []
    os.write(far, b"abc")
    await _turns()
    assert received == [b"a", b"b", b"c"]
    readers.remove(near)
    readers.remove(near)
    os.write(far, b"d")
    await _turns()
    assert len(received) == 3
    readers.close()


async def test_the_last_call_that_was_given_counts(pipes: list[tuple[int, int]]) -> None:
    near, far = pipes[0]
    readers, received = ReaderSet(), []
    readers.add(near, lambda: received.append("first"))
    readers.add(near, lambda: received.append(os.read(near, 1).decode()))
    os.write(far, b"x")
    await _turns()
    assert received == ["x"]
    readers.close()


async def test_what_another_one_has_removed_is_not_called(pipes: list[tuple[int, int]]) -> None:
    readers, received = ReaderSet(), []

    def only(number: int) -> None:
        received.append(number)
        for near, _ in pipes:
            readers.remove(near)

    for number, (near, far) in enumerate(pipes):
        readers.add(near, lambda number=number: only(number))  # type: ignore[misc]
        os.write(far, b"x")
    await _turns()
    assert len(received) == 1
    readers.close()


async def test_a_call_that_raises_does_not_silence_the_others(
    pipes: list[tuple[int, int]],
) -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(str(what)))
    readers, received = ReaderSet(), []

    def fails() -> None:
        readers.remove(pipes[0][0])
        raise ValueError("of ours")

    readers.add(pipes[0][0], fails)
    readers.add(pipes[1][0], lambda: received.append(os.read(pipes[1][0], 1)))
    for _, far in pipes[:2]:
        os.write(far, b"x")
    await _turns()
    assert received == [b"x"]
    assert len(reported) == 1
    assert "of ours" in reported[0]
    readers.close()


async def test_after_its_end_it_is_there_for_what_is_listened_to(
    pipes: list[tuple[int, int]],
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    (near, far), (late, late_far), _ = pipes
    readers, received = ReaderSet(), []

    def hear(fd: int) -> None:
        received.append(os.read(fd, 1))
        readers.remove(fd)

    readers.add(near, lambda: hear(near))
    readers.close()
    for fd, other in ((near, far), (late, late_far)):
        readers.add(fd, lambda fd=fd: hear(fd))  # type: ignore[misc]
        os.write(other, b"x")
        await _turns()
        assert len(os.listdir("/proc/self/fd")) == before
    assert received == [b"x", b"x"]
    readers.close()
