"""Compile the portable launcher for Linux, and make Pythons that take it for the system's own.

By hand: ``python -m tests.portable.engine tests/contract`` runs pytest so, with its arguments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hatch_build import MAC_SOURCES

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"
STAND_IN = Path(__file__).parent / "sandbox_exec.py"
SHIM = """\
#!{python} -I
import sys
sys.path.insert(0, {here!r})
import sandbox_exec
sandbox_exec.main(nested={nested!r}, without={without!r})
"""
FLAGS = ("-std=c11", "-O1", "-g", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:anyio")
"""anyio's plugin imports trio, whose event loop needs epoll on Linux."""


def build_launcher(directory: Path, *, sanitize: bool = False) -> Path:
    """Compile the launcher with the functions of Linux instead of those of macOS."""
    sources = [name for name in MAC_SOURCES if "os_macos" not in name]
    out = directory / "sandbox-launcher"
    flags = (*FLAGS, *(SANITIZERS if sanitize else ()))
    paths = [str(ROOT / "native" / name) for name in (*sources, "posix/os_linux.c")]
    subprocess.run(["cc", *flags, *paths, "-o", str(out)], check=True)
    return out


def stand_in(directory: Path, *, nested: bool = False, without: tuple[str, ...] = ()) -> Path:
    """Write a program that stands for sandbox-exec.

    Args:
        directory: where it is written.
        nested: it behaves as inside another sandbox of macOS.
        without: operations that this release of macOS does not know.

    """
    path = directory / "sandbox-exec"
    text = SHIM.format(
        python=sys.executable, here=str(STAND_IN.parent), nested=nested, without=without
    )
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass(frozen=True, slots=True)
class Engine:
    """The portable engine on this machine."""

    launcher: Path
    sandbox_exec: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Return variables with which a Python uses this engine, as on a Mac."""
        return {
            **os.environ,
            "PYTHONPATH": str(SITE),
            "SANDBOX_TEST_PORTABLE_LAUNCHER": str(self.launcher),
            "SANDBOX_TEST_SANDBOX_EXEC": str(self.sandbox_exec),
            **more,
        }

    def python(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a Python to its end; its result is not checked."""
        return subprocess.run(
            [sys.executable, *arguments],
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=self.environment(**more),
        )

    def pytest(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run tests of this project."""
        return self.python(*PYTEST, *arguments, **more)


def main() -> int:
    """Run pytest with the portable engine."""
    with tempfile.TemporaryDirectory(prefix="portable-launcher-") as directory:
        engine = Engine(build_launcher(Path(directory)), stand_in(Path(directory)))
        # -rx lists the exceptions with their causes.
        plugin = ("-rx", "-p", "tests.portable.differences")
        command = [sys.executable, *PYTEST, *plugin, *sys.argv[1:]]
        return subprocess.run(command, check=False, cwd=ROOT, env=engine.environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
