"""``sbx run``: one command, its streams passed through, its exit code ours."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

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

__all__ = ["run", "run_at_terminal"]


def run(options: argparse.Namespace) -> int:
    command = _command(options)
    if options.tty and options.json:
        raise SandboxUsageError("--json collects the output; --tty shows it", argument="--json")
    session = open_session(options)
    arguments = {**command, **run_arguments(options)}

    async def work(ending: Ending) -> int:
        async with session as sbx:
            if options.tty:
                return await run_at_terminal(sbx, ending, arguments)
            if options.json:
                return await _as_json(sbx, ending, arguments)
            return await _streamed(sbx, ending, arguments)

    return run_to_end(work)


def _command(options: argparse.Namespace) -> dict[str, Any]:
    """The ``cmd`` that was asked for, in one of three ways."""
    ways = [options.command or None, options.shell, options.python]
    if sum(way is not None for way in ways) != 1:
        raise SandboxUsageError(
            "give one command: CMD, --shell TEXT or --python SOURCE",
            argument="CMD",
            hint="sbx run -- ls -l",
        )
    if options.shell is not None:
        return {"cmd": options.shell}
    if options.python is not None:
        return {"cmd": _source(options.python), "script_type": "python"}
    return {"cmd": options.command}


def _source(given: str) -> str:
    try:
        if given == "-":
            return sys.stdin.read()
        if os.path.isfile(given):
            with open(given, encoding="utf-8") as file:
                return file.read()
    except (OSError, UnicodeDecodeError) as exc:
        raise SandboxUsageError(
            f"--python {given}: cannot be read: {exc}", argument="--python"
        ) from exc
    return given


@contextlib.asynccontextmanager
async def _typed(process: SandboxProcess) -> AsyncIterator[None]:
    """Passes our stdin on meanwhile."""
    if process.stdin is None:
        yield
        return
    typing = asyncio.create_task(type_in(0, process.stdin))
    try:
        yield
    finally:
        typing.cancel()
        await asyncio.gather(typing, return_exceptions=True)


async def _streamed(sbx: Session, ending: Ending, arguments: dict[str, Any]) -> int:
    process = await sbx.run(**arguments, stdin=has_input(0), stdout=True, stderr=True)
    ending.process = process
    async with _typed(process):
        try:
            await asyncio.gather(
                forward(process.iter_stdout(), 1), forward(process.iter_stderr(), 2)
            )
        except BrokenPipeError:
            process.kill()
            await process.wait()
            return 128 + signal.SIGPIPE
        code = await process.wait()
    _remark(process)
    return code


async def _as_json(sbx: Session, ending: Ending, arguments: dict[str, Any]) -> int:
    process = await sbx.run(**arguments, stdin=has_input(0), background=True)
    ending.process = process
    async with _typed(process):
        code = await process.wait()
    await process.communicate()
    result = dataclasses.asdict(process.result())
    result["network"] = [dataclasses.asdict(decision) for decision in process.network]
    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    return code


async def run_at_terminal(sbx: Session, ending: Ending, arguments: dict[str, Any]) -> int:
    """Runs a command with a terminal, which is ours for as long as it runs."""
    term = {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}
    process = await sbx.run(
        **{**arguments, "env": {**term, **arguments["env"]}},
        pty=window() or True,
        stdin=True,
        stdout=True,
    )
    ending.process = process
    with raw(0), follow_window(process):
        async with _typed(process):
            try:
                await forward(process.iter_stdout(), 1)
            except BrokenPipeError:
                process.kill()
            code = await process.wait()
    _remark(process)
    return code


def _remark(process: SandboxProcess) -> None:
    """Says what an exit code alone does not."""
    if process.termination_reason in {"timeout", "oom", "limit"}:
        sys.stderr.write(f"sbx: ended by the sandbox: {process.termination_reason}\n")
    refused = {d.suggestion: d for d in process.network if not d.allowed}
    for decision in refused.values():
        where = f"{decision.host}:{decision.port}" if decision.port else decision.host
        sys.stderr.write(f"sbx: refused {where}: {decision.reason}")
        sys.stderr.write(f"; --allow {decision.suggestion}\n" if decision.suggestion else "\n")
