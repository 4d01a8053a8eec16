"""RemoteTransport: a session on a server."""

from __future__ import annotations

import asyncio
import logging
import secrets
import warnings
from typing import TYPE_CHECKING, Any, Final, TypeVar

from union.sandbox._core.paths import work_path
from union.sandbox._files.writer import bytes_of, check_mode
from union.sandbox._wire.frames import VERSION, WireError
from union.sandbox._wire.values import (
    MAX_START,
    SessionInfo,
    decode_file,
    decode_session_info,
    encode_run,
    encode_session,
)
from union.sandbox.constants import MAX_DIR_ENTRIES
from union.sandbox.errors import (
    SandboxConnectionError,
    SandboxError,
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)
from union.sandbox.remote._admission import Admission
from union.sandbox.remote._link import Link, pauses
from union.sandbox.remote._run import RemoteRun

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable

    from union.sandbox._core.files import FileInfo
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._session.transport import Sink
    from union.sandbox._wire.message_stream import MessageStream
    from union.sandbox.remote._access import Access
    from union.sandbox.remote._http import Http

__all__ = ["RemoteTransport"]

_LOGGER: Final = logging.getLogger("union.sandbox.remote")
_T = TypeVar("_T")
_LEAST_S: Final = 1.0
_PIECE: Final = 256 * 1024
_MOST_INLINE_STDIN: Final = 1024 * 1024
_CLOSE_S: Final = 20.0
_DELETE_S: Final = 10.0
_REMOVE_S: Final = 300.0
"""How long a server may take to remove a tree."""
_SESSION_GRACE_S: Final = 15.0
"""How long after the session's timeout a call may take to be answered."""
_PATIENCE_S: Final = 30.0
"""How long a run without a timeout waits for a server that has no room for any of this session."""


