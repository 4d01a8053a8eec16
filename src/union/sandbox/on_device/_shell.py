"""The shell that runs commands given as text."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from union.sandbox._core.literals import Shell

__all__ = ["SH", "find_shell", "means_the_same"]

SH: Final = "/bin/sh"
_BASH: Final = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
"""Directories that every sandbox shows."""
_PLAIN: Final = re.compile(
    r"([\w./][\w./:@%+,-]*)(?: [\w./:@%+,=][\w./:@%+,=-]*| -[\w=-]+)*", re.ASCII
)
"""Words and options, without any syntax of a shell; the first group is the program."""
_DIFFERENT: Final = frozenset(
    {
        ".", "alias", "bg", "bind", "break", "builtin", "caller", "command", "compgen",
        "complete", "compopt", "continue", "declare", "dirs", "disown", "echo", "enable",
        "eval", "exec", "export", "fc", "fg", "getopts", "hash", "help", "history",
        "jobs", "kill", "let", "local", "logout", "mapfile", "popd", "printf", "pushd",
        "read", "readarray", "readonly", "return", "set", "shift", "shopt", "source",
        "suspend", "test", "times", "trap", "type", "typeset", "ulimit", "umask",
        "unalias", "unset", "wait", "case", "coproc", "do", "done", "elif", "else",
        "esac", "fi", "for", "function", "if", "in", "select", "then", "time", "until",
        "while",
    }
)  # fmt: skip
"""Commands that a shell performs itself and that may depend on which shell it is."""


def find_shell(wanted: Shell | None) -> str:
    """Return the path of the shell: the one that is wanted, or bash where the sandbox has it.

    Raises:
        SandboxUsageError: bash is wanted, and not installed.

    """
    if wanted == "sh":
        return SH
    for path in _BASH:
        if os.access(path, os.X_OK):
            return path
    if wanted is None:
        return SH
    raise SandboxUsageError(
        f"shell='bash': none of {', '.join(_BASH)} exists on this machine",
        argument="shell",
        hint="install bash, or leave shell out to use /bin/sh",
    )


def means_the_same(text: str) -> bool:
    """Return whether a command is the same in every shell: a program and plain arguments.

    ``/bin/sh`` starts in a fraction of the time of bash, and most commands need no more.
    """
    found = _PLAIN.fullmatch(text)
    return found is not None and found[1] not in _DIFFERENT
