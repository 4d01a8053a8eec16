"""Commands that go on between calls, with or without a terminal, by number."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from agents.sandbox.errors import PtySessionNotFoundError
from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
)

from union.sandbox.adapters._common import carry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union.sandbox._session.process import SandboxProcess

__all__ = ["Terminals"]

DEFAULT_START_MS: Final = 10_000
DEFAULT_WRITE_MS: Final = 250
ECHO_S: Final = 0.1
"""Time for a program to react to what was typed, before its output is collected."""


class _Terminal:
    """One command and the output that was not collected yet."""

    def __init__(self, process: SandboxProcess, *, has_terminal: bool) -> None:
        self.process = process
        self.has_terminal = has_terminal
        self.used = time.monotonic()
        self._chunks: deque[bytes] = deque()
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def _follow(self) -> None:
        streams = [self.process.iter_stdout()]
        if not self.has_terminal:
            streams.append(self.process.iter_stderr())
        try:
            await asyncio.gather(*(self._read(stream) for stream in streams))
            await self.process.wait()
        finally:
            self._ended.set()
            self._news.set()

    async def _read(self, stream: AsyncIterator[bytes]) -> None:
        async for chunk in stream:
            self._chunks.append(chunk)
            self._news.set()

    async def type(self, text: str) -> None:
        stdin = self.process.stdin
        if not self.has_terminal or stdin is None:
            raise RuntimeError("stdin is not available for this process")

        async def write() -> None:
            stdin.write(text.encode())
            await stdin.drain()

        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has just ended
            await carry(write)
        await asyncio.sleep(ECHO_S)

    async def collect(self, wait_ms: int, max_tokens: int | None) -> tuple[bytes, int | None, bool]:
        found: tuple[bytes, int | None, bool] = await collect_pty_output(
            output_chunks=self._chunks,
            output_lock=self._lock,
            output_notify=self._news,
            is_done=self._ended.is_set,
            yield_time_ms=wait_ms,
            max_output_tokens=max_tokens,
        )
        return found

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Terminals:
    """The commands of one session by number."""

    def __init__(self) -> None:
        self._by_number: dict[int, _Terminal] = {}
        self._numbers: set[int] = set()

    async def add(
        self,
        process: SandboxProcess,
        *,
        has_terminal: bool,
        yield_time_s: float | None,
        max_output_tokens: int | None,
    ) -> PtyExecUpdate:
        """Follow a command that has started; return its first output."""
        terminal = _Terminal(process, has_terminal=has_terminal)
        number = allocate_pty_process_id(self._numbers)
        oldest = self._to_prune()
        self._numbers.add(number)
        self._by_number[number] = terminal
        if oldest is not None:
            await oldest.end()
        wait_ms = DEFAULT_START_MS if yield_time_s is None else int(yield_time_s * 1000)
        return await self._update(
            number, terminal, clamp_pty_yield_time_ms(wait_ms), max_output_tokens
        )

    async def write(
        self,
        number: int,
        text: str,
        *,
        yield_time_s: float | None,
        max_output_tokens: int | None,
    ) -> PtyExecUpdate:
        """Type text, if there is some; return the output since the last call."""
        terminal = self._by_number.get(number)
        if terminal is None:
            raise PtySessionNotFoundError(session_id=number)
        if text:
            await terminal.type(text)
        wait_ms = DEFAULT_WRITE_MS if yield_time_s is None else int(yield_time_s * 1000)
        wait_ms = resolve_pty_write_yield_time_ms(yield_time_ms=wait_ms, input_empty=not text)
        terminal.used = time.monotonic()
        return await self._update(number, terminal, wait_ms, max_output_tokens)

    async def end_all(self) -> None:
        """Kill every command."""
        terminals = list(self._by_number.values())
        self._by_number.clear()
        self._numbers.clear()
        for terminal in terminals:
            await terminal.end()

    async def _update(
        self, number: int, terminal: _Terminal, wait_ms: int, max_tokens: int | None
    ) -> PtyExecUpdate:
        output, tokens, has_ended = await terminal.collect(wait_ms, max_tokens)
        code = terminal.process.returncode if has_ended else None
        if code is not None:
            self._by_number.pop(number, None)
            self._numbers.discard(number)
            await terminal.end()
        return PtyExecUpdate(
            process_id=None if code is not None else number,
            output=output,
            exit_code=code,
            original_token_count=tokens,
        )

    def _to_prune(self) -> _Terminal | None:
        if len(self._by_number) < PTY_PROCESSES_MAX:
            return None
        number = process_id_to_prune_from_meta(
            [(key, found.used, found.has_ended) for key, found in self._by_number.items()]
        )
        if number is None:
            return None
        self._numbers.discard(number)
        return self._by_number.pop(number, None)