class RemoteTransport:
    """Runs commands on a server, over one connection that many runs share."""

    def __init__(self, spec: SessionSpec, access: Access | None) -> None:
        self._spec = spec
        self._access = access
        self._name = secrets.token_hex(16)
        self._http: Http | None = None
        self._link: Link | None = None
        self._info: SessionInfo | None = None
        self._connecting = asyncio.Lock()
        self._admission = Admission()
        self._asked = False
        self._is_over = False

    # Opening and closing.

    async def open(self) -> None:
        if self._access is not None and not self._access.lazy:
            await self._connected()

    async def _connected(self) -> Link:
        """The link, made at the first call."""
        if self._link is None:
            async with self._connecting:
                if self._link is None:
                    await self._connect()
        link = self._link
        if link is None:
            raise RuntimeError("the transport was closed")
        if link.lost is not None:
            raise SandboxConnectionError(
                f"the session was lost: {link.lost.args[0]}",
                endpoint="" if self._access is None else str(self._access.endpoint),
                code="session-lost",
                hint="open a new session",
            )
        if link.closed.is_set():
            raise SessionClosedError("the server has ended the session", code="session-lost")
        return link

    @property
    def _way(self) -> Access:
        if self._access is None:
            raise RuntimeError("nobody has said where the server is")
        return self._access

    async def _requests(self) -> Http:
        """What makes requests; loaded when the first of them is to be made."""
        if self._http is None:
            from union.sandbox.remote._http import Http

            if self._is_over:
                raise SessionClosedError("the session is closed")
            access = self._way
            self._http = Http(access.endpoint, token=access.token, ca=access.ca)
            if self._spec.timeout_s is not None:
                now = asyncio.get_running_loop().time()
                self._http.deadline = now + self._spec.timeout_s + _SESSION_GRACE_S
        return self._http

    async def _connect(self) -> None:
        http = await self._requests()
        await self._check_health(http, self._way.connect_timeout_s)
        info = self._checked_info(await self._join(http))
        self._carry(await http.connect(self._name), info)

    def _checked_info(self, told: dict[str, Any]) -> SessionInfo:
        info = self._decoded(decode_session_info, told)
        if info.session != self._name:
            raise self._malformed(f"it describes the session {info.session!r:.80}")
        return info

    def _malformed(self, why: object) -> SandboxConnectionError:
        endpoint = str(self._way.endpoint)
        return SandboxConnectionError(
            f"{endpoint}: a reply that is not of this protocol: {why}",
            endpoint=endpoint,
            sent=True,
            code="protocol",
            hint="the server is faulty or hostile: do not use it",
        )

    def _decoded(self, decode: Callable[[Any], _T], value: object) -> _T:
        """What a server sent, checked; no error of a decoder reaches a caller as it is."""
        try:
            return decode(value)
        except (WireError, TypeError, LookupError, ArithmeticError, RecursionError) as exc:
            raise self._malformed(exc) from exc

    def _carry(self, carrier: MessageStream, info: SessionInfo) -> None:
        """The session is there, and a connection to it."""

        async def connect() -> MessageStream:
            return await (await self._requests()).connect(self._name)

        self._info = info
        self._link = Link(
            carrier,
            self._way.endpoint,
            connect=connect,
            let_go=self._let_go,
            grace_s=info.grace_s,
        )
        if info.isolation.backend == "none":
            warnings.warn(
                "backend='none' isolates nothing: commands run with all of the server's rights",
                UserWarning,
                stacklevel=5,
            )

    async def _join(self, http: Http) -> dict[str, Any]:
        """Opens the session; returns what the server says of it."""
        self._asked = True
        return await http.call("PUT", self._path(), encode_session(self._spec))

    async def _check_health(self, http: Http, within_s: float) -> None:
        """Waits for a server that is not there yet, or too busy; not for one that says no."""
        attempts = pauses(within_s)
        told: dict[str, Any] = {}
        while told.get("status") != "ok":
            try:
                left_s = max(attempts.left_s, _LEAST_S)
                told = await http.call("GET", "health", within_s=left_s)
                problem = SandboxConnectionError(
                    f"{http.endpoint}: the server is {told.get('status')!r:.100}", code="draining"
                )
            except SandboxConnectionError as exc:
                if exc.code in {"unauthorized", "certificate", "protocol"} or self._is_gone(exc):
                    raise
                problem = exc
            if told.get("status") != "ok" and not await attempts.wait():
                raise problem
        if told.get("protocol") != VERSION:
            raise SandboxConnectionError(
                f"{http.endpoint}: the server speaks version {told.get('protocol')!r:.100} of the "
                f"protocol, this client {VERSION}",
                code="version",
                hint="use the same version of unionai-sandbox on both sides",
            )

    def _is_gone(self, exc: SandboxConnectionError) -> bool:  # noqa: ARG002 - for others
        """Whether no server will ever answer here, so that there is nothing to wait for."""
        return False

    def _path(self, rest: str = "") -> str:
        return f"sessions/{self._name}{rest}"

    async def aclose(self) -> None:
        ended = not self._asked
        if self._link is not None:
            ended = await self._link.close(within_s=_CLOSE_S)
        if self._http is not None and not ended:
            await self._delete(self._http)
        await self._let_go()

    async def _let_go(self) -> None:
        self._is_over = True
        self._admission.close()
        if self._http is not None:
            await self._http.close()

    async def _delete(self, http: Http) -> None:
        try:
            http.deadline = None
            await http.call("DELETE", self._path(), within_s=_DELETE_S)
        except SandboxError as exc:
            # Its lease runs out: the server ends it by itself.
            _LOGGER.warning("the server did not confirm the end of a session: %s", exc)

    async def _live(self) -> Http:
        await self._connected()
        return await self._requests()

    # Session information.

    @property
    def is_known(self) -> bool:
        return self._info is not None

    @property
    def _known(self) -> SessionInfo:
        if self._info is None:
            raise SandboxUsageError(
                "the server was not reached yet",
                code="not-connected",
                hint="it is at the first call, or with lazy=False when the session is opened",
            )
        return self._info

    @property
    def work_dir(self) -> str:
        return self._known.work_dir

    @property
    def isolation(self) -> Isolation:
        return self._known.isolation

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        return dict(self._known.fs_allowlist)

    # Running.

    async def start(self, spec: RunSpec, sink: Sink) -> RemoteRun:
        await self._connected()
        stdin = spec.stdin
        if isinstance(stdin, bytes) and len(stdin) > _MOST_INLINE_STDIN:
            # Fed as the command takes it, so that neither side holds a second copy.
            spec = spec._replace(stdin="pipe")
        body = encode_run(spec, self._spec)
        if len(body) > MAX_START:
            raise SandboxUsageError(
                f"cmd and env take {len(body)} bytes; a server accepts {MAX_START}",
                argument="cmd",
                hint="put it into a file with put_bytes()",
            )
        run = await self._admitted(spec, body, sink)
        if isinstance(stdin, bytes) and len(stdin) > _MOST_INLINE_STDIN:
            run.feed_stdin(stdin)
            run.close_stdin()
        return run

    async def _admitted(self, spec: RunSpec, body: bytes, sink: Sink) -> RemoteRun:
        """Send a run when there is room for it; send it again while the server is busy."""
        patience_s = _PATIENCE_S if spec.timeout_s is None else spec.timeout_s
        slot = await self._admission.enter(patience_s)
        refusal: SandboxError = SandboxExecutionError(
            f"the server has started no command of this session for {patience_s:g} s",
            stage="transport",
            code="busy",
            hint="end commands that run in this session, or try again later",
        )
        while slot is not None:
            try:
                link = await self._connected()
            except BaseException:
                slot.leave()
                raise
            run = RemoteRun(
                secrets.randbits(63),
                body,
                sink,
                link=link,
                isolation=self._known.isolation,
                fds={fd for fd, mode in ((1, spec.stdout), (2, spec.stderr)) if mode != "devnull"},
                timeout_s=spec.timeout_s,
                slot=slot,
            )
            run.watch()
            link.begin(run)
            try:
                await asyncio.shield(run.started)
            except asyncio.CancelledError:
                run.end("closed")
                raise
            except SandboxError as exc:
                if exc.code != "busy":
                    raise
                refusal = exc
                slot = await self._admission.enter_again(patience_s)
            else:
                return run
        raise refusal

    # Files.

    def _below(self, path: str, *, allow_root: bool = False) -> str:
        return work_path(path, work_dir=self.work_dir, allow_root=allow_root)

    async def put(self, path: str, data: bytes, *, mode: int, overwrite: bool) -> int:
        check_mode(mode)
        view = bytes_of(data)
        http = await self._live()

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(view), _PIECE):
                yield bytes(view[at : at + _PIECE])

        return await http.store(
            self._name,
            self._below(path),
            pieces(),
            mode=mode,
            overwrite=overwrite,
        )

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        pieces = [piece async for piece in self.read(path, max_bytes=max_bytes)]
        return b"".join(pieces)

    async def write(
        self, path: str, chunks: AsyncIterable[bytes], *, mode: int, overwrite: bool
    ) -> int:
        check_mode(mode)
        http = await self._live()
        return await http.store(
            self._name, self._below(path), chunks, mode=mode, overwrite=overwrite
        )

    async def read(self, path: str, *, max_bytes: int) -> AsyncGenerator[bytes, None]:
        http = await self._live()
        pieces = http.fetch(self._name, self._below(path), max_bytes=max_bytes)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        from union.sandbox.remote._http import MAX_LISTING

        told = await self._file_call("list", path, max_bytes=MAX_LISTING)
        return self._decoded(_listing, told)

    async def stat(self, path: str) -> FileInfo:
        return self._decoded(decode_file, await self._file_call("stat", path))

    async def make_dir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        await self._file_call("mkdir", path, parents=parents, exist_ok=exist_ok)

    async def remove(self, path: str, *, recursive: bool) -> None:
        await self._file_call("remove", path, recursive=recursive)

    async def _file_call(
        self, action: str, path: str, *, max_bytes: int | None = None, **options: Any
    ) -> dict[str, Any]:
        http = await self._live()
        below = self._below(path, allow_root=action != "remove")
        told = {"path": below, **options}
        limits: dict[str, Any] = {} if max_bytes is None else {"max_bytes": max_bytes}
        if action == "remove":
            limits["within_s"] = _REMOVE_S
        return await http.call("POST", self._path(f"/files/{action}"), told, **limits)


def _listing(told: dict[str, Any]) -> tuple[FileInfo, ...]:
    entries = told["entries"]
    if not isinstance(entries, list) or len(entries) > MAX_DIR_ENTRIES:
        raise WireError(f"a listing must be at most {MAX_DIR_ENTRIES} entries")
    return tuple(decode_file(entry) for entry in entries)
