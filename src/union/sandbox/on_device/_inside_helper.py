"""The helper that performs file calls inside a sandbox. It runs there, and only there.

It is one stand-alone program of the standard library: the host passes its source to the owner's
interpreter. Its standard input is a socket. A message is a head (JSON) and a body (bytes), each
with its length in front. Every request has a number, and gets exactly one reply with that number.

Calls have the rights of the sandbox, and the kernel resolves paths and links inside it. Operations
that read are generators of pieces: a reply carries one piece and the number under which the next
one is requested. Quick operations run in the thread that reads requests, others in their own.
"""

import contextlib
import ctypes
import errno
import glob
import json
import os
import queue
import select
import shutil
import socket
import stat
import struct
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

SIZES = struct.Struct("!II")
PIECE_BYTES = 1024 * 1024
PAGE_BYTES = 48 * 1024
"""Characters of names in one piece of a listing; each may take six bytes as JSON."""
QUICK = frozenset({"get", "put", "append", "open", "write", "close", "stat", "list", "mkdir"})
EVENT = struct.Struct("iIII")
CHANGES = {0x100: "created", 0x80: "created", 0x2: "changed", 0x4: "changed", 0x8: "changed",
           0x200: "deleted", 0x40: "deleted", 0x400: "deleted"}  # fmt: skip
"""The bits of inotify: create, moved_to; modify, attrib, close_write; delete, moved_from, self."""
IS_DIR, OVERFLOW, IGNORED, ONLY_DIR = 0x40000000, 0x4000, 0x8000, 0x01000000

Piece = tuple[dict[str, Any], bytes, bool]
"""The head and the body of a reply, and whether it is the last."""
Args = dict[str, Any]


def opened(path: str, flags: int, mode: int = 0) -> int:
    """Open a regular file; a FIFO or a device is never waited for."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.ENODEV
    raise OSError(number, os.strerror(number))


def opened_to_write(path: str, args: Args, flags: int) -> tuple[int, bool]:
    """Open a file to write, with its parent directories; return whether it is new."""
    if args.get("exclusive"):
        flags |= os.O_EXCL
    for attempt in range(2):
        try:
            with contextlib.suppress(FileExistsError):
                return opened(path, flags | os.O_CREAT | os.O_EXCL, args["mode"]), True
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            # Through a link, also a dangling one.
            return opened(path, flags | os.O_CREAT, args["mode"]), False
        except FileNotFoundError:
            if attempt:
                raise
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    raise AssertionError


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def set_mode(fd: int, mode: int) -> None:
    # A file of another user keeps its mode: being allowed to write does not allow more.
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, mode)


def described(name: str, found: os.stat_result) -> list[Any]:
    return [name, found.st_mode, found.st_size, found.st_mtime]


def pages(items: Iterator[tuple[int, Any]]) -> Iterator[Piece]:
    """Yield items in pages; each comes with its size."""
    page: list[Any] = []
    size = 0
    for weight, item in items:
        page.append(item)
        size += weight
        if size > PAGE_BYTES:
            yield {"items": page}, b"", False
            page, size = [], 0
    yield {"items": page}, b"", True


# Operations that read.


def op_get(args: Args, _: bytes) -> Iterator[Piece]:
    fd = opened(args["path"], os.O_RDONLY)
    try:
        left = os.fstat(fd).st_size
        while True:
            data = os.read(fd, PIECE_BYTES)
            left -= len(data)
            # A file that grows is read as far as it was long. Files of /proc have no size; they
            # end with an empty read.
            is_last = not data or left == 0
            yield {}, data, is_last
            if is_last:
                return
    finally:
        os.close(fd)


def op_list(args: Args, _: bytes) -> Iterator[Piece]:
    def entries() -> Iterator[tuple[int, Any]]:
        with os.scandir(args["path"]) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    info = described(entry.name, entry.stat(follow_symlinks=False))
                    yield len(entry.name) + 32, info

    return pages(entries())


def op_stat(args: Args, _: bytes) -> Iterator[Piece]:
    yield {"info": described("", os.stat(args["path"]))}, b"", True


def op_glob(args: Args, _: bytes) -> Iterator[Piece]:
    found = glob.iglob(args["path"], recursive=True, include_hidden=bool(args["hidden"]))
    return pages((len(path), path) for path in found)


def op_archive(args: Args, _: bytes) -> Iterator[Piece]:
    """Yield a tar stream: files, directories, links; other kinds of files are left out."""
    top = args["path"]
    os.stat(top)
    excluded = set(args["exclude"])
    buffer = bytearray()
    with tarfile.TarFile(fileobj=cast("IO[bytes]", _Nothing()), mode="w") as names:
        for path, name in tree(top, excluded):
            try:
                member = names.gettarinfo(path, name)
            except FileNotFoundError:
                continue
            if member is None or not (
                member.isfile() or member.isdir() or member.issym() or member.islnk()
            ):
                continue
            if not member.isreg() or not member.size:
                buffer += member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
            else:
                try:
                    fd = opened(path, os.O_RDONLY)
                except OSError:
                    continue  # it may not be read, or was replaced
                try:
                    member.size = os.fstat(fd).st_size
                    buffer += member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
                    left = member.size
                    while left:
                        data = os.read(fd, min(left, PIECE_BYTES)) or bytes(min(left, PIECE_BYTES))
                        left -= len(data)
                        buffer += data
                        while len(buffer) >= PIECE_BYTES:
                            yield {}, bytes(buffer[:PIECE_BYTES]), False
                            del buffer[:PIECE_BYTES]
                    buffer += bytes(-member.size % tarfile.BLOCKSIZE)
                finally:
                    os.close(fd)
            while len(buffer) >= PIECE_BYTES:
                yield {}, bytes(buffer[:PIECE_BYTES]), False
                del buffer[:PIECE_BYTES]
    buffer += bytes(2 * tarfile.BLOCKSIZE)
    yield {}, bytes(buffer), True


class _Nothing:
    """A file that discards what is written: the archive is built from its headers."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size


