"""Programs of the system that backends use."""

from __future__ import annotations

import subprocess

__all__ = ["version_of"]

_PATIENCE_S = 10.0


def version_of(program: str) -> str:
    """What a program answers to ``--version``; OSError or SubprocessError when it does not."""
    done = subprocess.run(
        [program, "--version"],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    return done.stdout.strip().partition("\n")[0]
