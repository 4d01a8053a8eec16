"""The entry of ``sbx``: one command line in, one exit code out."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Final

from union.sandbox._cli.parser import make_parser
from union.sandbox.errors import SandboxError, SandboxExecutionError, SandboxUsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = ["main"]

# Numbers that shells and their relatives use for the same things.
_FILE_FAILED: Final = 1
_USAGE: Final = 2
_TOOL_FAILED: Final = 125
_NOT_FOUND: Final = 127
_INTERRUPTED: Final = 130
_NOBODY_READS: Final = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``sbx`` with these arguments and returns its exit code."""
    _open_standard_streams()
    words, command = _split(list(sys.argv[1:] if argv is None else argv))
    parser = make_parser()
    options, unknown = parser.parse_known_args(words)
    if unknown:
        hint = "" if command else "; a command goes after --, as in: sbx run -- ls -l"
        parser.error(f"not known: {' '.join(unknown)}{hint}")
    if options.handler is None:
        parser.print_help()
        return _USAGE
    if command is not None:
        options.command = [*options.command, *command]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say
            code = _handler(options.handler)(options)
        sys.stdout.flush()
    except SandboxError as exc:
        return _complain(exc, as_json=getattr(options, "json", False))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # So that the interpreter has nothing left to say when it flushes its streams.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _NOBODY_READS
    return code


def _say(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as a person wants it: without the line of our source that gave it."""
    sys.stderr.write(f"sbx: {message}\n")


def _open_standard_streams() -> None:
    """A missing one would become the first file that we open, and be read or written as such."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for good


def _split(words: list[str]) -> tuple[list[str], list[str] | None]:
    """What is not ours to parse: a command after ``--``, and all arguments of the server."""
    if words[:1] == ["serve"]:
        return words[:1], words[1:]
    if words[:1] in (["run"], ["shell"]) and "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return words, None


def _handler(name: str) -> Callable[[argparse.Namespace], int]:
    """Only the module of the command that was asked for is imported."""
    module, _, function = name.partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(
        importlib.import_module(f"union.sandbox._cli.{module}"), function
    )
    return found


def _complain(exc: SandboxError, *, as_json: bool) -> int:
    if as_json:
        import json

        error = {"code": exc.code, "message": str(exc.args[0]), "hint": exc.hint}
        sys.stdout.write(json.dumps({"error": error}, ensure_ascii=False) + "\n")
    sys.stderr.write(f"sbx: {exc}\n")
    if isinstance(exc, SandboxUsageError):
        return _USAGE
    if isinstance(exc, OSError):
        return _FILE_FAILED
    if isinstance(exc, SandboxExecutionError) and exc.code == "program-not-found":
        return _NOT_FOUND
    return _TOOL_FAILED
