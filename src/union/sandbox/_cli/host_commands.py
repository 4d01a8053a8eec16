"""The commands that open no sandbox of the caller's.

``sbx completion`` prints a script that was generated at development time: ``python -m
scripts.completion`` writes the scripts from the parser, and a test compares them.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from importlib import resources
from typing import TYPE_CHECKING

from union.sandbox._core.optional_deps import install_hint
from union.sandbox._version import __version__
from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    import argparse
    from importlib.resources.abc import Traversable

__all__ = ["completion", "completion_script", "doctor", "serve", "version"]


def doctor(options: argparse.Namespace) -> int:
    """Print the report of ``union.sandbox.doctor()``; return 0 if sandboxes work here, else 1."""
    from union import sandbox

    report = sandbox.doctor()
    text = json.dumps(report.to_dict(), ensure_ascii=False) if options.json else str(report)
    sys.stdout.write(f"{text}\n")
    return 0 if report.ok else 1


def serve(options: argparse.Namespace) -> int:
    """Run ``sandbox-server`` with all arguments that follow ``serve``."""
    try:
        server = importlib.import_module("union.sandbox.server")
    except ModuleNotFoundError as exc:
        raise SandboxError(
            f"the server needs the package {exc.name!r}, which is not installed",
            code="missing-extra",
            hint=install_hint("remote"),
        ) from exc
    sys.argv = ["sbx serve", *options.command]
    return int(server.main())


def version(options: argparse.Namespace) -> int:
    """Print the versions of ``sbx``, Python and the system."""
    found = {"sbx": __version__, "python": platform.python_version(), "system": platform.platform()}
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("".join(f"{name} {value}\n" for name, value in found.items()))
    return 0


def completion(options: argparse.Namespace) -> int:
    """Print the completion script of the shell that was named."""
    sys.stdout.write(completion_script(options.shell).read_text(encoding="utf-8"))
    return 0


def completion_script(shell: str) -> Traversable:
    """Return the file with the completion script of ``shell``."""
    return resources.files("union.sandbox._cli").joinpath("completions", f"sbx.{shell}")
