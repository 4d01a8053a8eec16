"""One session of a server: its engine, its runs and its lease."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._checkpoints.values import CheckpointLimits
from union.sandbox._contexts.wire import context_number, decode_cell, decode_context
from union.sandbox._core.spec import NetworkSpec, RunSpec
from union.sandbox._policy.ceiling import check_narrower
from union.sandbox._policy.rules import NetworkRules
from union.sandbox._wire.values import SessionInfo, decode_run_start
from union.sandbox.errors import (
    PolicyError,
    SandboxError,
    SandboxExecutionError,
    SessionClosedError,
)
from union.sandbox.on_device._network import ServerRules, SessionNetwork
from union.sandbox.on_device._transport import LocalTransport
from union.sandbox.on_device._workdir import WorkPlace
from union.sandbox.server._checkpoint_calls import Operations
from union.sandbox.server._contexts import ServerCell, ServerContext
from union.sandbox.server._http_entries import SessionEntries
from union.sandbox.server._records import SessionRecord
from union.sandbox.server._run_table import RunTable
from union.sandbox.server._runs import ServerRun

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._wire.launch import LaunchSpec
    from union.sandbox._wire.values import Start
    from union.sandbox.on_device._checkpoints import LocalCheckpoints
    from union.sandbox.server._auth import Grant
    from union.sandbox.server._runs import Listener
    from union.sandbox.server._sessions import Sessions

__all__ = ["ServerSession"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_REFUSED_SPEC: Final = RunSpec(kind="shell", stdout="devnull", stderr="devnull")
_EXPIRY_DELAY_S: Final = 2.0
"""The client closes its session at its timeout; the server does so this much later."""


class ServerSession:
    """One session: its engine, its runs and its lease."""

    def __init__(
        self,
        name: str,
        spec: SessionSpec,
        owner: Sessions,
        *,
        entries: SessionEntries,
        launch: LaunchSpec | None = None,
        transport: LocalTransport | None = None,
    ) -> None:
        self._entries = entries
        self.name = name
        self.spec = spec
        self.is_supervised = launch is not None
        """Whether it lives as long as its server, without a lease."""
        self.opened_at = time.time()
        self.runs = RunTable(owner, name)
        self.bytes = owner.bytes.for_session()
        """Memory limits for requests and START frames of this session."""
        self.secret = secrets.token_bytes(16)
        """Key for the numbers of runs with an idempotency key, so that they cannot be guessed."""
        self.record = SessionRecord(owner.history)
        self.operations = Operations(self)
        """Calls about checkpoints that were sent with a key."""
        self.transport = transport or _new_transport(spec, owner, launch)
        self.listeners: set[Any] = set()
        """Connections of clients."""
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
            late_s = 0.0 if self.is_supervised else _EXPIRY_DELAY_S
            self._limit = loop.call_later(self.spec.timeout_s + late_s, self.expire)

    @property
    def grace_s(self) -> float:
        return self._owner.config.grace_s

    def info(self) -> SessionInfo:
        return SessionInfo(
            session=self.name,
            work_dir=self.transport.work_dir,
            isolation=self.transport.isolation,
            shell=self.transport.shell,
            fs_allowlist=self.transport.fs_allowlist(),
            grace_s=self.grace_s,
            has_contexts=True,
            is_machine=self.transport.is_machine,
        )

    @property
    def checkpoint_calls(self) -> LocalCheckpoints:
        """The calls about checkpoints, with the limits of the server."""
        calls = self.transport.checkpoint_calls
        config = self._owner.config
        calls.limits = CheckpointLimits(config.max_snapshots, config.max_snapshot_bytes)
        return calls

    def forked(self, name: str, checkpoint_id: str) -> ServerSession:
        """Return a new session, not open yet, that begins with a checkpoint of this one."""
        origin = self.checkpoint_calls.origin(checkpoint_id)
        transport = self.transport.forked(origin)
        entries = SessionEntries(self._owner.config.secrets)
        return ServerSession(
            name, transport.spec, self._owner, entries=entries, transport=transport
        )

    def summary(self) -> dict[str, Any]:
        """Return the facts of the session that the list of sessions and the console show."""
        return {
            "session": self.name,
            "backend": self.spec.backend,
            "opened_at": self.opened_at,
            "work_dir": self.transport.work_dir,
            "host_dir": self.transport.host_dir,
            "network_mode": self.spec.network.mode,
            "connections": len(self.listeners),
        }

    def expire(self) -> None:
        """End the session and its runs with the reason ``timeout``."""
        for run in self.runs.values():
            run.end("timeout")
        self._owner.close_soon(self, "timeout")

    # Lease.

    def hold(self) -> None:
        """Suspend the lease while a connection or a request uses the session."""
        self._holds += 1
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    @property
    def lease_s(self) -> float | None:
        """Seconds until the lease expires; None while the session is in use."""
        if self._lease is None:
            return None
        return max(0.0, self._lease.when() - asyncio.get_running_loop().time())

    def release(self) -> None:
        """Start the lease if no other connection or request uses the session."""
        self._holds -= 1
        if self._holds == 0 and self._closing is None and not self.is_supervised:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(self.grace_s, self._owner.close_soon, self, "lease")

    # Runs.

    def check_room(self, grant: Grant, *, needs_slot: bool = True) -> None:
        """Raise an error with the code ``busy`` if this key cannot start a run now."""
        if self._closing is None:
            self._owner.check_accepting()
            self.runs.check_room(grant, needs_slot=needs_slot)

    def resolve_entries(
        self, fields: dict[str, Any], grant: Grant, *, is_private: bool
    ) -> dict[str, Any]:
        """Return the arguments of a call with ``Http`` objects; raise if one is refused."""
        ceiling = self.spec.network if self.spec.network_is_ceiling else None
        return self._entries.resolve(fields, grant, is_private=is_private, ceiling=ceiling)

    def start(self, number: int, start: Start, grant: Grant, *, is_private: bool) -> ServerRun:
        """Start a run, a context or a cell; a refusal becomes its end."""
        fields = self.resolve_entries(start.fields, grant, is_private=is_private)
        start = start._replace(fields=fields)
        if start.kind == "context":
            return self._open_context(number, start, grant)
        if start.kind == "cell":
            return self._run_cell(number, start, grant)
        return self.launch(number, decode_run_start(start, self.spec), grant)

    def launch(self, number: int, spec: RunSpec, grant: Grant) -> ServerRun:
        run = ServerRun(number, spec, self.runs.buffers_of(grant), grant)
        if self._admit(run, spec.network):
            self._owner.running.add(run)
            self._begin(run, run.start(self.transport))
        return run

    def _open_context(self, number: int, start: Start, grant: Grant) -> ServerRun:
        spec = decode_context(start, self.spec)
        context = ServerContext(number, spec, self.runs.buffers_of(grant), grant)
        if self._admit(context, NetworkSpec()):
            self._begin(context, context.begin(self.transport))
        return context

    def _run_cell(self, number: int, start: Start, grant: Grant) -> ServerRun:
        context = self.runs.get(context_number(start))
        if not isinstance(context, ServerContext) or context.grant.key != grant.key:
            raise SandboxExecutionError(
                "no such context", stage="transport", code="context-lost",
                hint="it was closed, or its client did not reconnect in time",
            )  # fmt: skip
        found = decode_cell(start, self.spec, context.spec.language)
        cell = ServerCell(number, context, found, self.runs.buffers_of(grant), grant)
        if self._admit(cell, found[1].network, needs_slot=False):
            self._owner.running.add(cell)
            self._begin(cell, cell.begin(), has_slot=False)
        return cell

    def _admit(self, run: ServerRun, network: NetworkSpec, *, needs_slot: bool = True) -> bool:
        """Record a run and take its slot; return False if it was refused."""
        self.runs.add(run)
        self.record.begin(run.record)
        self._owner.metrics.runs_started += 1
        try:
            if self._closing is not None:
                raise SessionClosedError("the server is closing the session", code="session-lost")
            self._owner.check_accepting()
            if self.spec.network_is_ceiling:
                check_narrower(network, ceiling=self.spec.network)
            check_narrower(network, ceiling=self._owner.config.ceiling, of="the server")
            if needs_slot:
                self._owner.slots.acquire(self.name, is_limited=not run.grant.is_full)
        except (PolicyError, SandboxExecutionError, SessionClosedError) as exc:
            self._owner.metrics.runs_refused += 1
            run.refuse(exc)
            return False
        return True

    def _begin(
        self, run: ServerRun, starting: Coroutine[Any, Any, None], *, has_slot: bool = True
    ) -> None:
        run.over.add_done_callback(lambda _: self._ended(run, has_slot=has_slot))
        task = asyncio.get_running_loop().create_task(starting)
        self._starting.add(task)
        task.add_done_callback(self._started)

    def refused(self, number: int, error: SandboxError, grant: Grant) -> ServerRun:
        """Return a run whose description is invalid; its only event is the refusal."""
        self._owner.metrics.runs_refused += 1
        run = ServerRun(number, _REFUSED_SPEC, self.runs.buffers_of(grant), grant)
        self.runs.add(run)
        self.record.begin(run.record)
        run.refuse(error)
        return run

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOGGER.error("run failed to start", exc_info=error)

    def _ended(self, run: ServerRun, *, has_slot: bool) -> None:
        self._owner.running.discard(run)
        if has_slot:
            self._owner.slots.release(self.name, is_limited=not run.grant.is_full)
        self._owner.metrics.ended(run)

    def detach(self, run: ServerRun, listener: Listener) -> None:
        """Detach a closed connection; end the run if no client attaches within the grace period."""
        if run.detach(listener):
            loop = asyncio.get_running_loop()
            loop.call_later(self.grace_s, self._abandon, run, run.attachments)

    def _abandon(self, run: ServerRun, attachments: int) -> None:
        # A client that was back in between has a grace period of its own.
        is_same = run.attachments == attachments
        if is_same and not run.is_attached and self.runs.get(run.number) is run:
            run.end("closed")
            run.over.add_done_callback(lambda _: self.forget(run))

    def forget(self, run: ServerRun) -> None:
        """Remove a run."""
        self.runs.discard(run)

    def forget_if_complete(self, run: ServerRun) -> None:
        """Remove a run if the client has received everything."""
        if run.log.is_over:
            self.forget(run)

    def keep(self, run: ServerRun) -> None:
        """Keep the output of an ended run for a repeated request with its idempotency key."""
        self._owner.kept.add(run, self.name)

    # Closing.

    async def close(self) -> None:
        """End all runs and remove the sandbox; output that was not sent stays in the runs."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for timer in (self._lease, self._limit):
            if timer is not None:
                timer.cancel()
        # A run that is being passed to the engine would not receive its end.
        if self._starting:
            await asyncio.wait(self._starting, timeout=5)
        await self.operations.end()
        contexts = [run for run in self.runs.values() if isinstance(run, ServerContext)]
        await asyncio.gather(*(context.aclose() for context in contexts))
        await self.transport.aclose()

    def release_runs(self) -> None:
        """Remove all runs: no connection needs their output."""
        for run in tuple(self.runs.values()):
            self.runs.discard(run)


def _new_transport(spec: SessionSpec, owner: Sessions, launch: LaunchSpec | None) -> LocalTransport:
    config = owner.config
    place = WorkPlace(
        config.work_dir,
        shown_at=(launch and launch.shown_at) or config.work_dir,
        allowed=config.allow_paths,
    )
    # Clients may use proxies that the operator allows; a supervised session is the operator's.
    proxies = NetworkRules(allow=config.allow_proxies) if launch is None else None
    network = SessionNetwork(ServerRules(owner.own_server, proxies))
    return LocalTransport(spec, place=place, network=network)