def tree(top: str, excluded: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the name in the archive of every entry; links are not followed."""
    if not os.path.isdir(top):
        yield top, os.path.basename(top)
        return
    for folder, dirs, files in os.walk(top):
        below = os.path.relpath(folder, top)
        names = {name: name if below == "." else f"{below}/{name}" for name in (*dirs, *files)}
        dirs[:] = sorted(name for name in dirs if names[name] not in excluded)
        for name in (*dirs, *sorted(files)):
            if names[name] not in excluded:
                yield f"{folder}/{name}", names[name]


def op_watch(args: Args, _: bytes) -> Iterator[Piece]:
    """Yield changes of a file or below a directory, until the waker is closed."""
    watcher = Watcher(args["path"], is_deep=bool(args["recursive"]))
    try:
        yield {"items": []}, b"", False
        while True:
            ready, _w, _x = select.select([watcher.fd, args["wake"]], [], [])
            if args["wake"] in ready:
                return
            found = watcher.changes()
            for page, body, _last in pages((len(item[0]) + 16, item) for item in found):
                yield page, body, False
    finally:
        os.close(watcher.fd)
        os.close(args["wake"])


class Watcher:
    """An inotify instance, by the C library: Python has no module for it."""

    def __init__(self, top: str, *, is_deep: bool) -> None:
        self.top, self.is_deep = top, is_deep
        self.folders: dict[int, str] = {}
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.bits = 0
        for bit in CHANGES:
            self.bits |= bit
        self.fd: int = self.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise last_error()
        try:
            self.add("")
            if is_deep and os.path.isdir(top):
                self.deepen("", [])
        except BaseException:
            os.close(self.fd)
            raise

    def add(self, folder: str) -> bool:
        path = os.fsencode(f"{self.top}/{folder}" if folder else self.top)
        bits = self.bits | (ONLY_DIR if folder else 0)
        number = self.libc.inotify_add_watch(self.fd, path, bits)
        if number >= 0:
            self.folders[number] = folder
        elif not folder:
            raise last_error()
        return bool(number >= 0)  # otherwise it was removed, or may not be read

    def deepen(self, folder: str, found: list[list[str]]) -> None:
        """Watch the directories in one; report the entries that a new one has already."""
        path = f"{self.top}/{folder}" if folder else self.top
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                below = f"{folder}/{entry.name}" if folder else entry.name
                found.append([below, "created"])
                if entry.is_dir(follow_symlinks=False) and self.add(below):
                    self.deepen(below, found)

    def changes(self) -> list[list[str]]:
        """Return the changes that have happened, without repetitions one after another."""
        found: list[list[str]] = []
        data = os.read(self.fd, 65536)
        at = 0
        while at < len(data):
            number, mask, _cookie, size = EVENT.unpack_from(data, at)
            name = os.fsdecode(data[at + EVENT.size : at + EVENT.size + size].rstrip(b"\0"))
            at += EVENT.size + size
            if mask & OVERFLOW:
                found.append(["", "overflow"])
            kind = next((CHANGES[bit] for bit in CHANGES if mask & bit), None)
            folder = self.folders.get(number)
            if mask & IGNORED:
                self.folders.pop(number, None)
            if kind is None or folder is None:
                continue
            change = ["/".join(filter(None, (folder, name))), kind]
            if change not in found[-1:]:
                found.append(change)
            if self.is_deep and mask & IS_DIR and kind == "created" and self.add(change[0]):
                self.deepen(change[0], found)
        return found


def last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# Operations that change.


def op_put(args: Args, body: bytes) -> Iterator[Piece]:
    writer = Writer(args)
    try:
        writer.write(body)
    except BaseException:
        writer.close(keep=False)
        raise
    writer.close(keep=True)
    yield {}, b"", True


def op_append(args: Args, body: bytes) -> Iterator[Piece]:
    fd, _ = opened_to_write(args["path"], args, os.O_WRONLY | os.O_APPEND)
    try:
        write_all(fd, body)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    yield {"size": size}, b"", True


def op_mkdir(args: Args, _: bytes) -> Iterator[Piece]:
    path = args["path"]
    try:
        if args["parents"]:
            os.makedirs(os.path.dirname(path.rstrip("/")) or ".", exist_ok=True)
        os.mkdir(path)
    except FileExistsError:
        if not args["exist_ok"] or not os.path.isdir(path):
            raise
    yield {}, b"", True


def op_rename(args: Args, _: bytes) -> Iterator[Piece]:
    if args["overwrite"]:
        os.rename(args["path"], args["target"])
    else:
        rename_to_new(args["path"], args["target"])
    yield {}, b"", True


def rename_to_new(source: str, target: str) -> None:
    """Rename, but never replace: the kernel decides, so no other process can come between."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, no_replace = -100, 1
    done = libc.renameat2(here, os.fsencode(source), here, os.fsencode(target), no_replace)
    if done != 0:
        raise last_error()


def op_remove(args: Args, _: bytes) -> Iterator[Piece]:
    path = args["path"]
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif args["recursive"]:
        shutil.rmtree(path)
    else:
        os.rmdir(path)
    yield {}, b"", True


class Writer:
    """A file that is written in place.

    It is cut at the end, not emptied at the beginning: ext4 writes a file that was emptied to the
    disk when it is closed, which takes ten times as long.
    """

    def __init__(self, args: Args) -> None:
        self.path = args["path"]
        self.fd, self.is_new = opened_to_write(self.path, args, os.O_WRONLY)
        set_mode(self.fd, args["mode"])
        self.size = 0

    def write(self, data: bytes) -> None:
        write_all(self.fd, data)
        self.size += len(data)

    def close(self, *, keep: bool) -> None:
        try:
            if not self.is_new:
                os.ftruncate(self.fd, self.size)
        finally:
            os.close(self.fd)
        if not keep and self.is_new:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class Extraction:
    """A tar stream that is unpacked while it arrives."""

    def __init__(self, args: Args) -> None:
        if not hasattr(tarfile, "tar_filter"):
            raise OSError(
                errno.ENOSYS, "this Python cannot unpack safely: it needs 3.11.4 or later"
            )
        self.top = args["path"]
        os.makedirs(self.top, exist_ok=True)
        self.pieces: queue.Queue[bytes] = queue.Queue(2)
        self.rest = b""
        self.is_over = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.unpack, daemon=True)
        self.thread.start()

    def read(self, size: int) -> bytes:
        while len(self.rest) < size and not self.is_over:
            self.rest += self.next()
        data, self.rest = self.rest[:size], self.rest[size:]
        return data

    def next(self) -> bytes:
        piece = self.pieces.get()
        self.is_over = not piece
        return piece

    def unpack(self) -> None:
        try:
            with tarfile.open(fileobj=self, mode="r|") as archive:  # type: ignore[call-overload]
                archive.chown = lambda *_: None
                for member in archive:
                    if member.isdev():
                        continue
                    archive.extract(member, self.top, filter="tar")
        except BaseException as exc:  # noqa: BLE001 - the next request reports it
            self.error = exc
        while not self.is_over:
            self.next()  # the sender waits for room

    def write(self, data: bytes) -> None:
        self.raise_error()
        if data:
            self.pieces.put(data)

    def close(self, *, keep: bool) -> None:
        if not keep and self.error is None:
            self.error = OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        self.pieces.put(b"")
        self.thread.join()
        if keep:
            self.raise_error()

    def raise_error(self) -> None:
        exc = self.error
        if isinstance(exc, OSError) and exc.errno is not None:
            raise exc
        if exc is not None:
            raise ValueError(f"{type(exc).__name__}: {exc}")


