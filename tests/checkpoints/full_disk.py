"""A program that uses checkpoints on a disk that fills up, for ``test_full_disk``.

The directory is a small tmpfs of its own. For n = 0, 1, ... a call is made with n free inodes, so
that it fails at each directory that it makes, until it succeeds. For each call, one line of JSON is
printed.

Usage: python -m tests.checkpoints.full_disk DIRECTORY BACKEND
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from union import sandbox as sb
from union.sandbox.on_device import _layer_merging, _workdir

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

MAX_INODES = 40
MIB = 2**20


class Disk:
    """The small disk, and files of the test that leave a part of it free."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ballast = os.path.join(path, "ballast")

    @contextlib.contextmanager
    def with_free_inodes(self, number: int) -> Any:
        os.mkdir(self._ballast)
        while (free := os.statvfs(self._path).f_ffree) > number:
            for name in range(free - number):
                open(f"{self._ballast}/{free}-{name}", "x").close()
        try:
            yield
        finally:
            shutil.rmtree(self._ballast)

    @contextlib.contextmanager
    def with_free_bytes(self, number: int) -> Any:
        found = os.statvfs(self._path)
        with open(self._ballast, "wb") as file:
            file.write(bytes(found.f_bavail * found.f_frsize - number))
        try:
            yield
        finally:
            os.unlink(self._ballast)

    def left(self) -> list[str]:
        return sorted(os.listdir(self._path))


def report(call: str, **found: Any) -> None:
    print(json.dumps({"call": call, **found}), flush=True)


async def failure_of(awaitable: Awaitable[Any]) -> dict[str, str]:
    """Await a call; return its error, or an empty one."""
    try:
        await awaitable
    except sb.SandboxError as error:
        return {"error": type(error).__name__, "code": error.code, "hint": error.hint}
    return {"error": "", "code": "", "hint": ""}


@contextlib.asynccontextmanager
async def opened(backend: str) -> AsyncIterator[sb.Session]:
    async with sb.on_device.session(backend=backend, warm=0) as session:
        await session.put_bytes("a", b"1")
        await session.exec("true")
        yield session


def layers_of(session: sb.Session) -> list[str]:
    store = session._transport.checkpoint_calls._state._store
    return [] if store is None else sorted(filter(str.isdigit, os.listdir(store.path)))


async def first_checkpoint(disk: Disk, backend: str) -> None:
    for free in range(MAX_INODES):
        async with opened(backend) as session:
            with disk.with_free_inodes(free):
                failure = await failure_of(session.checkpoint())
                layers = layers_of(session)
                output = (await session.exec("cat a")).stdout
            written = (await session.exec("echo 2 > c && cat c")).stdout
            again = await session.checkpoint()
        report(
            "first checkpoint", **failure, free=free, layers=layers, output=output,
            written=written, kind=again.kind, left=disk.left(),
        )  # fmt: skip
        if not failure["error"]:
            return


async def other_calls(disk: Disk, backend: str) -> None:
    async with opened(backend) as session:
        kept = await session.checkpoint("kept")

        async def fork() -> None:
            async with kept.fork() as other:
                assert await other.get_bytes("a") == b"1"

        async def checkpoint() -> None:
            await (await session.checkpoint()).drop()

        async def rollback() -> None:
            await session.rollback(kept)

        for call in (checkpoint, rollback, fork):
            for free in range(MAX_INODES):
                await session.put_bytes("b", b"2")
                await asyncio.gather(*session._transport.checkpoint_calls._state.removals)
                before = layers_of(session)
                with disk.with_free_inodes(free):
                    failure = await failure_of(call())
                    output = (await session.exec("cat a")).stdout
                # What a failed call did, if anything, has been undone.
                is_same = layers_of(session) == before
                written = (await session.exec("echo 2 > c && cat c && rm c")).stdout
                files = [info.path for info in await session.list_dir(".")]
                await session.rollback(kept)
                report(
                    call.__name__, **failure, free=free, output=output, is_same=is_same,
                    written=written, files=files, kind=kept.kind,
                    restored=[info.path for info in await session.list_dir(".")],
                )  # fmt: skip
                if not failure["error"]:
                    break
    report("close", left=disk.left())


async def merges(disk: Disk, backend: str) -> None:
    """Merges in the background, with and without the check for room."""
    async with opened(backend) as session:
        _layer_merging.MIN_LAYERS = 1000  # type: ignore[misc]
        await session.checkpoint()
        for number in range(4):
            await session.put_bytes(f"d{number}/f", b"1")
            kept = await session.checkpoint()
        _layer_merging.MIN_LAYERS = 2  # type: ignore[misc]
        state = session._transport.checkpoint_calls._state
        lower = state.layers.lower
        await asyncio.gather(*state.removals)
        before = layers_of(session)
        for room in (_layer_merging._ROOM, 0):
            _layer_merging._ROOM = room  # type: ignore[misc]
            for free in range(MAX_INODES):
                with disk.with_free_inodes(free):
                    state.merger.consider()
                    await state.merger._task
                    output = (await session.exec("cat d3/f")).stdout
                is_merged = lower[0].merged is not None
                report(
                    "merge", room=room, free=free, output=output, is_merged=is_merged,
                    is_same=layers_of(session) == before,
                    is_single=any(layer.is_single for layer in lower),
                )  # fmt: skip
                if is_merged:
                    break
        await session.rollback(kept)
        report("merged", files=sorted(info.path for info in await session.list_dir(".")))
    report("close", left=disk.left())


async def no_bytes(disk: Disk, backend: str) -> None:
    """Copies and files that are larger than what is free."""
    async with opened(backend) as session:
        await session.put_bytes("large", bytes(2 * MIB))
        kept = await session.checkpoint("kept")
        running = await session.run("sleep 60", background=True)
        with disk.with_free_bytes(MIB):
            failure = await failure_of(session.put_bytes("more", bytes(2 * MIB)))
            report("put_bytes", **failure)
            before = layers_of(session)
            failure = await failure_of(session.checkpoint())  # copies, as a command runs
            await asyncio.gather(*session._transport.checkpoint_calls._state.removals)
            report("copy", **failure, is_same=layers_of(session) == before)
            with tempfile.TemporaryDirectory() as elsewhere:
                report("export", **await failure_of(kept.export(f"{elsewhere}/archive.tar")))
            inside = await session.exec("head -c 2M /dev/zero > more; rm more; cat a")
            report("exec", output=inside.stdout, stderr=inside.stderr)
        copied = await session.checkpoint()
        report("copy again", kind=copied.kind, running=running.returncode is None)
        running.kill()
        await session.rollback(copied)
        report("restored", size=len(await session.get_bytes("large")))
    report("close", left=disk.left())


def main() -> None:
    place, backend = sys.argv[1:]
    _workdir._PREFERRED = place  # type: ignore[misc]
    for part in (first_checkpoint, other_calls, merges, no_bytes):
        asyncio.run(part(Disk(place), backend))


if __name__ == "__main__":
    main()
