"""InsideFiles: file calls that a helper inside the sandbox performs.

The host opens no path of the sandbox for them. Paths are resolved inside, with the rights of the
sandbox and through its links. The helper starts with the first call. If it ends, hangs or violates
the protocol, the calls in flight raise, and the next one starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any, Final, Protocol

from union.sandbox._core.file_errors import (
    SandboxFileError,
    SandboxFileTooLargeError,
    too_large_error,
    translate_os_errors,
)
from union.sandbox._core.files import VENV_DIR
from union.sandbox._core.paths import shown_path, visible_path
from union.sandbox._files.inside_frames import PIECE_BYTES, Decoder, FrameError, Reply, encode
from union.sandbox._files.writer import as_byte_view, check_mode
from union.sandbox.constants import MAX_DIR_ENTRIES
from union.sandbox.errors import SandboxExecutionError

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable

    from union.sandbox._core.files import FileChange, FileInfo

__all__ = ["HelperProcess", "InsideFiles"]

_REPLY_S: Final = 60.0
"""How long the helper may take for one piece. Code inside could stop it for ever."""
_LONG_S: Final = 600.0
"""The same for calls that take as long as a tree is large."""
_MAX_WAITING: Final = 16
_WRITE: Final = ("open", "write", "close")
_UNPACK: Final = ("unpack", "feed", "finish")


class HelperProcess(Protocol):
    """A helper that runs: the socket to it, and how to end it."""

    sock: socket.socket

    def end(self) -> None:
        """Kill it. May be called more than once."""


class _Channel(asyncio.Protocol):
    """The connection to one helper."""

    def __init__(self, process: HelperProcess) -> None:
        self._process = process
        self._decoder = Decoder()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._dropped: set[int] = set()
        self._transport: asyncio.Transport | None = None
        self._last = 0
        self.lost: str | None = None
        """Why no further call is possible."""

    # From the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a socket, so it is one

    def data_received(self, data: bytes) -> None:
        if self.lost is not None:
            return
        try:
            for reply in self._decoder.feed(data):
                if reply.number in self._dropped:
                    self._dropped.discard(reply.number)
                    continue
                future = self._waiting.pop(reply.number, None)
                if future is None:
                    raise FrameError("a reply to no request")
                if not future.done():
                    future.set_result(reply)
        except FrameError as exc:
            self.fail(f"it sent {exc}")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - of the protocol
        self.fail("it has ended")

    def fail(self, why: str) -> None:
        """End the helper; every call that waits raises."""
        if self.lost is None:
            self.lost = why
        if self._transport is not None:
            self._transport.abort()
        self._process.end()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(_helper_error(self.lost))

    # Calls.

    async def request(
        self,
        op: str,
        args: dict[str, Any],
        body: bytes | memoryview = b"",
        *,
        within_s: float | None = _REPLY_S,
    ) -> Reply:
        """Send one request and return its reply, which may be an error."""
        if self.lost is not None or self._transport is None:
            raise _helper_error(self.lost or "it has not started")
        self._last += 1
        number = self._last
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._transport.write(encode({"id": number, "op": op, **args}, body))
        handle = None
        if within_s is not None:
            handle = asyncio.get_running_loop().call_later(
                within_s, self.fail, f"it has not replied for {within_s:g} s"
            )
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                self._dropped.add(number)
            self.drop(number)
            raise
        finally:
            if handle is not None:
                handle.cancel()

    def drop(self, number: int) -> None:
        """Release what a reader holds inside; its replies are ignored."""
        if self.lost is None and self._transport is not None:
            self._last += 1
            self._dropped.add(self._last)
            self._transport.write(encode({"id": self._last, "op": "drop", "of": number}))


def _helper_error(why: str) -> SandboxExecutionError:
    return SandboxExecutionError(
        f"the file helper inside the sandbox failed: {why}",
        stage="files",
        code="file-helper",
        hint="code in the session may have stopped or killed it; the next file call starts another",
    )


class InsideFiles:
    """The file calls of a session in machine mode.

    Args:
        start: starts a helper.
        work_dir: the directory inside that relative paths refer to.

    """

    def __init__(self, start: Callable[[], Awaitable[HelperProcess]], *, work_dir: str) -> None:
        self._start = start
        self._work_dir = work_dir
        self._channel: _Channel | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(_MAX_WAITING)

    async def _connected(self) -> _Channel:
        channel = self._channel
        if channel is not None and channel.lost is None:
            return channel
        async with self._starting:
            if self._channel is None or self._channel.lost is not None:
                process = await self._start()
                channel = _Channel(process)
                try:
                    await asyncio.get_running_loop().create_unix_connection(
                        lambda: channel, sock=process.sock
                    )
                except BaseException:
                    process.end()
                    process.sock.close()
                    raise
                self._channel = channel
            return self._channel

    def close(self) -> None:
        """End the helper."""
        if self._channel is not None:
            self._channel.fail("the session is closed")

    def _path(self, path: object, argument: str = "path") -> str:
        return visible_path(path, work_dir=self._work_dir, argument=argument)

    async def _call(
        self,
        op: str,
        path: str,
        args: dict[str, Any],
        body: bytes | memoryview = b"",
        *,
        within_s: float = _REPLY_S,
    ) -> Reply:
        async with self._slots:
            channel = await self._connected()
            return self._checked(
                await channel.request(op, {"path": path, **args}, body, within_s=within_s), path
            )

    async def _pieces(
        self,
        op: str,
        path: str,
        args: dict[str, Any],
        *,
        within_s: float | None = _REPLY_S,
    ) -> AsyncGenerator[Reply, None]:
        """Yield the replies of an operation that reads."""
        channel = await self._connected()
        reply = self._checked(await channel.request(op, {"path": path, **args}), path)
        number = reply.number
        try:
            while True:
                yield reply
                if reply.is_last:
                    return
                reply = self._checked(
                    await channel.request("next", {"of": number}, within_s=within_s), path
                )
        finally:
            if not reply.is_last:
                channel.drop(number)

    def _protocol_error(self, exc: FrameError) -> SandboxExecutionError:
        if self._channel is not None:
            self._channel.fail(f"it sent {exc}")
        return _helper_error(f"it sent {exc}")

    def _checked(self, reply: Reply, path: str) -> Reply:
        """Return a reply that is no error; raise the error otherwise."""
        try:
            error = reply.error
        except FrameError as exc:
            raise self._protocol_error(exc) from exc
        if error is None:
            return reply
        number, why = error
        if number in {errno.ELOOP, errno.EXDEV, errno.EINVAL, errno.ECANCELED, errno.ENOSYS}:
            # Here they have their usual meaning: links are followed, no directory is a border.
            has_reason = number in {errno.EINVAL, errno.ENOSYS} and why
            reason = why if has_reason else os.strerror(number)
            raise SandboxFileError(f"{shown_path(path)}: {reason}", path=path, number=number)
        with translate_os_errors(path):
            raise OSError(number, os.strerror(number))
        raise AssertionError

    # The calls of every session.

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        check_mode(mode)
        view = as_byte_view(data)
        target = self._path(path)
        if len(view) <= PIECE_BYTES:
            await self._call("put", target, {"mode": mode, "exclusive": not overwrite}, view)
            return len(view)

        async def chunks() -> AsyncGenerator[memoryview, None]:
            for at in range(0, len(view), PIECE_BYTES):
                yield view[at : at + PIECE_BYTES]

        args = {"mode": mode, "exclusive": not overwrite}
        return await self._send(_WRITE, target, args, chunks())

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        pieces = [piece async for piece in self.read(path, max_bytes=max_bytes)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        check_mode(mode)
        args = {"mode": mode, "exclusive": not overwrite}
        return await self._send(_WRITE, self._path(path), args, chunks)

    async def _send(
        self,
        steps: tuple[str, str, str],
        path: str,
        args: dict[str, Any],
        chunks: AsyncIterable[bytes | memoryview],
    ) -> int:
        """Send chunks to one operation that writes; if they raise, it is ended."""
        begin, step, end = steps
        channel = await self._connected()
        number = self._checked(await channel.request(begin, {"path": path, **args}), path).number
        size = 0
        try:
            async for chunk in chunks:
                for at in range(0, len(chunk), PIECE_BYTES):
                    piece = chunk[at : at + PIECE_BYTES]
                    self._checked(await channel.request(step, {"of": number}, piece), path)
                    size += len(piece)
        except BaseException:
            with contextlib.suppress(SandboxExecutionError):
                await channel.request(end, {"of": number, "keep": False}, within_s=_LONG_S)
            raise
        finished = await channel.request(end, {"of": number, "keep": True}, within_s=_LONG_S)
        self._checked(finished, path)
        return size

    async def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        target = self._path(path)
        size = 0
        pieces = self._pieces("get", target, {})
        try:
            async for reply in pieces:
                size += len(reply.body)
                if size > max_bytes:
                    raise too_large_error(target, size=size, max_bytes=max_bytes)
                if reply.body:
                    yield reply.body
        finally:
            await pieces.aclose()

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        target = self._path(path)
        prefix = "" if target == "." else target.rstrip("/") + "/"
        found = await self._collect("list", target, {}, lambda reply: reply.entries(prefix))
        return tuple(sorted(found, key=lambda info: info.path))

    async def _collect(
        self,
        op: str,
        path: str,
        args: dict[str, Any],
        items: Callable[[Reply], Iterable[Any]],
    ) -> list[Any]:
        found: list[Any] = []
        pieces = self._pieces(op, path, args, within_s=_LONG_S)
        try:
            async for reply in pieces:
                found += items(reply)
                if len(found) > MAX_DIR_ENTRIES:
                    msg = f"{shown_path(path)} has more than {MAX_DIR_ENTRIES} entries"
                    raise SandboxFileTooLargeError(msg, path=path, code="too-many-entries")
        except FrameError as exc:
            raise self._protocol_error(exc) from exc
        finally:
            await pieces.aclose()
        return found

    async def stat(self, path: str) -> FileInfo:
        target = self._path(path)
        reply = await self._call("stat", target, {})
        try:
            return reply.info(target)
        except FrameError as exc:
            raise self._protocol_error(exc) from exc

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        await self._call("mkdir", self._path(path), {"parents": parents, "exist_ok": exist_ok})

    async def remove(self, path: str, *, recursive: bool) -> None:
        target = self._path(path)
        await self._call("remove", target, {"recursive": recursive}, within_s=_LONG_S)

    # The calls of machine mode alone.

    async def append(self, path: str, data: bytes, *, mode: int) -> int:
        """Add bytes to the end of a file; return its new size."""
        check_mode(mode)
        view = as_byte_view(data)
        target = self._path(path)
        size = 0
        # One piece is one write, which other writers cannot come between.
        for at in range(0, max(len(view), 1), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            reply = await self._call("append", target, {"mode": mode, "exclusive": False}, piece)
            try:
                size = reply.size
            except FrameError as exc:
                raise self._protocol_error(exc) from exc
        return size

    async def rename(self, source: str, target: str, *, overwrite: bool) -> None:
        """Rename a file, link or directory."""
        where = self._path(target, "target")
        await self._call("rename", self._path(source), {"target": where, "overwrite": overwrite})

    async def glob(self, pattern: str, *, hidden: bool) -> tuple[str, ...]:
        """Return the paths that match a pattern, sorted."""
        checked = self._path(pattern, "pattern")
        found = await self._collect("glob", checked, {"hidden": hidden}, lambda r: r.paths())
        if not checked.startswith(VENV_DIR):
            found = [path for path in found if path.partition("/")[0] != VENV_DIR]
        return tuple(sorted(found))

    async def watch(self, path: str, *, recursive: bool) -> AsyncGenerator[FileChange | None, None]:
        """Yield None when the watch has begun, and then each change."""
        target = self._path(path)
        prefix = "" if target == "." else target.rstrip("/") + "/"
        pieces = self._pieces("watch", target, {"recursive": recursive}, within_s=None)
        is_first = True
        try:
            async for reply in pieces:
                for change in reply.changes(prefix):
                    yield change
                if is_first:
                    is_first = False
                    yield None
        except FrameError as exc:
            raise self._protocol_error(exc) from exc
        finally:
            await pieces.aclose()

    async def archive(
        self, path: str, *, exclude: tuple[str, ...], max_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield a tar stream of a file or tree, with links."""
        target = self._path(path)
        size = 0
        left_out = [*exclude, VENV_DIR] if target == "." else [*exclude]
        pieces = self._pieces("archive", target, {"exclude": left_out}, within_s=_LONG_S)
        try:
            async for reply in pieces:
                size += len(reply.body)
                if size > max_bytes:
                    raise too_large_error(target, size=size, max_bytes=max_bytes)
                if reply.body:
                    yield reply.body
        finally:
            await pieces.aclose()

    async def extract(self, path: str, chunks: AsyncIterable[bytes]) -> int:
        """Unpack a tar stream below a directory; return the bytes of the stream."""
        return await self._send(_UNPACK, self._path(path), {}, chunks)
