"""The command line of ``sbx``: commands, options and help texts.

Imports nothing of the product but its version, so that ``sbx --help`` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final, Literal

from union.sandbox._version import __version__

__all__ = ["BACKENDS", "LANGUAGES", "SHELLS", "PathMarker", "make_parser"]

BACKENDS: Final = ("bubblewrap", "userns", "landlock", "sandbox-exec", "none")
LANGUAGES: Final = ("python", "bash", "node")
SHELLS: Final = ("bash", "zsh", "fish")
_MODES: Final = ("blocked", "allowlist", "open")

PathMarker = Callable[[argparse.Action, Literal["file", "directory"]], object]
"""Called with every argument whose value is a path; the completion scripts need to know."""

_TOP: Final = """\
examples:
  sbx run -- python3 -c 'print(2 + 2)'     one command, isolated, without network
  sbx run --work-dir . -- make test        in this directory, which is kept
  sbx run --allow-pypi -- uv pip install six
  sbx shell --work-dir .                   an interactive shell
  sbx repl                                 a Python prompt that keeps its variables
  sbx mcp                                  a sandbox for an MCP client
  sbx checkpoint --endpoint URL --id ID    keep a state of a session on a server
  sbx doctor                               check which isolation works on this machine

`sbx COMMAND --help` describes each command.
"""

_RUN: Final = """\
examples:
  sbx run -- ls -l
  sbx run -c 'echo $HOME | wc -c'          shell text
  sbx run --python 'print(6 * 7)'          Python source, or - for stdin
  sbx run --python job.py data.csv         a Python file and its arguments
  echo data | sbx run -- wc -c             stdin is passed through
  sbx run --allow api.example.com -- ./client
  sbx run --memory 512Mi --timeout 30 --work-dir . -- ./build
  sbx run -t -- vi notes.txt               with a terminal
  sbx run --json -- ./job | jq .returncode

Without --work-dir the command starts in an empty directory that is removed afterwards. By default
the network is blocked, the environment is minimal, and the home directory is not visible.

exit code: that of the command; 128+N if signal N ended it. 2: usage error. 125: the sandbox could
not be created. 126 and 127: the program cannot be executed, or was not found in the sandbox.
"""

_SHELL: Final = """\
examples:
  sbx shell                                in an empty directory that is removed afterwards
  sbx shell --work-dir . --allow-pypi      in this directory, with access to the package index
  sbx shell -- python3                     another interactive program

Runs $SHELL if it is visible in the sandbox, else bash, else sh. All keys, including Ctrl-C and
Ctrl-Z, go to the shell in the sandbox. `exit` or Ctrl-D ends it and every process it started.
"""

_REPL: Final = """\
examples:
  sbx repl --work-dir .                    Python, with the files of this directory
  sbx repl --language bash --allow-pypi    a shell that keeps its state
  sbx repl < cells.py                      without a prompt

Variables persist from cell to cell. Ctrl-C interrupts the cell and keeps them, Ctrl-D ends the
interpreter and every process it started. Pictures are saved as files. --timeout applies per cell.
"""

_MCP: Final = """\
examples:
  sbx mcp                                  for a client that starts it: stdin and stdout
  sbx mcp --work-dir . --allow-pypi        on the files of this directory, packages allowed
  sbx mcp --http 8765                      for several clients, at http://127.0.0.1:8765/mcp

The options are the ceiling: no tool can extend them. The sandbox is created by the first tool call
and removed when the client disconnects. --timeout limits each command and cell. Over HTTP, each
request must carry the token from --token-file or SANDBOX_SERVER_TOKEN, if there is one; an address
other than a loopback address needs one.
"""

_CP: Final = """\
examples:
  sbx cp --work-dir w data.csv :           a file into the work dir
  sbx cp --work-dir w project :src         a directory into the work dir, as src
  sbx cp --work-dir w :out/report.pdf .    a file out of the work dir
  sbx cp --work-dir w :out results         a directory out of the work dir, as results

A path that begins with : is in the work dir. Symbolic links are neither copied nor followed, so a
tree that changes during the copy cannot lead outside the work dir.
"""

_CHECKPOINT: Final = """\
examples:
  sbx checkpoint --endpoint URL --id ID 'before the refactoring'
  sbx checkpoint --endpoint URL --id ID --list

Prints the id of the checkpoint. The session is one on a server: ID is `Session.id`. Sessions of
this machine belong to the program that opened them, and have checkpoint() in the API.
"""

_ROLLBACK: Final = """\
examples:
  sbx rollback --endpoint URL --id ID CHECKPOINT

Everything since the checkpoint is gone. Commands and contexts that run are ended first.
"""

_DIFF: Final = """\
examples:
  sbx diff --endpoint URL --id ID CHECKPOINT           A, M and D for added, changed and deleted
  sbx diff --endpoint URL --id ID --text CHECKPOINT    a unified difference of text files
