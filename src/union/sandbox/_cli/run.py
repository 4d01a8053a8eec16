"""``sbx run``: run one command, pass its streams through, return its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._cli.options import open_session, run_arguments
from union.sandbox._cli.signals import run_to_end
from union.sandbox._cli.streams import forward, has_input, type_in
from union.sandbox._cli.terminal import follow_window, raw, window
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from union.sandbox._cli.signals import Ending
    from union.sandbox._session.process import SandboxProcess
    from union.sandbox._session.session import Session

__all__ = ["run", "run_at_terminal", "stream_command"]


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    command = _command(options)
    if options.tty and options.json:
        raise SandboxUsageError(
            "--json and --tty exclude each other: JSON needs collected output", argument="--json"
        )
    session = open_session(options)
    arguments = {**command, **run_arguments(options)}

    async def work(ending: Ending) -> int:
        async with session as sbx:
            if options.tty:
                return await run_at_terminal(sbx, ending, arguments)
            if options.json:
                return await _as_json(sbx, ending, arguments)
            return await stream_command(sbx, ending, arguments)

    return run_to_end(work)


def _command(options: argparse.Namespace) -> dict[str, Any]:
    """Return the ``cmd`` arguments from CMD, --shell or --python."""
    is_python = options.python is not None
    ways = [None if is_python else options.command or None, options.shell, options.python]
    if sum(way is not None for way in ways) != 1:
        raise SandboxUsageError(
            "give one command: CMD, --shell TEXT or --python SOURCE",
            argument="CMD",
            hint="sbx run -- ls -l",
        )
    if options.shell is not None:
        return {"cmd": options.shell}
    if options.python is not None:
        source = _source(options.python)
        if options.command:
            source = _with_arguments(source, options.python, options.command)
        return {"cmd": source, "script_type": "python"}
    return {"cmd": options.command}


def _with_arguments(source: str, name: str, arguments: list[str]) -> str:
    """Return a program that runs the source as a file of that name would run, with arguments."""
    return (
        f"import linecache as _l, sys as _s; _s.argv[:] = {[name, *arguments]!r}; _t = {source!r}; "
        f"_l.cache[{name!r}] = (len(_t), None, _t.splitlines(True), {name!r}); "
        f"exec(compile(_t, {name!r}, 'exec'))"
    )


_TAIL_BYTES: Final = 16 * 1024
_FILE_NAME: Final = re.compile(r"[^\s()=\"']*(?:\.py|/[^\s()=\"'/]+)")
"""Text that can only be meant as a file: no statement of Python looks like it."""


def _source(given: str) -> str:
    try:
        if given == "-":
            return sys.stdin.read()
        if os.path.isfile(given):
            with open(given, encoding="utf-8") as file:
                return file.read()
    except (OSError, UnicodeDecodeError) as exc:
        raise SandboxUsageError(
            f"--python: cannot read {given}: {exc}", argument="--python"
        ) from exc
    if _FILE_NAME.fullmatch(given):
        raise SandboxUsageError(
            f"--python: the file {given} does not exist",
            argument="--python",
            hint="give the name of a file, Python source, or - for stdin",
        )
    return given


@contextlib.asynccontextmanager
async def _forward_stdin(process: SandboxProcess) -> AsyncIterator[None]:
    """Forward our stdin to the command meanwhile."""
    if process.stdin is None:
        yield
        return
    typing = asyncio.create_task(type_in(0, process.stdin))
    try:
        yield
    finally:
        typing.cancel()
        await asyncio.gather(typing, return_exceptions=True)


async def stream_command(sbx: Session, ending: Ending, arguments: dict[str, Any]) -> int:
    """Run a command whose streams are those of the caller, and return its exit code."""
    process = await sbx.run(**arguments, stdin=has_input(0), stdout=True, stderr=True)
    ending.process = process
    tail = bytearray()
    async with _forward_stdin(process):
        try:
            await asyncio.gather(
                forward(process.iter_stdout(), 1), forward(_keep_tail(process, tail), 2)
            )
        except BrokenPipeError:
            process.kill()
            await process.wait()
            return 128 + signal.SIGPIPE
        code = await process.wait()
    _print_remarks(process)
    if code and process._spec.network.mode == "blocked":  # noqa: SLF001 - one package
        from union.sandbox._policy.hints import is_network_failure

        if is_network_failure(tail.decode("utf-8", "replace")):
            sys.stderr.write(
                "sbx: the network is blocked, which is the default; use --allow HOST to allow a "
                "host, or --network open\n"
            )
    return code


async def _keep_tail(process: SandboxProcess, tail: bytearray) -> AsyncIterator[bytes]:
    """Yield stderr as it arrives, and keep its end."""
    async for data in process.iter_stderr():
        tail += data
        del tail[:-_TAIL_BYTES]
        yield data


async def _as_json(sbx: Session, ending: Ending, arguments: dict[str, Any]) -> int:
    process = await sbx.run(**arguments, stdin=has_input(0), background=True)
    ending.process = process
    async with _forward_stdin(process):
        code = await process.wait()
    await process.communicate()
    result = dataclasses.asdict(process.result())
    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    return code


async def run_at_terminal(sbx: Session, ending: Ending, arguments: dict[str, Any]) -> int:
    """Run a command with a terminal that is connected to the caller's terminal."""
    term = {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}
    process = await sbx.run(
        **{**arguments, "env": {**term, **arguments["env"]}},
        pty=window() or True,
        stdin=True,
        stdout=True,
    )
    ending.process = process
    with raw(0), follow_window(process):
        async with _forward_stdin(process):
            try:
                await forward(process.iter_stdout(), 1)
            except BrokenPipeError:
                process.kill()
            code = await process.wait()
    _print_remarks(process)
    return code


def _print_remarks(process: SandboxProcess) -> None:
    """Print what the exit code does not show: the termination reason and denied connections."""
    if process.termination_reason in {"timeout", "oom", "limit"}:
        sys.stderr.write(f"sbx: ended by the sandbox: {process.termination_reason}\n")
    for request in process.requests:
        if not request.allowed:
            where = f"{request.method} {request.host}{request.path}".strip()
            sys.stderr.write(f"sbx: denied {where}: {request.reason}\n")
    refused = {d.suggestion: d for d in process.network if not d.allowed}
    for decision in refused.values():
        where = f"{decision.host}:{decision.port}" if decision.port else decision.host
        sys.stderr.write(f"sbx: denied {where}: {decision.reason}")
        sys.stderr.write(f"; use --allow {decision.suggestion}\n" if decision.suggestion else "\n")
