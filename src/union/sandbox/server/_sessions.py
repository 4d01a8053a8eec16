"""The sessions of a server: opened by clients, kept by leases, closed with all their runs."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import stat
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._net.own_server import OwnServer
from union.sandbox._policy.ceiling import check_narrower
from union.sandbox._wire.frames import WireError
from union.sandbox._wire.values import decode_session
from union.sandbox.errors import (
    PolicyError,
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)
from union.sandbox.on_device._workdir import is_allowed, not_allowed
from union.sandbox.server._auth import Grant
from union.sandbox.server._http_entries import SessionEntries
from union.sandbox.server._network_policy import check_proxies
from union.sandbox.server._quotas import Buffers, FrameBudgets, RequestBytes, RunSlots, busy
from union.sandbox.server._records import History
from union.sandbox.server._run_table import KeptRuns
from union.sandbox.server._server_session import ServerSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._policy.rules import Entry
    from union.sandbox._wire.launch import LaunchSpec
    from union.sandbox.server._config import Config
    from union.sandbox.server._metrics import Metrics
    from union.sandbox.server._runs import ServerRun

__all__ = ["Sessions", "prepare_work_dir", "short_id"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_MAX_ENDED_NAMES: Final = 4096


def prepare_work_dir(path: str) -> None:
    """Create the directory for the work dirs.

    Raises:
        SandboxUsageError: It cannot be created, or other users can write to it.

    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as exc:
        raise SandboxUsageError(
            f"--work-dir {path}: {exc.strerror}", argument="--work-dir"
        ) from exc
    found = os.lstat(path)
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise SandboxUsageError(
            f"--work-dir {path} must be a directory that only this user owns and can write to "
            f"(owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o})",
            argument="--work-dir",
            hint="remove it, or use another directory",
        )