"""

_FORK: Final = """\
examples:
  sbx fork --endpoint URL --id ID CHECKPOINT                     a shell in a fork
  sbx fork --endpoint URL --id ID CHECKPOINT -- make test        a command in a fork
  sbx fork --endpoint URL --id ID --adopt CHECKPOINT -- ./fix    kept if it succeeds

The fork is removed when the command has ended; the session does not change unless --adopt is given
and the command succeeds. The exit code is that of the command.
"""

_COMPLETION: Final = """\
installation:
  bash    sbx completion bash > ~/.local/share/bash-completion/completions/sbx
  zsh     sbx completion zsh > "${fpath[1]}/_sbx"
  fish    sbx completion fish > ~/.config/fish/completions/sbx.fish
"""


class _Format(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of the examples, and fit the longest option beside its help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)


def make_parser(mark_path: PathMarker = lambda *_: None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line.

    Args:
        mark_path: called with every argument whose value is a path; does nothing by default.

    """
    top = argparse.ArgumentParser(
        prog="sbx",
        description="Run untrusted commands in isolated sandboxes on this machine.",
        epilog=_TOP,
        formatter_class=_Format,
        allow_abbrev=False,
    )
    top.add_argument("-V", "--version", action="version", version=f"sbx {__version__}")
    top.set_defaults(handler=None, verb=None, command=[])
    add = top.add_subparsers(title="commands", metavar="COMMAND", dest="verb").add_parser

    run = _command(add, "run", "run:run", "run one command in a sandbox", _RUN)
    run.usage = "sbx run [options] -- CMD [ARG ...]"
    _positional_command(run, mark_path, "a program and its arguments")
    text = run.add_mutually_exclusive_group()
    text.add_argument("-c", "--shell", metavar="TEXT", help="run shell text instead of CMD")
    source = text.add_argument(
        "--python",
        metavar="SOURCE",
        help="run Python source, a Python file, or stdin if -; CMD are its arguments",
    )
    mark_path(source, "file")
    run.add_argument("-t", "--tty", action="store_true", help="give the command a terminal")
    run.add_argument(
        "--json", action="store_true", help="print the result as JSON when the command has ended"
    )
    _session_options(run, mark_path)

    shell = _command(add, "shell", "shell:shell", "open an interactive shell in a sandbox", _SHELL)
    shell.usage = "sbx shell [options] [-- CMD [ARG ...]]"
    _positional_command(shell, mark_path, "a program to run instead of the shell")
    _session_options(shell, mark_path)

    repl = _command(add, "repl", "repl:repl", "run cells in a live interpreter", _REPL)
    repl.add_argument(
        "--language",
        choices=LANGUAGES,
        default="python",
        help="language of the interpreter (default: python)",
    )
    mark_path(
        repl.add_argument(
            "--pictures", default=".", metavar="DIR", help="directory for pictures (default: .)"
        ),
        "directory",
    )
    _session_options(repl, mark_path)

    mcp = _command(add, "mcp", "mcp:mcp", "serve a sandbox to MCP clients", _MCP)
    mcp.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="serve streamable HTTP on this address instead of stdin and stdout",
    )
    mark_path(
        mcp.add_argument("--token-file", metavar="FILE", help="file with the token for --http"),
        "file",
    )
    mcp.add_argument(
        "--max-sandboxes",
        type=int,
        metavar="N",
        help="sandboxes that clients may open (default: 1; 8 with --http)",
    )
    _session_options(mcp, mark_path, has_cwd=False)
    mcp.set_defaults(persist=None)  # a machine, where the backend can keep one

    cp = _command(add, "cp", "copy:copy", "copy files into or out of a work dir", _CP)
    mark_path(
        cp.add_argument("source", metavar="SOURCE", help="a path; :PATH in the work dir"), "file"
    )
    mark_path(
        cp.add_argument("target", metavar="TARGET", help="a path; :PATH in the work dir"), "file"
    )
    mark_path(
        cp.add_argument("--work-dir", required=True, metavar="DIR", help="the work dir"),
        "directory",
    )
    cp.add_argument("--backend", choices=BACKENDS, help="as for sbx run")
    cp.add_argument("-q", "--quiet", action="store_true", help="show no progress")

    _checkpoint_commands(add, mark_path)

    doctor = _command(
        add, "doctor", "host_commands:doctor", "check which isolation works on this machine", ""
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")

    add("serve", help="start the server for remote sessions", add_help=False).set_defaults(
        handler="host_commands:serve"
    )

    version = _command(add, "version", "host_commands:version", "print the version", "")
    version.add_argument("--json", action="store_true", help="print it as JSON")

    completion = _command(
        add,
        "completion",
        "host_commands:completion",
        "print the completion script for a shell",
        _COMPLETION,
    )
    completion.add_argument("shell", choices=SHELLS)
    return top


def _command(
    add: Callable[..., argparse.ArgumentParser],
    name: str,
    handler: str,
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser = add(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=examples,
        formatter_class=_Format,
        allow_abbrev=False,
    )
    parser.set_defaults(handler=handler)
    return parser


def _checkpoint_commands(
    add: Callable[..., argparse.ArgumentParser], mark_path: PathMarker
) -> None:
    take = _command(
        add, "checkpoint", "checkpoints:checkpoint", "keep the state of a work dir", _CHECKPOINT
    )
    take.add_argument("name", nargs="?", default="", metavar="NAME", help="text that describes it")
    instead = take.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="list the checkpoints instead")
    instead.add_argument("--drop", metavar="CHECKPOINT", help="remove a checkpoint instead")
    back = _command(
        add, "rollback", "checkpoints:rollback", "return a work dir to a checkpoint", _ROLLBACK
    )
    compare = _command(
        add, "diff", "checkpoints:diff", "compare a work dir with a checkpoint", _DIFF
    )
    compare.add_argument("--text", action="store_true", help="show the changed lines of text files")
    fork = _command(add, "fork", "checkpoints:fork", "run a command in a fork", _FORK)
    fork.usage = "sbx fork [options] CHECKPOINT [-- CMD [ARG ...]]"
    fork.add_argument(
        "--adopt", action="store_true", help="keep the result in the session if CMD succeeds"
    )
    fork.add_argument("--timeout", type=float, metavar="S", help="end CMD after S seconds")
    for parser in (back, compare, fork):
        parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its id, or its name")
    for parser in (take, back, compare, fork):
        server = parser.add_argument_group("server")
        server.add_argument("--endpoint", required=True, metavar="URL", help="the server")
        server.add_argument("--id", required=True, metavar="ID", help="the id of the session")
        token = server.add_argument(
            "--token-file",
            metavar="FILE",
            help="file with the token (default: the variable SANDBOX_SERVER_TOKEN)",
        )
        mark_path(token, "file")
        server.add_argument(
            "--cert", metavar="FINGERPRINT|FILE", help="the certificate to accept, for https"
        )
        parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _positional_command(
    parser: argparse.ArgumentParser, mark_path: PathMarker, summary: str
) -> None:
    mark_path(parser.add_argument("command", nargs="*", metavar="CMD", help=summary), "file")


def _session_options(
    parser: argparse.ArgumentParser, mark_path: PathMarker, *, has_cwd: bool = True
) -> None:
    place = parser.add_argument_group("sandbox")
    place.add_argument(
        "--backend",
        choices=BACKENDS,
        help="isolation backend; no fallback to another (default: bubblewrap)",
    )
    work_dir = place.add_argument("--work-dir", metavar="DIR", help="existing directory to work in")
    mark_path(work_dir, "directory")
    if has_cwd:
        cwd = place.add_argument(
            "--cwd", metavar="DIR", help="start directory, relative to the work dir"
        )
        mark_path(cwd, "directory")
    place.add_argument(
        "--persist",
        choices=("workdir", "machine"),
        default="workdir",
        help="what stays between commands: the work dir, or also /tmp, /var/tmp and processes",
    )
    place.add_argument(
        "--strict", action="store_true", help="fail if an isolation layer is weaker than usual"
    )
    visible = parser.add_argument_group("visible inside")
    visible.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable; K alone passes the caller's value",
    )
    read_only = visible.add_argument(
        "--read-only", action="append", default=[], metavar="PATH", help="show PATH read-only"
    )
    mark_path(read_only, "file")
    read_write = visible.add_argument(
        "--read-write", action="append", default=[], metavar="PATH", help="show PATH writable"
    )
    mark_path(read_write, "file")
    network = parser.add_argument_group("network")
    network.add_argument("--network", choices=_MODES, help="network mode (default: blocked)")
    network.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="HOST",
        help="allow HOST only: a name, *.name, address or range, with an optional :port",
    )
    network.add_argument(
        "--allow-pypi", action="store_true", help="allow the hosts of the public Python index"
    )
    network.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME@HOST",
        help="let the command use the credential in your variable NAME for requests to HOST, "
        "without reading it; settings after it: ,header=NAME ,basic=USER ,query=NAME ,allow=RULE",
    )
    network.add_argument(
        "--deny",
        action="append",
        default=[],
        metavar="HOST",
        help="deny HOST; overrides --allow",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--timeout", type=float, metavar="S", help="end the command after S seconds"
    )
    limits.add_argument("--memory", metavar="SIZE", help="memory limit, such as 512Mi")
    limits.add_argument("--cpus", metavar="N", help="processor limit, such as 1.5")
