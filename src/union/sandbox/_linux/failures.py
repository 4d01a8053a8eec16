"""What a failed step means to the caller."""

from __future__ import annotations

import errno
import os
from typing import Final

from union.sandbox._core.events import Failed
from union.sandbox._plan.plan import OP_NAMES

__all__ = ["WRAP", "explain", "in_its_words"]

WRAP: Final = 25
_EXEC: Final = 111


def in_its_words(said: bytes) -> str:
    """What bwrap wrote before it gave up: one line, safe to show."""
    text = said.decode("utf-8", "replace").strip().removeprefix("bwrap: ")
    return "".join(c if c.isprintable() else " " for c in text)


def explain(where: int, error: int, program: str, said: bytes = b"") -> Failed:
    """The failure of one step; the low byte of ``where`` says which operation it was."""
    op = where & 0xFF
    if op == WRAP and said:
        return Failed("spawn", f"bwrap: {in_its_words(said)}", "spawn-bwrap")
    name = OP_NAMES.get(op, f"step {op}")
    if op == _EXEC and error == errno.ENOENT:
        return Failed(
            "spawn", f"no such program inside the sandbox: {program!r}", "program-not-found"
        )
    if op == _EXEC and error == errno.E2BIG:
        return Failed(
            "spawn",
            "arguments and environment together are larger than the kernel accepts",
            "too-large",
            "pass large data through stdin, or in a file with put_bytes()",
        )
    if op == _EXEC and error == errno.ENOEXEC:
        return Failed(
            "spawn",
            f"not a program for this machine: {program!r}",
            hint="a script needs a '#!' first line",
        )
    if op == _EXEC:
        name = f"{name} {program!r}"
    code = f"spawn-{errno.errorcode.get(error, error)}"
    if error == errno.ESTALE:
        return Failed(
            "spawn",
            f"{name}: a file or directory that the session shows was replaced meanwhile",
            code,
            "run the command again; if this repeats, another session or program keeps changing "
            "the directories above a path that this session shows",
        )
    return Failed("spawn", f"{name}: {os.strerror(error)}", code)