class Sessions:
    """All sessions of a server, and their common limits."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.buffers = Buffers(config.max_buffer_bytes)
        self.bytes = RequestBytes(config.max_buffer_bytes, config.max_sessions)
        self.slots = RunSlots(config.max_runs, config.max_sessions)
        self.frames = FrameBudgets()
        self.kept = KeptRuns(config.max_buffer_bytes // 4, config.max_buffer_bytes // 16)
        self.history = History()
        self.running: set[ServerRun] = set()
        self.draining = False
        self.own_server = OwnServer(())
        """The addresses of this server, which no sandbox may reach."""
        self.own_entries: tuple[Entry, ...] = ()
        """Deny-list entries for the same addresses."""
        self.on_supervised_end: Callable[[], None] = lambda: None
        """Called when the session of a supervised server has ended."""
        self._sessions: dict[str, ServerSession] = {}
        self._opening: dict[str, asyncio.Task[ServerSession]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Names of closed sessions, which cannot be opened again."""

    def __len__(self) -> int:
        return len(self._sessions) + len(self._opening)

    def all(self) -> tuple[ServerSession, ...]:
        return tuple(self._sessions.values())

    def get(self, name: str) -> ServerSession:
        try:
            return self._sessions[name]
        except KeyError:
            raise SessionClosedError(
                "no such session",
                code="session-lost",
                hint="it was closed, its lease expired, or the server was restarted",
            ) from None

    async def open(
        self, name: str, arguments: dict[str, Any], *, is_private: bool = True
    ) -> ServerSession:
        """Open a session, or return the open session of this name, so that a retry is safe.

        Args:
            name: the name of the session.
            arguments: its description by the client.
            is_private: whether no third party can read the connection. Default True.

        """
        if name in self._sessions:
            return self._sessions[name]
        if name in self._ended:
            raise SessionClosedError("the session is already closed", code="session-lost")
        if self.config.launch is not None:
            raise PolicyError(
                "this server is supervised: it serves one session and opens no others"
            )
        task = self._opening.get(name)
        if task is None:
            if "fork" in arguments:
                opening = self._open_fork(name, arguments)
            else:
                entries = SessionEntries(self.config.secrets)
                arguments = entries.resolve(arguments, Grant(), is_private=is_private)
                spec = self._spec(arguments)
                check_proxies(spec.network, self.config.allow_proxies)
                opening = self._open(name, spec, entries)
            try:
                self.check_accepting()
                if len(self) >= self.config.max_sessions:
                    raise busy(f"session limit reached ({self.config.max_sessions})")
            except SandboxExecutionError:
                opening.close()
                raise
            task = asyncio.get_running_loop().create_task(opening)
            self._opening[name] = task
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        # The task continues if the client disconnects, so that no session stays half open.
        return await asyncio.shield(task)

    async def open_supervised(self, launch: LaunchSpec) -> None:
        """Open the session of the launch document."""
        spec = self._spec(launch.session_arguments)
        left_s = max(0.001, launch.expires - time.time())
        spec = dataclasses.replace(spec, timeout_s=left_s)
        entries = SessionEntries(self.config.secrets)
        await self._open(launch.session, spec, entries, launch)

    async def _open_fork(self, name: str, arguments: dict[str, Any]) -> ServerSession:
        """Open a session that begins with a checkpoint of another one, and has its settings."""
        fork = arguments["fork"]
        if arguments.keys() != {"fork"} or not isinstance(fork, dict):
            raise WireError("a fork has no field but fork, which is an object")
        parent, checkpoint = fork.get("session"), fork.get("checkpoint")
        if fork.keys() != {"session", "checkpoint"} or not (
            isinstance(parent, str) and isinstance(checkpoint, str)
        ):
            raise WireError("fork requires the texts session and checkpoint")
        return await self._begin(self.get(parent).forked(name, checkpoint))

    async def _open(
        self,
        name: str,
        spec: SessionSpec,
        entries: SessionEntries,
        launch: LaunchSpec | None = None,
    ) -> ServerSession:
        return await self._begin(ServerSession(name, spec, self, entries=entries, launch=launch))

    async def _begin(self, session: ServerSession) -> ServerSession:
        name, spec = session.name, session.spec
        await session.open()
        self._sessions[name] = session
        self._opening.pop(name, None)  # now, so that no session is counted twice
        self.metrics.sessions_opened += 1
        _LOGGER.info("session opened", extra={"session": short_id(name), "backend": spec.backend})
        session.hold()
        session.release()  # The lease begins.
        return session

    def _spec(self, arguments: dict[str, Any]) -> SessionSpec:
        config = self.config
        spec = decode_session(
            arguments, backends=config.backends, default_backend=config.backends[0]
        )
        check_narrower(spec.network, ceiling=config.ceiling, of="the server")
        for argument, paths in (
            ("host_work_dir", [spec.host_work_dir] if spec.host_work_dir else []),
            ("read_only_paths", spec.read_only_paths),
            ("read_write_paths", spec.read_write_paths),
        ):
            for path in paths:
                self._check_path(argument, path)
        network = spec.network
        if network.mode != "blocked" or not spec.network_is_ceiling:
            network = dataclasses.replace(network, deny=(*network.deny, *self.own_entries))
        preload = config.preload if "preload" not in arguments else spec.preload
        limits = [s for s in (spec.timeout_s, config.max_session_s) if s is not None]
        return dataclasses.replace(
            spec,
            network=network,
            timeout_s=min(limits, default=None),
            preload=preload,
            # A module that only the client has named is imported inside each sandbox.
            trusts_preload=set(preload or ()) <= set(config.preload),
        )

    def _check_path(self, argument: str, path: str) -> None:
        """Check a path before the session opens; the mounted path is checked again."""
        try:
            real = os.path.realpath(path)
        except OSError as exc:  # A component was replaced during the check.
            raise not_allowed(argument, path) from exc
        for spelling in (os.path.normpath(path), real):
            if not is_allowed(spelling, self.config.allow_paths):
                raise not_allowed(argument, path)

    def check_accepting(self) -> None:
        if self.draining:
            raise busy("the server is shutting down", code="draining")

    # Closing.

    def close_soon(self, session: ServerSession, reason: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._close(session, reason))
        self._closing.add(task)
        task.add_done_callback(self._closed)
        return task

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOGGER.error("session closed, but cleanup is incomplete", exc_info=error)

    async def close_by_name(self, name: str) -> None:
        """Close a session, also one that is being opened; the name cannot be opened again."""
        self._ended[name] = None
        if len(self._ended) > _MAX_ENDED_NAMES:
            self._ended.popitem(last=False)
        if (task := self._opening.get(name)) is not None:
            await asyncio.wait({task})
        if (session := self._sessions.get(name)) is not None:
            await self.close(session, "client")

    async def close(self, session: ServerSession, reason: str) -> None:
        """Close a session, notify its connections, remove it, even if the caller is cancelled."""
        await asyncio.shield(self.close_soon(session, reason))

    async def _close(self, session: ServerSession, reason: str) -> None:
        try:
            await session.close()
        finally:
            self._forget(session, reason)

    def _forget(self, session: ServerSession, reason: str) -> None:
        if self._sessions.pop(session.name, None) is None:
            return
        _LOGGER.info("session closed", extra={"session": short_id(session.name), "reason": reason})
        self.metrics.sessions_closed += 1
        session.record.close()
        for listener in tuple(session.listeners):
            listener.session_closed()
        if not session.listeners:
            session.release_runs()
        if session.is_supervised:
            self.on_supervised_end()

    async def drain(self, within_s: float) -> None:
        """Refuse new work, wait up to ``within_s`` seconds for running commands, close all."""
        self.draining = True
        ends = [run.over for run in self.running]
        if ends and within_s > 0:
            await asyncio.wait(ends, timeout=within_s)
        await self.close_all()

    def expire_all(self) -> None:
        for session in self.all():
            session.expire()

    async def close_all(self) -> None:
        for task in tuple(self._opening.values()):
            await asyncio.wait({task})
        for session in self.all():
            self.close_soon(session, "shutdown")
        if self._closing:
            await asyncio.wait(self._closing)


def short_id(name: str) -> str:
    """Return the identifier of a session for logs; it cannot be used to access the session."""
    return hashlib.sha256(name.encode()).hexdigest()[:12]
