"""Context: an interpreter of a session that keeps its variables from cell to cell."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

from union.sandbox._contexts.recorder import CellRecorder
from union.sandbox._contexts.specs import (
    plain_cell,
    resolve_cell,
    resolve_context,
    resolve_request,
    resolve_set,
    with_source,
)
from union.sandbox._contexts.values import ContextSnapshot, parse_value
from union.sandbox.errors import (
    ContextLostError,
    SandboxCellError,
    SandboxExecutionError,
    SandboxUsageError,
    SessionClosedError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
    from types import TracebackType

    from union.sandbox._contexts.specs import (
        CellSpec,
        ContextLanguage,
        ContextRestart,
        ContextSpec,
        LiveContext,
    )
    from union.sandbox._contexts.values import CellEnd, CellOutput, CellResult, MimeBundle
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.literals import NetworkMode
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._policy.http_entries import Http

    Opener = Callable[[ContextSpec], Coroutine[Any, Any, LiveContext]]

__all__ = ["Context", "opener_of"]

_NOTHING_GIVEN: Final = (None,) * 5
MAX_QUEUED: Final = 64
"""Cells that may wait for the one that runs."""


def opener_of(transport: object) -> Opener:
    """Return the operation of a transport that opens a context.

    Raises:
        SandboxUsageError: the transport has none.

    """
    opener: Opener | None = getattr(transport, "open_context", None)
    if opener is None:
        raise SandboxUsageError(
            "this session cannot run contexts",
            code="context-unsupported",
            hint="use run_code() for code that needs no earlier state",
        )
    return opener


class Context:
    """A live interpreter: variables, imports and the working directory persist between cells.

    ``Session.context()`` returns one; ``async with`` or ``await context.open()`` starts it. Its
    cells run one after another in one process, in one sandbox. They are one principal: a cell can
    change what later cells do.
    """

    def __init__(
        self,
        session: SessionSpec,
        opener: Callable[[], Opener],
        *,
        language: ContextLanguage,
        env: Mapping[str, str] | None,
        restart: ContextRestart,
        interrupt_grace_s: float,
    ) -> None:
        if restart not in {"never", "auto"}:
            raise SandboxUsageError(
                f"restart must be 'never' or 'auto', not {restart!r:.80}", argument="restart"
            )
        self._session = session
        self._opener = opener
        self._spec = resolve_context(
            session, language, env=env, interrupt_grace_s=interrupt_grace_s
        )
        self._plain = plain_cell(session, language)
        self._restarts = restart == "auto"
        self._live: LiveContext | None = None
        self._is_closed = False
        self._number = 0
        self._generation = 0
        self._current: CellRecorder | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_held = False
        self._restarting = asyncio.Lock()

    # Opening and closing.

    async def open(self) -> Self:
        """Start the interpreter and return the context.

        Raises:
            SessionClosedError: the session is not open, or the context was opened before.
            SandboxExecutionError: the interpreter could not be started.

        """
        if self._live is not None or self._is_closed:
            raise SessionClosedError(
                "the context is open already, or was closed",
                hint="create a new one with session.context()",
            )
        self._live = await self._opener()(self._spec)
        return self

    async def close(self) -> None:
        """End the interpreter and everything that its cells started. Closing twice is allowed."""
        self._is_closed = True
        if self._live is not None:
            await self._live.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # Information.

    @property
    def language(self) -> ContextLanguage:
        """The language of its cells."""
        return self._spec.language

    @property
    def alive(self) -> bool:
        """Whether the interpreter runs."""
        return self._live is not None and self._live.is_alive

    @property
    def busy(self) -> bool:
        """Whether a cell runs or waits."""
        return self._is_held

    @property
    def generation(self) -> int:
        """How often the interpreter was restarted; its variables belong to one generation."""
        return self._generation

    @property
    def isolation(self) -> Isolation:
        """The isolation layers of the interpreter."""
        return self._opened().isolation

    @property
    def between(self) -> tuple[str, str]:
        """Output and error output written while no cell ran; the first 64 KiB of each."""
        out, err = self._opened().between
        return out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    def _opened(self) -> LiveContext:
        if self._live is None:
            raise SessionClosedError(
                "the context is not open", hint="use `async with` or `await context.open()`"
            )
        return self._live

    # Cells.

    async def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = False,
        wait: bool = True,
        max_output_bytes: int | None = None,
    ) -> CellResult:
        """Run one cell and return its output, results and end.

        An exception in the cell is in ``result.error``. Cancelling this call interrupts the cell;
        its variables are kept.

        Args:
            code: source in the language of the context; indentation shared by all lines of Python
                source is removed.
            timeout_s: seconds until the cell is interrupted; None (default) for no limit. The
                variables are kept. A cell that ignores the interrupt is killed with the
                interpreter, and ``result.state`` is ``"lost"``.
            network_mode: ``"blocked"``, ``"allowlist"`` or ``"open"`` during this cell, within what
                the session allows. None (default) for the mode of the session. ``"open"`` allows
                every TCP destination and name, but no UDP.
            network_allowlist: hosts, addresses or ranges for mode ``"allowlist"``; None (default)
                for the list of the session.
            env: variables set during this cell; None (default) for none.
            check: whether an exception or a non-zero exit code raises ``SandboxCellError``; False
                by default.
            wait: whether to wait while another cell runs (default); False raises instead.
            max_output_bytes: bytes to collect of each stream; None (default) for 64 MiB.

        Raises:
            ContextLostError: the interpreter has ended; ``restart()`` starts a new one.
            SandboxCellError: the cell failed and ``check`` is true.
            SandboxUsageError: an argument is invalid, or the context is busy.
            PolicyError: the cell requests more network than its session allows.

        """
        given = (timeout_s, network_mode, network_allowlist, env, max_output_bytes)
        plain = self._plain if given == _NOTHING_GIVEN else None
        spec = (
            with_source(plain, self._spec.language, code)
            if plain is not None
            else resolve_cell(
                self._session,
                self._spec.language,
                code,
                env=env,
                network_mode=network_mode,
                network_allowlist=network_allowlist,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
            )
        )
        recorder = await self._finish(await self._begin(spec, wait=wait))
        result = recorder.result()
        if check and not result.ok:
            raise SandboxCellError(result)
        return result

    async def stream(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        network_mode: NetworkMode | None = None,
        network_allowlist: Sequence[str | Http] | None = None,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
        max_output_bytes: int | None = None,
    ) -> AsyncIterator[CellOutput | MimeBundle | CellResult]:
        """Run one cell and yield output and displays as they arrive, and the result at the end.

        A slow reader slows the cell down. Leaving the loop early interrupts the cell.

        Args:
            code: as for ``run()``.
            timeout_s: seconds until the cell is interrupted; None (default) for no limit.
            network_mode: as for ``run()``; None (default) for the mode of the session.
            network_allowlist: as for ``run()``; None (default) for the list of the session.
            env: variables set during this cell; None (default) for none.
            wait: whether to wait while another cell runs (default); False raises instead.
            max_output_bytes: bytes of each stream to keep for the result; None (default) for
                64 MiB.

        """
        spec = resolve_cell(
            self._session,
            self._spec.language,
            code,
            env=env,
            network_mode=network_mode,
            network_allowlist=network_allowlist,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
        )
        recorder = await self._begin(spec, wait=wait, is_streamed=True)
        try:
            while (event := await recorder.next_event()) is not None:
                yield event
        finally:
            recorder.stop_reading()
            if not recorder.ended.done():
                self._opened().interrupt()
        yield recorder.result()

    def interrupt(self) -> None:
        """Interrupt the running cell, like Ctrl-C; its variables are kept.

        Does nothing if no cell runs. A cell that ignores the interrupt for ``interrupt_grace_s`` is
        killed with the interpreter.
        """
        if self._current is not None and not self._current.ended.done():
            self._opened().interrupt()

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """Return the processes of the context: its interpreter, and all that its cells started.

        A cell may run meanwhile. Empty if the interpreter has ended.
        """
        return await self._opened().processes()

    async def restart(self) -> None:
        """End the interpreter and start a new one without variables; ``generation`` increases."""
        live = self._opened()
        if self._is_closed:
            raise SessionClosedError("the context is closed")
        async with self._restarting:
            await live.restart()
            self._generation += 1

    async def set(self, **variables: Any) -> None:
        """Assign variables.

        Args:
            **variables: JSON values by name; strings only in a bash context.

        Raises:
            SandboxUsageError: a value is not a JSON value, or a name is not an identifier.
            ContextLostError: the interpreter has ended.

        """
        spec = resolve_set(self._spec.language, variables)
        await self._request(spec)

    async def get(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Return the value of a variable that is a JSON value, as reported by the interpreter.

        Args:
            name: the name of the variable.
            timeout_s: seconds until the request is interrupted; None (default) for no limit.

        Raises:
            SandboxCellError: there is no such variable, or its value is not a JSON value.
            ContextLostError: the interpreter has ended.

        """
        spec = resolve_request("get", name, self._spec.language, timeout_s=timeout_s)
        recorder = await self._request(spec)
        value = recorder.ended.result().value
        try:
            return parse_value(b"" if value is None else value)
        except ValueError as exc:
            raise SandboxExecutionError(
                f"the interpreter sent no JSON value for {name!r}",
                stage="stream",
                code="context-value",
            ) from exc

    async def save(self, *, timeout_s: float | None = None) -> ContextSnapshot:
        """Save the whole interpreter: variables, modules, functions, the working directory.

        The interpreter continues unchanged. Threads, tasks, sockets, pipes and child processes
        cannot be saved: if there are any, nothing is saved and the error names them. Open files are
        shared with the snapshot, and files of the work dir are not part of it.

        Args:
            timeout_s: seconds until the request is interrupted; None (default) for no limit.

        Raises:
            SandboxCellError: the interpreter cannot be saved, or the limit of 16 snapshots is
                reached.
            SandboxUsageError: the context does not run Python.
            ContextLostError: the interpreter has ended.

        """
        spec = resolve_request("save", "", self._spec.language, timeout_s=timeout_s)
        recorder = await self._request(spec)
        return ContextSnapshot(number=recorder.number, generation=self._generation)

    async def restore(self, snapshot: ContextSnapshot, *, timeout_s: float | None = None) -> None:
        """Return to a saved interpreter; the present one ends, the snapshot stays.

        Args:
            snapshot: what ``save()`` returned.
            timeout_s: seconds until the request is interrupted; None (default) for no limit.

        Raises:
            SandboxCellError: the snapshot has ended; the present interpreter continues.
            ContextLostError: the interpreter has ended, or the snapshot is of an earlier
                generation.

        """
        await self._request(self._of_snapshot("restore", snapshot, timeout_s))

    async def discard(self, snapshot: ContextSnapshot) -> None:
        """Release a snapshot and its memory.

        Args:
            snapshot: what ``save()`` returned.

        Raises:
            SandboxCellError: there is no such snapshot.
            ContextLostError: as for ``restore()``.

        """
        await self._request(self._of_snapshot("discard", snapshot, None))

    def _of_snapshot(
        self, operation: str, snapshot: ContextSnapshot, timeout_s: float | None
    ) -> CellSpec:
        number = getattr(snapshot, "number", snapshot)
        spec = resolve_request(operation, str(number), self._spec.language, timeout_s=timeout_s)
        if snapshot.generation != self._generation:
            raise ContextLostError(
                "the snapshot ended with the interpreter that it was saved from",
                hint="save() again after restart()",
            )
        return spec

    async def _request(self, spec: CellSpec) -> CellRecorder:
        recorder = await self._finish(await self._begin(spec, wait=True))
        result = recorder.result()
        if not result.ok:
            raise SandboxCellError(result)
        return recorder

    # The queue: one cell runs at a time, the others wait in order.

    async def _begin(
        self, spec: CellSpec, *, wait: bool, is_streamed: bool = False
    ) -> CellRecorder:
        await self._acquire(wait=wait)
        try:
            live = await self._usable()
            self._number += 1
            if is_streamed:
                spec = spec._replace(is_streamed=True)
            recorder = CellRecorder(
                self._number,
                max_output_bytes=spec.max_output_bytes,
                live=live,
                is_streamed=is_streamed,
            )
            live.start(self._number, spec, recorder)
        except BaseException:
            self._release()
            raise
        self._current = recorder
        # Held until the cell has really ended, also if its caller was cancelled.
        recorder.ended.add_done_callback(self._on_ended)
        return recorder

    def _on_ended(self, ended: asyncio.Future[CellEnd]) -> None:
        ended.exception()  # the caller may have been cancelled, and never look at it
        self._release()

    async def _usable(self) -> LiveContext:
        live = self._opened()
        if self._is_closed:
            raise SessionClosedError("the context is closed")
        if live.is_alive and not self._restarting.locked():
            return live
        async with self._restarting:
            if not live.is_alive:
                if not self._restarts:
                    raise ContextLostError(
                        "the interpreter of this context has ended; its variables are gone",
                        hint="call restart(), or open the context with restart='auto'",
                    )
                await live.restart()
                self._generation += 1
        return live

    async def _finish(self, recorder: CellRecorder) -> CellRecorder:
        try:
            await recorder.wait()
        except asyncio.CancelledError:
            if not recorder.ended.done():
                self._opened().interrupt()
            raise
        return recorder

    async def _acquire(self, *, wait: bool) -> None:
        if not self._is_held:
            self._is_held = True
            return
        if not wait or len(self._waiting) >= MAX_QUEUED:
            why = "runs a cell" if not wait else f"has {MAX_QUEUED} cells waiting"
            raise SandboxUsageError(
                f"the context {why}",
                code="context-busy",
                hint="wait for it, or open another context",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_held = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self.alive else "not running"
        return f"<Context {self._spec.language} {state} generation={self._generation}>"
