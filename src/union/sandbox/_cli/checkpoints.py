"""``sbx checkpoint``, ``rollback``, ``diff`` and ``fork``: states of a session on a server."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._cli.run import run_at_terminal, stream_command
from union.sandbox._cli.shell import shell_command
from union.sandbox._cli.signals import run_to_end
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine

    from union.sandbox._checkpoints.values import TreeChange
    from union.sandbox._cli.signals import Ending
    from union.sandbox._session.checkpoint import Checkpoint
    from union.sandbox._session.session import Session

__all__ = ["checkpoint", "diff", "fork", "rollback"]

_TOKEN_VARIABLE: Final = "SANDBOX_SERVER_TOKEN"  # noqa: S105 - the name, not the token
_SIGNS: Final = {"added": "A", "changed": "M", "deleted": "D"}


def checkpoint(options: argparse.Namespace) -> int:
    """Take a checkpoint and print its id; or list or drop checkpoints."""

    async def work(session: Session, _: Ending) -> int:
        if options.list:
            _print(options, [_described(one) for one in await session.checkpoints()], _row)
        elif options.drop is not None:
            await (await _find(session, options.drop)).drop()
        else:
            taken = _described(await session.checkpoint(options.name))
            _print(options, taken, lambda found: str(found["id"]))
        return 0

    return _in_session(options, work)


def rollback(options: argparse.Namespace) -> int:
    """Return the session to a checkpoint."""

    async def work(session: Session, _: Ending) -> int:
        found = await _find(session, options.checkpoint)
        await session.rollback(found)
        _print(options, {"rolled_back": found.id}, None)
        return 0

    return _in_session(options, work)


def diff(options: argparse.Namespace) -> int:
    """Print the differences between a checkpoint and the work dir."""

    async def work(session: Session, _: Ending) -> int:
        found = await _find(session, options.checkpoint)
        changes = await session.diff(found, content=options.text)
        _print_changes(options, changes)
        return 0

    return _in_session(options, work)


def fork(options: argparse.Namespace) -> int:
    """Run a command, or a shell, in a fork; with ``--adopt`` keep what a successful one did."""
    if options.json and not options.command:
        raise SandboxUsageError("--json needs a command", argument="--json", hint="add -- CMD")

    async def work(session: Session, ending: Ending) -> int:
        found = await _find(session, options.checkpoint)
        async with found.fork() as other:
            arguments: dict[str, Any] = {"cmd": options.command or shell_command(), "env": {}}
            result = None
            if options.json:
                result = await other.exec(options.command, timeout_s=options.timeout)
                code = result.returncode
            elif options.command:
                arguments["timeout_s"] = options.timeout
                code = await stream_command(other, ending, arguments)
            else:
                code = await run_at_terminal(other, ending, arguments)
            ending.process = None
            changes = await other.diff(found)
            is_adopted = options.adopt and code == 0
            if is_adopted:
                await session.adopt(other)
        if result is not None:
            reply = {
                "result": dataclasses.asdict(result),
                "adopted": is_adopted,
                "changes": list(map(_plain, changes)),
            }
            sys.stdout.write(json.dumps(reply, ensure_ascii=False, default=str) + "\n")
        else:
            end = "adopted" if is_adopted else "discarded"
            sys.stderr.write(f"sbx: {len(changes)} changes, {end}\n")
        return code

    return _in_session(options, work)


def _in_session(
    options: argparse.Namespace, work: Callable[[Session, Ending], Coroutine[Any, Any, int]]
) -> int:
    from union.sandbox import remote

    session = remote.attach(
        options.id, endpoint=options.endpoint, token=_token(options), cert=options.cert
    )

    async def attached(ending: Ending) -> int:
        async with session as opened:
            return await work(opened, ending)

    return run_to_end(attached)


def _token(options: argparse.Namespace) -> str | None:
    if options.token_file is None:
        return os.environ.get(_TOKEN_VARIABLE)
    try:
        with open(options.token_file, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise SandboxUsageError(
            f"--token-file: cannot read {options.token_file}: {exc}", argument="--token-file"
        ) from exc


async def _find(session: Session, name: str) -> Checkpoint:
    """Return the checkpoint with this id, or else the only one with this name."""
    known = await session.checkpoints()
    found = [one for one in known if one.id == name] or [one for one in known if one.name == name]
    if len(found) == 1:
        return found[0]
    why = "several checkpoints have this name" if found else "the session has no such checkpoint"
    raise SandboxUsageError(
        f"{why}: {name!r:.80}",
        argument="CHECKPOINT",
        code="no-such-checkpoint",
        hint="sbx checkpoint --list shows the ids",
    )


def _described(one: Checkpoint) -> dict[str, Any]:
    names = ("id", "name", "created", "kind", "took_s", "size_bytes")
    return {name: getattr(one, name) for name in names}


def _row(found: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["created"]))
    size = "" if found["size_bytes"] is None else f"{found['size_bytes'] / 2**20:.1f} MiB"
    return f"{found['id']}  {when}  {size:>12}  {found['name']}".rstrip()


def _print(options: argparse.Namespace, value: Any, line: Callable[[Any], str] | None) -> None:
    if options.json:
        sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    elif line is not None:
        items = value if isinstance(value, list) else [value]
        sys.stdout.write("".join(f"{line(item)}\n" for item in items))


def _print_changes(options: argparse.Namespace, changes: tuple[TreeChange, ...]) -> None:
    if options.json:
        sys.stdout.write(json.dumps(list(map(_plain, changes)), ensure_ascii=False) + "\n")
        return
    for change in changes:
        if options.text and change.text is not None:
            sys.stdout.write(_printable(change.text))
        else:
            sys.stdout.write(f"{_SIGNS[change.action]} {_printable(change.path)}\n")


def _plain(change: TreeChange) -> dict[str, Any]:
    fields = dataclasses.asdict(change)
    fields["path"] = change.path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return fields


def _printable(text: str) -> str:
    """Return text of the sandbox without characters that control a terminal."""
    plain = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in plain)