OPERATIONS: dict[str, Callable[[Args, bytes], Iterator[Piece]]] = {
    "append": op_append,
    "archive": op_archive,
    "get": op_get,
    "glob": op_glob,
    "list": op_list,
    "mkdir": op_mkdir,
    "put": op_put,
    "remove": op_remove,
    "rename": op_rename,
    "stat": op_stat,
    "watch": op_watch,
}


class Helper:
    """Serve the requests of one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sending = threading.Lock()
        self.readers: dict[int, Iterator[Piece]] = {}
        self.writers: dict[int, Writer | Extraction] = {}
        self.wakers: dict[int, int] = {}

    def serve(self) -> None:
        while (message := self.receive()) is not None:
            head, body = message
            if head["op"] in QUICK:
                self.answer(head, body)
            else:
                threading.Thread(target=self.answer, args=(head, body), daemon=True).start()

    def receive(self) -> tuple[Args, bytes] | None:
        sizes = self.exactly(SIZES.size)
        if sizes is None:
            return None
        head_size, body_size = SIZES.unpack(sizes)
        head, body = self.exactly(head_size), self.exactly(body_size)
        return None if head is None or body is None else (json.loads(head), body)

    def exactly(self, size: int) -> bytes | None:
        if not size:
            return b""
        data = self.sock.recv(size, socket.MSG_WAITALL)
        while 0 < len(data) < size:
            more = self.sock.recv(size - len(data), socket.MSG_WAITALL)
            if not more:
                return None
            data += more
        return data or None

    def answer(self, head: Args, body: bytes) -> None:
        number = head["id"]
        try:
            reply, data = self.perform(head, body)
        except OSError as exc:
            reply, data = {"errno": exc.errno or errno.EIO, "why": str(exc.strerror)[:200]}, b""
        except Exception as exc:  # noqa: BLE001 - the caller gets it
            reply, data = {"errno": errno.EINVAL, "why": str(exc)[:200]}, b""
        text = json.dumps({"id": number, **reply}).encode()
        with self.sending:
            self.sock.sendall(SIZES.pack(len(text), len(data)) + text + data)

    def perform(self, head: Args, body: bytes) -> tuple[Args, bytes]:
        number, operation = head["id"], head["op"]
        if operation == "open":
            self.writers[number] = Writer(head)
            return {}, b""
        if operation == "unpack":
            self.writers[number] = Extraction(head)
            return {}, b""
        if operation in {"write", "feed"}:
            self.writers[head["of"]].write(body)
            return {}, b""
        if operation in {"close", "finish"}:
            self.writers.pop(head["of"]).close(keep=head["keep"])
            return {}, b""
        if operation == "next":
            return self.piece(head["of"])
        if operation == "drop":
            return self.drop(head["of"])
        if operation == "watch":
            head["wake"], self.wakers[number] = os.pipe()
        self.readers[number] = OPERATIONS[operation](head, body)
        return self.piece(number)

    def piece(self, number: int) -> tuple[Args, bytes]:
        reader = self.readers[number]
        try:
            head, body, is_last = next(reader)
        except StopIteration:
            self.readers.pop(number, None)
            return {"end": True}, b""
        except BaseException:
            self.readers.pop(number, None)
            raise
        if is_last:
            self.readers.pop(number, None)
            reader.close()  # type: ignore[attr-defined]  # all of them are generators
            return head | {"end": True}, body
        return head, body

    def drop(self, number: int) -> tuple[Args, bytes]:
        reader = self.readers.pop(number, None)
        waker = self.wakers.pop(number, None)
        if waker is not None:
            os.close(waker)  # select() returns, and the generator ends
        elif reader is not None:
            reader.close()  # type: ignore[attr-defined]  # all of them are generators
        return {}, b""


def main() -> None:
    """Serve the socket that is the standard input; the work dir is the argument."""
    os.chdir(sys.argv[1])
    with contextlib.suppress(ConnectionError):  # the host has gone
        Helper(socket.socket(fileno=os.dup(0))).serve()
    os._exit(0)  # threads may still work for a host that does not listen any more


if __name__ == "__main__":
    main()
