"""The sessions of a server: opened by clients, held by leases, ended with everything they had."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import secrets
import stat
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._core.spec import RunSpec
from union.sandbox._net.own_server import OwnServer
from union.sandbox._policy.ceiling import check_narrower
from union.sandbox._policy.policy import NetworkRules
from union.sandbox._wire.values import SessionInfo, decode_run, decode_session
from union.sandbox.errors import (
    PolicyError,
    SandboxError,
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)
from union.sandbox.on_device._network import ServerRules, SessionNetwork
from union.sandbox.on_device._transport import LocalTransport
from union.sandbox.on_device._workdir import WorkPlace, is_allowed, not_allowed
from union.sandbox.server._kept import KeptRuns, RunTable
from union.sandbox.server._proxies import check_proxies
from union.sandbox.server._records import History, SessionRecord
from union.sandbox.server._runs import Buffers, ServerRun
from union.sandbox.server._shares import FrameBudgets, RequestBytes, RunSlots, busy

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._policy.policy import Entry
    from union.sandbox.server._auth import Grant
    from union.sandbox.server._config import Config
    from union.sandbox.server._metrics import Metrics
    from union.sandbox.server._runs import Listener
    from union.sandbox.server._supervised import FixedSession

__all__ = ["ServerSession", "Sessions", "prepare_work_dir"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_NOTHING: Final = RunSpec(kind="shell", stdout="devnull", stderr="devnull")
_REMEMBERED: Final = 4096
_LATE_S: Final = 2.0
"""A client ends its session at its time limit; if it does not, the server does, a bit later."""


def prepare_work_dir(path: str) -> None:
    """Makes the directory that holds the work dirs; refuses one that is not ours alone."""
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
            f"--work-dir {path} is not a directory that belongs to this user alone",
            argument="--work-dir",
            hint="remove it, or name another directory",
        )


class ServerSession:
    """One session: an engine of its own, its runs, and whoever holds its lease."""

    def __init__(
        self, name: str, spec: SessionSpec, owner: Sessions, *, fixed: FixedSession | None = None
    ) -> None:
        self.name = name
        self.spec = spec
        self.is_fixed = fixed is not None
        """Lives as long as its server: not held by leases, not opened by a client."""
        self.opened_at = time.time()
        self.runs = RunTable(owner, name)
        self.bytes = owner.bytes.for_session()
        """What its requests, and descriptions of its runs, hold in memory."""
        self.secret = secrets.token_bytes(16)
        """Makes the numbers of runs that have an idempotency key impossible to guess."""
        self.record = SessionRecord(owner.history)
        config = owner.config
        place = WorkPlace(
            config.work_dir,
            shown_at=(fixed and fixed.shown_at) or config.work_dir,
            allowed=config.allow_paths,
        )
        # Clients name proxies within what the operator allows; a fixed session is the operator's.
        proxies = None if self.is_fixed else NetworkRules(allow=config.allow_proxies)
        network = SessionNetwork(ServerRules(owner.own_server, proxies))
        self.transport = LocalTransport(spec, place=place, network=network)
        self.listeners: set[Any] = set()
        """Connections; as long as there is one, the session has a client."""
        self._owner = owner
        self._holds = 0
        self._lease: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self._starting: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        try:
            await self.transport.open()
        except BaseException:
            await self.transport.aclose()
            raise
        if self.spec.timeout_s is not None:
            loop = asyncio.get_running_loop()
            late_s = 0.0 if self.is_fixed else _LATE_S
            self._limit = loop.call_later(self.spec.timeout_s + late_s, self.expire)

    @property
    def grace_s(self) -> float:
        return self._owner.config.grace_s

    def facts(self) -> SessionInfo:
        return SessionInfo(
            session=self.name,
            work_dir=self.transport.work_dir,
            isolation=self.transport.isolation,
            fs_allowlist=self.transport.fs_allowlist(),
            grace_s=self.grace_s,
        )

    def expire(self) -> None:
        """Its time is over, and that of everything in it."""
        for run in self.runs.values():
            run.end("timeout")
        self._owner.close_soon(self, "timeout")

    # The lease.

    def hold(self) -> None:
        """Somebody is there: a connection, or a request."""
        self._holds += 1
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    @property
    def lease_s(self) -> float | None:
        """How long it still waits for somebody; None while somebody is there."""
        if self._lease is None:
            return None
        return max(0.0, self._lease.when() - asyncio.get_running_loop().time())

    def release(self) -> None:
        self._holds -= 1
        if self._holds == 0 and self._closing is None and not self.is_fixed:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(self.grace_s, self._owner.close_soon, self, "lease")

    # Runs.

    def check_room(self, grant: Grant) -> None:
        """Raise an error with the code ``busy`` if this key cannot start a run now."""
        if self._closing is None:
            self._owner.check_accepting()
            self.runs.check_room(grant)

    def start(self, number: int, body: bytes, grant: Grant) -> ServerRun:
        """Starts a run; whatever speaks against it becomes the run's own end."""
        spec = decode_run(body, self.spec)
        return self.launch(number, spec, grant)

    def launch(self, number: int, spec: RunSpec, grant: Grant) -> ServerRun:
        run = ServerRun(number, spec, self.runs.buffers_of(grant), grant)
        self.runs.add(run)
        self.record.begin(run.record)
        self._owner.metrics.runs_started += 1
        try:
            if self._closing is not None:
                raise SessionClosedError("the server is ending the session", code="session-lost")
            self._owner.check_accepting()
            if self.spec.network_is_ceiling:
                check_narrower(spec.network, ceiling=self.spec.network)
            check_narrower(spec.network, ceiling=self._owner.config.ceiling, of="the server")
            self._owner.slots.take(self.name, is_limited=not grant.is_full)
        except (PolicyError, SandboxExecutionError, SessionClosedError) as exc:
            self._owner.metrics.runs_refused += 1
            run.refuse(exc)
            return run
        self._owner.running.add(run)
        run.over.add_done_callback(lambda _: self._ended(run))
        task = asyncio.get_running_loop().create_task(run.start(self.transport))
        self._starting.add(task)
        task.add_done_callback(self._started)
        return run

    def refused(self, number: int, error: SandboxError, grant: Grant) -> ServerRun:
        """A run whose description was found wrong: it has one event, and nothing else."""
        self._owner.metrics.runs_refused += 1
        run = ServerRun(number, _NOTHING, self.runs.buffers_of(grant), grant)
        self.runs.add(run)
        self.record.begin(run.record)
        run.refuse(error)
        return run

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _LOGGER.error("a run could not be started", exc_info=fault)

    def _ended(self, run: ServerRun) -> None:
        self._owner.running.discard(run)
        self._owner.slots.give(self.name, is_limited=not run.grant.is_full)
        self._owner.metrics.ended(run)

    def detach(self, run: ServerRun, listener: Listener) -> None:
        """A connection is gone. Its commands go on, until nobody has asked for them for long."""
        if run.detach(listener):
            asyncio.get_running_loop().call_later(self.grace_s, self._abandon, run)

    def _abandon(self, run: ServerRun) -> None:
        if not run.is_attached and self.runs.get(run.number) is run:
            run.end("closed")
            run.over.add_done_callback(lambda _: self.forget(run))

    def forget(self, run: ServerRun) -> None:
        """Keep nothing of a run any more."""
        self.runs.discard(run)

    def forget_if_over(self, run: ServerRun) -> None:
        """The client has everything: nothing needs to be kept."""
        if run.log.is_over:
            self.forget(run)

    def keep(self, run: ServerRun) -> None:
        """The answer to a request with an idempotency key was sent; it may be asked for again."""
        self._owner.kept.add(run, self.name)

    # The end.

    async def close(self) -> None:
        """Ends everything; returns when it is gone. What is still to be told stays in the runs."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for timer in (self._lease, self._limit):
            if timer is not None:
                timer.cancel()
        # A run that is just being handed over would miss its end.
        if self._starting:
            await asyncio.wait(self._starting, timeout=5)
        await self.transport.aclose()

    def let_go(self) -> None:
        for run in tuple(self.runs.values()):
            self.runs.discard(run)


class Sessions:
    """All sessions of a server, and the limits over them."""

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
        """Where this server itself listens: out of reach for every sandbox."""
        self.own_entries: tuple[Entry, ...] = ()
        """The same as deny-list entries, as far as a list can say it."""
        self.over: Callable[[], None] = lambda: None
        """Called when a fixed session has ended: there is nothing left to serve."""
        self._sessions: dict[str, ServerSession] = {}
        self._opening: dict[str, asyncio.Task[ServerSession]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Names that were closed lately: a request to open one of them comes too late."""

    def __len__(self) -> int:
        return len(self._sessions) + len(self._opening)

    def all(self) -> tuple[ServerSession, ...]:
        return tuple(self._sessions.values())

    def get(self, name: str) -> ServerSession:
        try:
            return self._sessions[name]
        except KeyError:
            raise SessionClosedError(
                "the server has no such session (any more)",
                code="session-lost",
                hint="it was closed, its client was away for too long, or the server was restarted",
            ) from None

    async def open(self, name: str, told: dict[str, Any]) -> ServerSession:
        """Opens a session. The same name again is the same session: a retry opens no second one."""
        if name in self._sessions:
            return self._sessions[name]
        if name in self._ended:
            raise SessionClosedError("the session was closed already", code="session-lost")
        if self.config.fixed is not None:
            raise PolicyError("this server has one session, and opens no other")
        task = self._opening.get(name)
        if task is None:
            spec = self._spec(told)
            check_proxies(spec.network, self.config.allow_proxies)
            self.check_accepting()
            if len(self) >= self.config.max_sessions:
                raise busy(f"session limit reached ({self.config.max_sessions})")
            task = asyncio.get_running_loop().create_task(self._open(name, spec))
            self._opening[name] = task
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        # A client that goes away must not leave half a session behind.
        return await asyncio.shield(task)

    async def open_fixed(self, fixed: FixedSession) -> None:
        """Opens the session that the server was started for."""
        spec = self._spec(fixed.told)
        left_s = max(0.001, fixed.expires - time.time())
        spec = dataclasses.replace(spec, timeout_s=left_s)
        await self._open(fixed.name, spec, fixed)

    async def _open(
        self, name: str, spec: SessionSpec, fixed: FixedSession | None = None
    ) -> ServerSession:
        session = ServerSession(name, spec, self, fixed=fixed)
        await session.open()
        self._sessions[name] = session
        self.metrics.sessions_opened += 1
        _LOGGER.info("session opened", extra={"session": short(name), "backend": spec.backend})
        session.hold()
        session.release()  # from now on, whoever opened it has to show up
        return session

    def _spec(self, told: dict[str, Any]) -> SessionSpec:
        config = self.config
        spec = decode_session(told, backends=config.backends, default_backend=config.backends[0])
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
        limits = [s for s in (spec.timeout_s, config.max_session_s) if s is not None]
        return dataclasses.replace(spec, network=network, timeout_s=min(limits, default=None))

    def _check_path(self, argument: str, path: str) -> None:
        """Tells early and by the client's own spelling; what is mounted is checked once more."""
        try:
            real = os.path.realpath(path)
        except OSError as exc:  # something on the way is being exchanged just now
            raise not_allowed(argument, path) from exc
        for spelling in (os.path.normpath(path), real):
            if not is_allowed(spelling, self.config.allow_paths):
                raise not_allowed(argument, path)

    def check_accepting(self) -> None:
        if self.draining:
            raise busy("the server is shutting down", code="draining")

    # The end.

    def close_soon(self, session: ServerSession, why: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._close(session, why))
        self._closing.add(task)
        task.add_done_callback(self._closed)
        return task

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _LOGGER.error("a session was closed, but not all of it is gone", exc_info=fault)

    async def close_by_name(self, name: str) -> None:
        """Ends a session, also one that is just being opened, or never was."""
        self._ended[name] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        if (task := self._opening.get(name)) is not None:
            await asyncio.wait({task})
        if (session := self._sessions.get(name)) is not None:
            await self.close(session, "client")

    async def close(self, session: ServerSession, why: str) -> None:
        """Ends a session, tells whoever listens, forgets it; also if the caller does not stay."""
        await asyncio.shield(self.close_soon(session, why))

    async def _close(self, session: ServerSession, why: str) -> None:
        try:
            await session.close()
        finally:
            self._forget(session, why)

    def _forget(self, session: ServerSession, why: str) -> None:
        if self._sessions.pop(session.name, None) is None:
            return
        _LOGGER.info("session closed", extra={"session": short(session.name), "why": why})
        self.metrics.sessions_closed += 1
        session.record.close()
        for listener in tuple(session.listeners):
            listener.session_closed()
        if not session.listeners:
            session.let_go()
        if session.is_fixed:
            self.over()

    async def drain(self, within_s: float) -> None:
        """No new work; waits for what runs, for a while; then ends everything."""
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


def short(name: str) -> str:
    """What logs call a session: enough to tell them apart, not enough to name one to the server."""
    return hashlib.sha256(name.encode()).hexdigest()[:12]
