"""The command line of ``sbx``: its words, and the help that teaches them.

Imports nothing of the product but its names, so that ``sbx --help`` answers at once.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from union.sandbox._version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BACKENDS", "make_parser", "verbs"]

BACKENDS: Final = ("bubblewrap", "userns", "sandbox-exec", "none")
_MODES: Final = ("blocked", "allowlist", "open")

_TOP: Final = """\
examples:
  sbx run -- python3 -c 'print(2 + 2)'     one command, isolated, with no network
  sbx run --work-dir . -- make test        in this directory, which stays
  sbx run --allow-pypi -- uv pip install six
  sbx shell --work-dir .                   look around inside
  sbx doctor                               what this machine can isolate, and what it lacks

`sbx COMMAND --help` says more about each.
"""

_RUN: Final = """\
examples:
  sbx run -- ls -l
  sbx run -c 'echo $HOME | wc -c'          shell text
  sbx run --python 'print(6 * 7)'          Python source; also a file, or - for stdin
  echo data | sbx run -- wc -c             stdin is passed on
  sbx run --allow api.example.com -- ./client
  sbx run --memory 512Mi --timeout 30 --work-dir . -- ./build
  sbx run -t -- vi notes.txt               with a terminal
  sbx run --json -- ./job | jq .returncode

Without --work-dir the command starts in an empty directory that is removed afterwards. The network
is blocked, the environment is a small clean one, and nothing of the home directory is visible.

exit code: that of the command; 128+N if signal N ended it. 2: the call is wrong. 125: the sandbox
could not be made. 127: there is no such program inside.
"""

_SHELL: Final = """\
examples:
  sbx shell                                in an empty directory that is removed afterwards
  sbx shell --work-dir . --allow-pypi      in this one, with the package index in reach
  sbx shell -- python3                     something other than a shell

$SHELL is used if it is visible inside, else bash, else sh. Ctrl-C, Ctrl-Z and the arrows belong to
the shell inside; `exit` or Ctrl-D leaves, and ends everything that was started.
"""

_CP: Final = """\
examples:
  sbx cp --work-dir w data.csv :           into the work dir
  sbx cp --work-dir w project :src         a whole directory, as src
  sbx cp --work-dir w :out/report.pdf .    out of it
  sbx cp --work-dir w :out results         a whole directory, as results

A path that begins with : is in the work dir. Nothing that sandboxed code left there is followed or
executed: links are not copied, and a tree that changes meanwhile cannot lead outside.
"""

_COMPLETION: Final = """\
to have it in every shell:
  bash    sbx completion bash > ~/.local/share/bash-completion/completions/sbx
  zsh     sbx completion zsh > "${fpath[1]}/_sbx"
  fish    sbx completion fish > ~/.config/fish/completions/sbx.fish
"""


class _Format(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the examples, and has room for the longest option beside its help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="sbx",
        description="Runs untrusted commands in isolated sandboxes on this machine.",
        epilog=_TOP,
        formatter_class=_Format,
        allow_abbrev=False,
    )
    top.add_argument("-V", "--version", action="version", version=f"sbx {__version__}")
    top.set_defaults(handler=None, verb=None, command=[])
    verbs = top.add_subparsers(title="commands", metavar="COMMAND", dest="verb")

    run = _verb(verbs, "run", "run:run", "run one command in a sandbox", _RUN)
    run.usage = "sbx run [options] -- CMD [ARG ...]"
    run.add_argument("command", nargs="*", metavar="CMD", help="a program and its arguments")
    text = run.add_mutually_exclusive_group()
    text.add_argument("-c", "--shell", metavar="TEXT", help="shell text to run in place of CMD")
    text.add_argument(
        "--python", metavar="SOURCE", help="Python source, the name of a file with it, or -"
    )
    run.add_argument("-t", "--tty", action="store_true", help="give the command a terminal")
    run.add_argument("--json", action="store_true", help="print the result as JSON, at the end")
    _session_options(run)

    shell = _verb(verbs, "shell", "shell:shell", "open an interactive shell in a sandbox", _SHELL)
    shell.usage = "sbx shell [options] [-- CMD [ARG ...]]"
    shell.add_argument("command", nargs="*", metavar="CMD", help="a program in place of the shell")
    _session_options(shell)

    cp = _verb(verbs, "cp", "copy:copy", "copy files into a work dir, or out of it", _CP)
    cp.add_argument("source", metavar="SOURCE")
    cp.add_argument("target", metavar="TARGET")
    cp.add_argument("--work-dir", required=True, metavar="DIR", help="the work dir")
    cp.add_argument("--backend", choices=BACKENDS, help="as in sbx run")
    cp.add_argument("-q", "--quiet", action="store_true", help="no progress")

    doctor = _verb(verbs, "doctor", "host_commands:doctor", "say what this machine can isolate", "")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")

    verbs.add_parser(
        "serve", help="start the server for remote sessions", add_help=False
    ).set_defaults(handler="host_commands:serve")

    version = _verb(verbs, "version", "host_commands:version", "print the version", "")
    version.add_argument("--json", action="store_true", help="print it as JSON")

    completion = _verb(
        verbs,
        "completion",
        "completion:completion",
        "print the completion script of a shell",
        _COMPLETION,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return top


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    handler: str,
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    made = verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=examples,
        formatter_class=_Format,
        allow_abbrev=False,
    )
    made.set_defaults(handler=handler)
    return made


def _session_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--backend",
        choices=BACKENDS,
        help="what isolates; used or refused, never replaced (default: bubblewrap)",
    )
    where.add_argument("--work-dir", metavar="DIR", help="an existing directory to work in")
    where.add_argument("--cwd", metavar="DIR", help="start there; relative to the work dir")
    where.add_argument(
        "--strict", action="store_true", help="refuse where a layer is weaker than usual"
    )
    sees = parser.add_argument_group("what it sees")
    sees.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="a variable; K alone passes the caller's value on",
    )
    sees.add_argument(
        "--read-only", action="append", default=[], metavar="PATH", help="show this too"
    )
    sees.add_argument(
        "--read-write", action="append", default=[], metavar="PATH", help="show, and may change"
    )
    net = parser.add_argument_group("network")
    net.add_argument("--network", choices=_MODES, help="default: blocked")
    net.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="HOST",
        help="a name, *.name, address or range, each with an optional :port; nothing else passes",
    )
    net.add_argument(
        "--allow-pypi", action="store_true", help="allow the hosts of the public Python index"
    )
    net.add_argument(
        "--deny", action="append", default=[], metavar="HOST", help="refuse this one, before all"
    )
    uses = parser.add_argument_group("what it may use")
    uses.add_argument("--timeout", type=float, metavar="S", help="seconds until it is ended")
    uses.add_argument("--memory", metavar="SIZE", help="such as 512Mi")
    uses.add_argument("--cpus", metavar="N", help="processors, such as 1.5")


def verbs(parser: argparse.ArgumentParser) -> dict[str, tuple[str, Sequence[argparse.Action]]]:
    """Each command with its summary and its options; what completion is made from."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            summaries = {c.dest: c.help or "" for c in action._choices_actions}  # noqa: SLF001
            return {
                name: (summaries[name], made._actions)  # noqa: SLF001
                for name, made in action.choices.items()
            }
    return {}
