"""The entry point of ``sbx``."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Final

from union.sandbox._cli.option_names import in_options
from union.sandbox._cli.parser import make_parser
from union.sandbox.errors import SandboxError, SandboxUsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = ["main"]

# Exit codes as used by shells, env(1) and timeout(1).
_FILE_FAILED: Final = 1
_USAGE: Final = 2
_TOOL_FAILED: Final = 125
_INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``sbx`` and return its exit code.

    Args:
        argv: the arguments; None (default) for those of the process.

    """
    _open_standard_streams()
    words, command = _split(list(sys.argv[1:] if argv is None else argv))
    parser = make_parser()
    options, unknown = parser.parse_known_args(words)
    if unknown:
        hint = "" if command else "; put a command after --, as in: sbx run -- ls -l"
        parser.error(f"unknown arguments: {' '.join(unknown)}{hint}")
    if options.handler is None:
        parser.print_help()
        return _USAGE
    if command is not None:
        options.command = [*options.command, *command]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _handler(options.handler)(options)
        sys.stdout.flush()
    except SandboxError as exc:
        return _report_error(exc, as_json=getattr(options, "json", False))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Without this the interpreter reports the broken pipe again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _BROKEN_PIPE
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning without the source line that issued it."""
    sys.stderr.write(f"sbx: {message}\n")


def _open_standard_streams() -> None:
    """Open missing standard streams, or the next opened file would get their descriptors."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for good


def _split(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Split off what ``sbx`` does not parse: a command after ``--``, and server arguments."""
    if words[:1] == ["serve"]:
        return words[:1], words[1:]
    if words[:1] in (["run"], ["shell"], ["fork"]) and "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return words, None


def _handler(name: str) -> Callable[[argparse.Namespace], int]:
    """Import and return the handler of one command."""
    module, _, function = name.partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(
        importlib.import_module(f"union.sandbox._cli.{module}"), function
    )
    return found


def _report_error(exc: SandboxError, *, as_json: bool) -> int:
    if as_json:
        import json

        error = {
            "code": exc.code,
            "message": in_options(str(exc.args[0])),
            "hint": in_options(exc.hint),
        }
        sys.stdout.write(json.dumps({"error": error}, ensure_ascii=False) + "\n")
    sys.stderr.write(f"sbx: {in_options(str(exc))}\n")
    if isinstance(exc, SandboxUsageError):
        return _USAGE
    if isinstance(exc, OSError):
        return _FILE_FAILED
    return _TOOL_FAILED
