"""``sbx shell``: an interactive shell in a sandbox, at the caller's terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from union.sandbox._cli.options import open_session, run_arguments
from union.sandbox._cli.run import run_at_terminal
from union.sandbox._cli.signals import run_to_end

if TYPE_CHECKING:
    import argparse

    from union.sandbox._cli.signals import Ending
    from union.sandbox._session.session import Session

__all__ = ["shell", "shell_command"]

_NOT_SHELLS: Final = frozenset({"", "false", "true", "nologin"})
_PROMPT: Final = r"[sbx] \w\$ "
"""In the syntax of bash; other shells use their own prompts."""
_FIRST_VISIBLE: Final = """
prompt=$1; shift
for shell in "$@"; do
    SHELL=$(command -v "$shell" 2> /dev/null) || continue
    case $shell in *bash) export PS1="$prompt" ;; esac
    export SHELL
    exec "$shell"
done
"""


def shell(options: argparse.Namespace) -> int:
    """Run a shell, or the command given, and return its exit code."""
    session = open_session(options)
    arguments = run_arguments(options)
    prompt = arguments["env"].get("PS1", _PROMPT)
    arguments["cmd"] = options.command or shell_command(prompt)

    async def work(ending: Ending) -> int:
        async with session as sbx:
            if sys.stderr.isatty():
                sys.stderr.write(_greeting(sbx, options))
            return await run_at_terminal(sbx, ending, arguments)

    return run_to_end(work)


def shell_command(prompt: str = _PROMPT) -> list[str]:
    """Return a command that runs the first shell visible inside the sandbox."""
    own = os.environ.get("SHELL", "")
    wanted = [] if os.path.basename(own) in _NOT_SHELLS else [own]
    return ["sh", "-c", _FIRST_VISIBLE, "sbx", prompt, *wanted, "bash", "sh"]


def _greeting(sbx: Session, options: argparse.Namespace) -> str:
    kept = "kept" if options.work_dir else "removed at the end"
    return f"sbx: {sbx.backend}, work dir {sbx.work_dir} ({kept}); leave with exit or Ctrl-D\n"
