"""Run ``sbx`` as a separate process, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

PROGRAM = "import sys; from union.sandbox._cli.main import main; sys.exit(main())"
SBX = (sys.executable, "-I", "-c", PROGRAM)
LIMIT_S = 40.0


def sbx(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``sbx`` to its end."""
    options.setdefault("stdin", None if "input" in options else subprocess.DEVNULL)
    return subprocess.run(
        [*SBX, *words], check=False, capture_output=True, text=True, timeout=LIMIT_S, **options
    )


def begin(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``sbx``; the caller ends it."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*SBX, *words], text=True, **{**pipes, **options})


def on_path(directory: str) -> dict[str, str]:
    """Return an environment whose PATH has the ``sbx`` of this tree."""
    script = os.path.join(directory, "sbx")
    with open(script, "w", encoding="utf-8") as file:
        file.write(f"#!{sys.executable} -I\n{PROGRAM}\n")
    os.chmod(script, 0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}
