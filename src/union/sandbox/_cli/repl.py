"""``sbx repl``: a context at a prompt. Ctrl-C interrupts a cell and keeps its variables."""

from __future__ import annotations

import ast
import asyncio
import codeop
import contextlib
import json
import os
import shlex
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, Never, Self, TypeVar

from union.sandbox._cli.options import open_session, run_arguments
from union.sandbox._contexts.values import CellOutput, CellResult, MimeBundle

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Iterator

    from union.sandbox._contexts.context import Context

__all__ = ["repl"]

Found = TypeVar("Found")

_CHANGE_DIR: Final = {
    "python": lambda path: f"__import__('os').chdir({path!r})",
    "bash": lambda path: f"cd -- {shlex.quote(path)}",
    "node": lambda path: f"process.chdir({json.dumps(path)})",
}


def repl(options: argparse.Namespace) -> int:
    """Run cells from stdin; return 1 if stdin is not a terminal and the last cell failed."""
    session = open_session(options)
    arguments = run_arguments(options)
    is_terminal = sys.stdin.isatty()
    _end_by_signals()
    with _EventLoop() as loop:
        prompt = _Prompt(loop)
        context = session.context(options.language, env=arguments["env"], restart="auto")
        try:
            loop.run(session.open())
            loop.run(context.open())
            if arguments["cwd"] is not None:
                cell = _CHANGE_DIR[options.language](arguments["cwd"])
                loop.run(context.run(cell, check=True))
            if is_terminal and sys.stderr.isatty():
                sys.stderr.write(
                    f"sbx: {options.language} in {session.backend}, work dir {session.work_dir}; "
                    "Ctrl-C interrupts, Ctrl-D ends\n"
                )
            pictures = _Pictures(options.pictures)
            is_ok = True
            for code in _cells(options.language, prompt, is_terminal=is_terminal):
                show = _show(context, code, options.timeout, pictures)
                is_ok = loop.run(show, on_interrupt=context.interrupt)
        finally:
            loop.run(context.close())
            loop.run(session.close())
    return 0 if is_ok or is_terminal else 1


def _end_by_signals() -> None:
    def end(number: int, _frame: object) -> Never:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


class _EventLoop:
    """An event loop in a thread, so that Ctrl-C reaches the prompt in the main thread."""

    def __init__(self) -> None:
        self._on_interrupt: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sbx-repl")
        self._thread.start()
        return self

    def run(
        self,
        work: Coroutine[Any, Any, Found],
        *,
        on_interrupt: Callable[[], object] | None = None,
    ) -> Found:
        """Run ``work`` to its end; ``interrupt`` calls ``on_interrupt`` in the loop."""
        self._on_interrupt = on_interrupt
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        finally:
            self._on_interrupt = None

    def interrupt(self) -> None:
        """Interrupt the running work, if there is any that can be interrupted."""
        if self._on_interrupt is not None:
            self._loop.call_soon_threadsafe(self._on_interrupt)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Prompt:
    """Read lines. Ctrl-C abandons the line or interrupts the running cell; it ends nothing."""

    def __init__(self, loop: _EventLoop) -> None:
        self._is_reading = False
        self._loop = loop
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, _number: int, _frame: object) -> None:
        if self._is_reading:
            # At most one exception for each line: another one would arrive where none is handled.
            self._is_reading = False
            raise KeyboardInterrupt
        self._loop.interrupt()

    def line(self, text: str) -> str:
        """Return the next line; raise `KeyboardInterrupt` if Ctrl-C abandons it."""
        try:
            self._is_reading = True
            return input(text)
        finally:
            self._is_reading = False


def _cells(language: str, prompt: _Prompt, *, is_terminal: bool) -> Iterator[str]:
    """Yield cells from stdin: statements of Python, lines of other languages."""
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and a history
    is_complete = _is_complete_python if language == "python" else _is_complete_line
    lines: list[str] = []
    while True:
        text = ("[sbx] ... " if lines else "[sbx] >>> ") if is_terminal else ""
        try:
            lines.append(prompt.line(text))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            lines.clear()
            continue
        except EOFError:
            break
        code = "\n".join(lines)
        if is_complete(code):
            lines.clear()
            if code.strip():
                yield code
    if is_terminal:
        sys.stdout.write("\n")
    elif lines:
        yield "\n".join(lines)


_COMPILER: Final = codeop.CommandCompiler()
_COMPILER.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _is_complete_python(code: str) -> bool:
    try:
        return _COMPILER(code, "<stdin>", "single") is not None
    except (SyntaxError, ValueError, OverflowError):
        return True  # the interpreter reports the error


def _is_complete_line(code: str) -> bool:
    return not code.endswith("\\")


class _Pictures:
    """Save pictures as files and return their names."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._number = 0

    def save(self, data: bytes) -> str:
        while True:
            self._number += 1
            path = os.path.join(self._directory, f"picture-{self._number}.png")
            with contextlib.suppress(FileExistsError), open(path, "xb") as file:
                file.write(data)
                return path


async def _show(context: Context, code: str, timeout_s: float | None, pictures: _Pictures) -> bool:
    """Run one cell, print what it writes and displays; return whether it succeeded."""
    result: CellResult | None = None
    async for event in context.stream(code, timeout_s=timeout_s):
        if isinstance(event, CellOutput):
            stream = sys.stdout if event.stream == "stdout" else sys.stderr
            stream.flush()
            stream.buffer.write(event.data)
            stream.flush()
        elif isinstance(event, MimeBundle):
            _print_bundle(event, pictures)
        else:
            result = event
    if result is None:
        return False
    if result.state == "lost":
        sys.stderr.write(f"sbx: the variables are gone: {result.reason}\n")
    elif result.error is not None:
        trace = result.error.traceback or f"{result.error.name}: {result.error.value}\n"
        sys.stderr.write(trace if trace.endswith("\n") else f"{trace}\n")
    return result.ok


def _print_bundle(bundle: MimeBundle, pictures: _Pictures) -> None:
    if bundle.png is not None:
        sys.stdout.write(f"saved {pictures.save(bundle.png)}\n")
    elif bundle.text is not None:
        sys.stdout.write(f"{bundle.text}\n")
    else:
        sys.stdout.write(f"({', '.join(bundle.data)})\n")
    sys.stdout.flush()
