"""RemoteTransport: runs the commands of a session on a server."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import secrets
import warnings
from typing import TYPE_CHECKING, Any, Final, TypeVar

from union.sandbox._policy.entries import has_http
from union.sandbox._wire.frames import WireError
from union.sandbox._wire.values import (
    MAX_START,
    SessionInfo,
    decode_session_info,
    encode_run,
    encode_session,
)
from union.sandbox.errors import (
    SandboxConnectionError,
    SandboxError,
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)
from union.sandbox.remote._admission import Admission
from union.sandbox.remote._connection import ClientConnection
from union.sandbox.remote._health import check_health, protocol_error
from union.sandbox.remote._http_calls import HttpCalls
from union.sandbox.remote._run import RemoteRun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from union.sandbox._contexts.specs import ContextSpec
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.spec import RunSpec, SessionSpec
    from union.sandbox._session.transport import Sink
    from union.sandbox._wire.message_stream import MessageStream
    from union.sandbox.remote._access import Access
    from union.sandbox.remote._admission import Slot
    from union.sandbox.remote._checkpoints import RemoteCheckpoints
    from union.sandbox.remote._context import RemoteContext
    from union.sandbox.remote._http import HttpClient
    from union.sandbox.remote._http_entries import SentEntries

__all__ = ["RemoteTransport"]

_LOGGER: Final = logging.getLogger("union.sandbox.remote")
_T = TypeVar("_T")
_R = TypeVar("_R", bound=RemoteRun)
_MAX_INLINE_STDIN: Final = 1024 * 1024
_CLOSE_S: Final = 20.0
_DELETE_S: Final = 10.0
_OPEN_FORK_S: Final = 600.0
"""How long a fork may take to open: where there are no layers, the checkpoint is copied."""
_SESSION_GRACE_S: Final = 15.0
"""How long after the session's timeout the server may take to reply to a call."""
_MAX_BUSY_WAIT_S: Final = 30.0
"""How long a run without a timeout waits for a server that starts no run of this session."""


