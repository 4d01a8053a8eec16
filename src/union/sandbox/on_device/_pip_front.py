"""pip, as a front for ``uv pip``.

This file is copied into the session venv as the module ``pip``, with a first line that starts it as
a program; ``bin/pip``, ``bin/pip3`` and ``bin/uv`` are links to it.

``pip install X``, ``python -m pip install X`` and ``uv pip install X`` do the same. An installed
pip takes its place, because a package has precedence over a module of the same name. Called as
``uv``, it calls uv, and explains a failed installation where the command has no network.
"""

import os
import re
import subprocess
import sys

UV = "/run/tools/uv"
"""Where a sandbox with a private root has it."""
NOTE = """\
note: this command has no network (network_mode='blocked'). To install from the package index:
network_mode='allowlist', network_allowlist=PYPI_HOSTS; on the command line: sbx run --allow-pypi
"""
_INSTALLS = re.compile(r"(?:^| )(?:pip (?:install|sync|compile)|add|sync|lock|tool|run)(?: |$)")
_LOCAL = re.compile(r"(?:^| )(?:--no-index|--offline|--help|-h)(?: |$)")
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
    if command == "list" and not options:
        return list_packages()
    if command == "show" and options and not any(word.startswith("-") for word in options):
        return show_packages(options)
    os.environ["VIRTUAL_ENV"] = sys.prefix
    return call_uv(["pip", command, *options])


def list_packages() -> int:
    """Print every package that can be imported; uv knows only those of the session's own venv."""
    from importlib import metadata

    found: dict[str, str] = {}
    for one in metadata.distributions():
        name = one.metadata["Name"]
        if name:
            found.setdefault(name, one.version)  # the first is the one that is imported
    rows = [("Package", "Version"), *sorted(found.items(), key=lambda row: row[0].lower())]
    width = max(len(name) for name, _ in rows)
    rows.insert(1, ("-" * width, "-" * max(len(version) for _, version in rows)))
    sys.stdout.write("".join(f"{name:{width}} {version}\n" for name, version in rows))
    return 0


def show_packages(names: list[str]) -> int:
    """Print what is known about packages that can be imported."""
    from importlib import metadata

    missing, shown = [], []
    for name in names:
        try:
            one = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        requires = {re.split(r"[^\w.-]", r)[0] for r in one.requires or () if "extra ==" not in r}
        shown.append(
            f"Name: {one.metadata['Name']}\nVersion: {one.version}\n"
            f"Summary: {one.metadata['Summary'] or ''}\nLocation: {one.locate_file('')}\n"
            f"Requires: {', '.join(sorted(requires))}\n"
        )
    sys.stdout.write("---\n".join(shown))
    if missing:
        sys.stderr.write(f"WARNING: Package(s) not found: {', '.join(missing)}\n")
    return 0 if shown else 1


def find_uv() -> str:
    """Return the path of uv itself: the first on PATH that is not this file."""
    own = os.path.realpath(__file__)
    for directory in os.environ.get("PATH", "").split(os.pathsep):
        path = os.path.join(directory, "uv")
        if os.access(path, os.X_OK) and os.path.realpath(path) != own:
            return path
    return UV


def call_uv(arguments: list[str]) -> int:
    """Run uv; after a failed installation without network, print how to allow it."""
    program, words = find_uv(), " ".join(arguments)
    explains = _INSTALLS.search(words) is not None and _LOCAL.search(words) is None
    if os.environ.get("SANDBOX_NETWORK") != "blocked" or not explains:
        os.execv(program, ["uv", *arguments])  # noqa: S606 - inside a sandbox
    code = subprocess.call([program, *arguments])  # noqa: S603 - inside a sandbox
    if code != 0:
        sys.stderr.write(NOTE)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    is_uv = os.path.basename(sys.argv[0]) == "uv"
    sys.exit((call_uv if is_uv else main)(sys.argv[1:]))
