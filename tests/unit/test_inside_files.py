"""A hostile helper: every reply that is not as it must be ends it, and nothing of it is used."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from union import sandbox as sb
from union.sandbox._files.inside import InsideFiles
from union.sandbox._files.inside_frames import PIECE_BYTES, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

Answer = "Callable[[dict[str, Any], bytes], bytes]"


def frame(head: object, body: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("!II", len(text), len(body)) + text + body


class Puppet:
    """A helper whose replies the test decides."""

    def __init__(self, answer: Answer) -> None:
        self.sock, far = socket.socketpair()
        self.sock.setblocking(False)
        self.ended = 0
        self.requests: list[dict[str, Any]] = []
        self._task = asyncio.create_task(self._serve(far, answer))

    async def _serve(self, far: socket.socket, answer: Answer) -> None:
        reader, writer = await asyncio.open_connection(sock=far)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                sizes = struct.unpack("!II", await reader.readexactly(8))
                head = json.loads(await reader.readexactly(sizes[0]))
                body = await reader.readexactly(sizes[1])
                self.requests.append(head)
                writer.write(answer(head, body))
        writer.close()

    def end(self) -> None:
        self.ended += 1


@contextlib.asynccontextmanager
async def files_of(answer: Answer) -> AsyncIterator[tuple[InsideFiles, list[Puppet]]]:
    puppets: list[Puppet] = []

    async def start() -> Puppet:
        puppets.append(Puppet(answer))
        return puppets[-1]

    files = InsideFiles(start, work_dir="/w")
    yield files, puppets
    files.close()
    for puppet in puppets:
        await asyncio.wait_for(puppet._task, 40)


GOOD = ["name", 0o100644, 4, 1.5]
VIOLATIONS: dict[str, Callable[[int], bytes]] = {
    "another number": lambda n: frame({"id": n + 7, "end": True}),
    "no number": lambda _: frame({"end": True}),
    "a number that is a text": lambda n: frame({"id": str(n)}),
    "no object": lambda n: frame([n]),
    "no JSON": lambda _: struct.pack("!II", 3, 0) + b"{x}",
    "deep JSON": lambda _: struct.pack("!II", 200_000, 0) + b"[" * 200_000,
    "a huge head": lambda _: struct.pack("!II", 2**31, 0),
    "a huge body": lambda _: struct.pack("!II", 2, PIECE_BYTES + 1) + b"{}",
    "an errno out of range": lambda n: frame({"id": n, "errno": 70_000}),
    "an errno that is a text": lambda n: frame({"id": n, "errno": "2"}),
    "no items": lambda n: frame({"id": n, "end": True}),
    "items that are a text": lambda n: frame({"id": n, "items": "ab", "end": True}),
    "an entry that is a path": lambda n: frame({"id": n, "items": [["a/b", *GOOD[1:]]]}),
    "an entry that leads up": lambda n: frame({"id": n, "items": [["..", *GOOD[1:]]]}),
    "an entry without a name": lambda n: frame({"id": n, "items": [["", *GOOD[1:]]]}),
    "an entry with a NUL": lambda n: frame({"id": n, "items": [["a\0b", *GOOD[1:]]]}),
    "a name that is too long": lambda n: frame({"id": n, "items": [["a" * 256, *GOOD[1:]]]}),
    "a lone surrogate": lambda n: frame({"id": n, "items": [["\ud800", *GOOD[1:]]]}),
    "a negative size": lambda n: frame({"id": n, "items": [["a", 0o100644, -1, 0]]}),
    "a time that is no number": lambda n: frame({"id": n, "items": [["a", 0o100644, 1, "x"]]}),
    "an infinite time": lambda n: frame({"id": n, "items": [["a", 0o100644, 1, float("inf")]]}),
    "too few fields": lambda n: frame({"id": n, "items": [["a", 0o100644]]}),
}


@pytest.mark.spec("R2")
@pytest.mark.parametrize("kind", VIOLATIONS)
async def test_a_reply_that_violates_the_protocol_ends_the_helper(kind: str) -> None:
    answer: Answer = lambda head, _: VIOLATIONS[kind](head["id"])  # noqa: E731 - a value
    async with files_of(answer) as (files, puppets):
        with pytest.raises(sb.SandboxExecutionError, match="file helper") as caught:
            await asyncio.wait_for(files.list_dir("."), 40)
        assert caught.value.code == "file-helper"
        assert puppets[0].ended, "it is killed"
        with pytest.raises(sb.SandboxExecutionError):
            await asyncio.wait_for(files.list_dir("."), 40)
        assert len(puppets) == 2, "the next call starts another"


@pytest.mark.spec("R2")
async def test_good_replies_are_accepted() -> None:
    """The control of the violations."""
    answer: Answer = lambda head, _: frame({"id": head["id"], "items": [GOOD], "end": True})  # noqa: E731
    async with files_of(answer) as (files, puppets):
        found = await files.list_dir("/top")
        assert [(info.path, info.kind, info.mode) for info in found] == [
            ("/top/name", "file", 0o644)
        ]
        assert [info.path for info in await files.list_dir("/w/d")] == ["d/name"]
        assert len(puppets) == 1


@pytest.mark.spec("R2")
async def test_an_endless_file_listing_or_archive_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from union.sandbox._files import inside

    monkeypatch.setattr(inside, "MAX_DIR_ENTRIES", 1000)

    def answer(head: dict[str, Any], _: bytes) -> bytes:
        return frame({"id": head["id"], "items": [GOOD] * 100}, bytes(100_000))

    async with files_of(answer) as (files, puppets):
        with pytest.raises(sb.SandboxFileTooLargeError, match="max_bytes"):
            await files.get("f", max_bytes=1_000_000)
        with pytest.raises(sb.SandboxFileTooLargeError, match="more than 1000"):
            await files.list_dir(".")
        with pytest.raises(sb.SandboxFileTooLargeError):
            async for _ in files.archive(".", exclude=(), max_bytes=1_000_000):
                pass
        await asyncio.sleep(0)
        assert sum(head["op"] == "next" for head in puppets[0].requests) < 50


@pytest.mark.spec("R2")
async def test_a_cancelled_call_does_not_disturb_the_next() -> None:
    held: list[int] = []

    def answer(head: dict[str, Any], _: bytes) -> bytes:
        if head["op"] == "stat" and not held:
            held.append(head["id"])
            return b""
        late = b"".join(frame({"id": number, "info": GOOD}) for number in held if number)
        held[:] = [0]
        return late + frame({"id": head["id"], "info": GOOD, "end": True})

    async with files_of(answer) as (files, puppets):
        waiting = asyncio.create_task(files.stat("first"))
        while not held:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await files.stat("second")).path == "second"
        assert len(puppets) == 1
        assert files._channel is not None
        assert files._channel.lost is None


@pytest.mark.spec("R2")
async def test_messages_of_the_helper_show_no_control_characters() -> None:
    answer: Answer = lambda head, _: frame(  # noqa: E731 - a value
        {"id": head["id"], "errno": 22, "why": "\x1b[2Jred\n" + "x" * 5000}
    )
    async with files_of(answer) as (files, _):
        with pytest.raises(sb.SandboxFileError) as caught:
            await files.stat("f")
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_the_reason_of_a_refusal_is_shown(number: int) -> None:
    """For example, a Python that is too old to unpack safely."""
    reply = Reply({"id": 1, "errno": number, "why": "it needs a newer Python"}, b"")
    files = InsideFiles.__new__(InsideFiles)
    with pytest.raises(sb.SandboxFileError, match="'copy': it needs a newer Python"):
        files._checked(reply, "copy")