class RemoteTransport(HttpCalls):
    """Runs commands on a server over one connection that many runs share."""

    def __init__(self, spec: SessionSpec, access: Access | None, name: str) -> None:
        self._spec = spec
        self._access = access
        self.name = name
        self._http: HttpClient | None = None
        self._connection: ClientConnection | None = None
        self._info: SessionInfo | None = None
        self._connecting = asyncio.Lock()
        self._admission = Admission()
        self._is_requested = False
        self._is_over = False
        self._wait_for_end: Callable[[], Awaitable[SandboxError]] | None = None
        """Returns when the server has ended for good; None where nothing can tell."""
        self._releases_when_lost = False
        self._fork_of: tuple[str, str] | None = None
        """The session and the checkpoint that this one begins with."""
        self._sent_entries: SentEntries | None = None

    # Opening and closing.

    async def open(self) -> None:
        if self._access is not None and not self._access.lazy:
            await self._connected()

    async def _connected(self) -> ClientConnection:
        """Return the connection; the first call opens it."""
        if self._connection is None:
            async with self._connecting:
                if self._connection is None:
                    await self._connect()
        connection = self._connection
        if connection is None:
            raise RuntimeError("the transport was closed")
        if connection.lost is not None:
            raise SandboxConnectionError(
                f"the session was lost: {connection.lost.args[0]}",
                endpoint="" if self._access is None else str(self._access.endpoint),
                code="session-lost",
                hint="open a new session",
            )
        if connection.closed.is_set():
            raise SessionClosedError("the server has ended the session", code="session-lost")
        return connection

    @property
    def _required_access(self) -> Access:
        if self._access is None:
            raise RuntimeError("the address of the server is not set")
        return self._access

    async def _http_client(self) -> HttpClient:
        """Return the HTTP client; the first request imports it."""
        if self._http is None:
            from union.sandbox.remote._http import HttpClient

            if self._is_over:
                raise SessionClosedError("the session is closed")
            access = self._required_access
            self._http = HttpClient(access.endpoint, token=access.token, ca=access.ca)
            if self._spec.timeout_s is not None:
                now = asyncio.get_running_loop().time()
                self._http.deadline = now + self._spec.timeout_s + _SESSION_GRACE_S
        return self._http

    async def _connect(self) -> None:
        if has_http(self._spec.network):
            self._entries().check(self._spec.network.allow)
        http = await self._http_client()
        await check_health(http, self._required_access.connect_timeout_s, self._is_gone)
        info = self._checked_info(await self._join(http))
        self._use_stream(await http.connect(self.name), info)

    def _checked_info(self, payload: dict[str, Any]) -> SessionInfo:
        info = self.decode(decode_session_info, payload)
        if info.session != self.name:
            raise protocol_error(
                self.endpoint, f"it describes another session, {info.session!r:.80}"
            )
        return info

    def decode(self, decode: Callable[[Any], _T], value: object) -> _T:
        """Decode a reply; an error of the decoder becomes a ``SandboxConnectionError``."""
        try:
            return decode(value)
        except (WireError, TypeError, LookupError, ArithmeticError, RecursionError) as exc:
            raise protocol_error(self.endpoint, exc) from exc

    def _use_stream(self, stream: MessageStream, info: SessionInfo) -> None:
        """Use ``stream`` as the first connection to the session."""

        async def connect() -> MessageStream:
            return await (await self._http_client()).connect(self.name)

        self._info = info
        self._connection = ClientConnection(
            stream,
            self._required_access.endpoint,
            connect=connect,
            release=self._release,
            grace_s=info.grace_s,
            wait_for_end=self._wait_for_end,
            releases_when_lost=self._releases_when_lost,
        )
        if info.isolation.backend == "none":
            warnings.warn(
                "backend='none' isolates nothing: commands run with all privileges of the server",
                UserWarning,
                stacklevel=5,
            )

    async def _join(self, http: HttpClient) -> dict[str, Any]:
        """Open the session; return the description that the server sends."""
        self._is_requested = True
        if self._fork_of is not None:
            session, checkpoint = self._fork_of
            arguments = {"fork": {"session": session, "checkpoint": checkpoint}}
            return await http.call("PUT", self.path(), arguments, within_s=_OPEN_FORK_S)
        entries = self._entries() if has_http(self._spec.network) else None
        payload = await http.call("PUT", self.path(), encode_session(self._spec, entries))
        if entries is not None:
            entries.confirm(self._spec.network.allow)
        return payload

    def _entries(self) -> SentEntries:
        """Return the ``Http`` entries of this session; the first use creates the object."""
        if self._sent_entries is None:
            from union.sandbox.remote._http_entries import SentEntries

            self._sent_entries = SentEntries(self._required_access.endpoint)
        return self._sent_entries

    def _is_gone(self, exc: SandboxConnectionError) -> bool:  # noqa: ARG002 - for subclasses
        """Whether no server will ever reply at this address, so that waiting is useless."""
        return False

    def path(self, rest: str = "") -> str:
        return f"sessions/{self.name}{rest}"

    async def aclose(self) -> None:
        ended = not self._is_requested
        if self._connection is not None:
            ended = await self._connection.close(within_s=_CLOSE_S)
        if self._http is not None and not ended:
            await self._delete(self._http)
        await self._release()

    async def _release(self) -> None:
        self._is_over = True
        self._admission.close()
        if self._http is not None:
            await self._http.close()

    async def _delete(self, http: HttpClient) -> None:
        try:
            http.deadline = None
            await http.call("DELETE", self.path(), within_s=_DELETE_S)
        except SandboxError as exc:
            # The server ends the session itself when the grace period is over.
            _LOGGER.warning("the server did not confirm the end of a session: %s", exc)

    async def connected_http(self) -> HttpClient:
        await self._connected()
        return await self._http_client()

    # Checkpoints.

    @functools.cached_property
    def checkpoint_calls(self) -> RemoteCheckpoints:
        """The calls about checkpoints; see ``CheckpointCalls``."""
        from union.sandbox.remote._checkpoints import RemoteCheckpoints

        return RemoteCheckpoints(self)

    @property
    def layers(self) -> str:
        """What the work dir is made of; see ``Isolation.layers``."""
        return "plain" if self._info is None else self._info.isolation.layers

    def note_layers(self, layers: str) -> None:
        """Record what the server has reported about the work dir."""
        info = self._required_info
        if info.isolation.layers != layers:
            isolation = dataclasses.replace(info.isolation, layers=layers)
            self._info = dataclasses.replace(info, isolation=isolation)

    def forked(self, name: str, checkpoint_id: str) -> RemoteTransport:
        """Return the transport of a new session that begins with a checkpoint of this one."""
        access = dataclasses.replace(self._required_access, owner_socket=None, lazy=False)
        transport = RemoteTransport(self._spec, access, name)
        transport._fork_of = (self.name, checkpoint_id)
        return transport

    @property
    def endpoint(self) -> str:
        return str(self._required_access.endpoint)

    @property
    def grace_s(self) -> float:
        """How long the server keeps the session for a client without a connection."""
        return self._required_info.grace_s

    # Session information.

    @property
    def is_known(self) -> bool:
        return self._info is not None

    @property
    def _required_info(self) -> SessionInfo:
        if self._info is None:
            raise SandboxUsageError(
                "the session is not connected to its server yet",
                code="not-connected",
                hint="make a call first, or open with lazy=False",
            )
        return self._info

    @property
    def work_dir(self) -> str:
        return self._required_info.work_dir

    @property
    def isolation(self) -> Isolation:
        return self._required_info.isolation

    @property
    def shell(self) -> str:
        return self._required_info.shell

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        return dict(self._required_info.fs_allowlist)

    # Running.

    async def start(self, spec: RunSpec, sink: Sink) -> RemoteRun:
        if self._connection is None:
            await self._connected()
        stdin = spec.stdin
        if isinstance(stdin, bytes) and len(stdin) > _MAX_INLINE_STDIN:
            # Fed as the command reads it, so that neither side holds a second copy.
            spec = spec._replace(stdin="pipe")
        if has_http(spec.network):
            entries, allow = self._entries(), spec.network.allow
            run = await entries.deliver(allow, lambda: self._send_run(spec, sink, entries))
        else:
            run = await self._send_run(spec, sink, None)
        if isinstance(stdin, bytes) and len(stdin) > _MAX_INLINE_STDIN:
            run.feed_stdin(stdin)
            run.close_stdin()
        return run

    async def _send_run(self, spec: RunSpec, sink: Sink, entries: SentEntries | None) -> RemoteRun:
        body = encode_run(spec, self._spec, entries)
        if len(body) > MAX_START:
            raise SandboxUsageError(
                f"cmd and env must have at most {MAX_START} bytes, got {len(body)}",
                argument="cmd",
                hint="put the data into a file with put_bytes()",
            )
        isolation = self._required_info.isolation
        fds = {fd for fd, mode in ((1, spec.stdout), (2, spec.stderr)) if mode != "devnull"}
        return await self._start_admitted(
            lambda connection, slot: RemoteRun(
                secrets.randbits(63),
                body,
                sink,
                connection=connection,
                isolation=isolation,
                fds=fds,
                timeout_s=spec.timeout_s,
                slot=slot,
            ),
            spec.timeout_s,
        )

    async def open_context(self, spec: ContextSpec) -> RemoteContext:
        """Start the interpreter of a context on the server."""
        from union.sandbox.remote._context import start_context

        await self._connected()
        info, endpoint = self._required_info, str(self._required_access.endpoint)
        return await start_context(
            spec, self._spec, info, self._start_admitted, endpoint=endpoint, entries=self._entries
        )

    async def _start_admitted(
        self, make: Callable[[ClientConnection, Slot], _R], timeout_s: float | None
    ) -> _R:
        """Send a run when it is admitted; send a new one from ``make`` while the server is busy."""
        max_wait_s = _MAX_BUSY_WAIT_S if timeout_s is None else timeout_s
        slot = self._admission.enter_now() or await self._admission.enter(max_wait_s)
        refusal: SandboxError | None = None
        while slot is not None:
            connection = self._connection
            if connection is None or connection.closed.is_set():
                try:
                    connection = await self._connected()
                except BaseException:
                    slot.release()
                    raise
            run = make(connection, slot)
            run.watch()
            connection.begin(run)
            try:
                await asyncio.shield(run.started)
            except asyncio.CancelledError:
                run.end("closed")
                raise
            except SandboxError as exc:
                if exc.code != "busy":
                    raise
                refusal = exc
                slot = await self._admission.enter_again(max_wait_s)
            else:
                return run
        raise refusal or SandboxExecutionError(
            f"the server has started no command of this session for {max_wait_s:g} s",
            stage="transport",
            code="busy",
            hint="end commands that run in this session, or try again later",
        )
