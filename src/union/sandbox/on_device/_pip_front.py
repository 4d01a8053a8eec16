"""pip, as a front for ``uv pip``; this file is copied into the session venv as the module ``pip``.

``pip install X``, ``python -m pip install X`` and ``uv pip install X`` do the same. An installed
pip takes its place, because a package has precedence over a module of the same name.
"""

import os
import sys

COMMANDS = ("install", "uninstall", "list", "show", "freeze", "check")
# Options that uv does not have and that change nothing here; True: with a value.
WITHOUT_EFFECT = {
    "--disable-pip-version-check": False,
    "--no-input": False,
    "--no-python-version-warning": False,
    "--no-warn-script-location": False,
    "--progress-bar": True,
    "--root-user-action": True,
    "--user": False,  # the venv belongs to the session
    "--yes": False,  # uv does not ask
    "-y": False,
}
USAGE = """\
usage: pip COMMAND [options]

pip is a front for `uv pip` here. Commands: {commands}.
`pip COMMAND --help` lists the options of a command.
"""


def translated(arguments: list[str]) -> list[str]:
    """Return the arguments of ``uv pip``: the command first, without options that it lacks."""
    command, options = "", []
    words = iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in WITHOUT_EFFECT:
            if WITHOUT_EFFECT[name] and not equals:
                next(words, None)
        elif not command and not word.startswith("-"):
            command = word
        else:
            options.append(word)
    return [command, *options]


def main(arguments: list[str]) -> int:
    """Replace this process by ``uv pip``, or print why it cannot do what was requested."""
    command, *options = translated(arguments)
    if not command and options and options[0] in {"--version", "-V"}:
        place = os.path.dirname(os.path.abspath(__file__))
        version = sys.version.split()[0]
        sys.stdout.write(f"pip, a front for uv pip, from {place} (python {version})\n")
        return 0
    if command not in COMMANDS:
        asked = command in {"", "help"}
        if not asked:
            sys.stderr.write(f"pip: unknown command {command!r}\n")
        (sys.stdout if asked else sys.stderr).write(USAGE.format(commands=", ".join(COMMANDS)))
        return 0 if asked else 2
    program = os.path.join(sys.prefix, "bin", "uv")
    os.environ["VIRTUAL_ENV"] = sys.prefix
    return os.execv(program, ["uv", "pip", command, *options])  # noqa: S606 - inside a sandbox


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
