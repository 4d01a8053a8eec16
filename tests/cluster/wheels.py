"""Wheels that other processes make of the package that they import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

PROGRAM = """\
import json, sys
from pathlib import Path
from union.sandbox.cluster._wheel import find_source, write_wheel
wheel = write_wheel(find_source(), Path(sys.argv[1]))
print(json.dumps([wheel.source.kind, str(wheel.source.root), str(wheel.path)]))
"""


def made_by_a_caller(place: Path, *, path: Path) -> tuple[str, str, Path]:
    """Make the wheel in a process that imports the package from ``path``."""
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(place)],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    kind, root, wheel = json.loads(done.stdout)
    return kind, root, Path(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def code_of(wheel: Path) -> dict[str, bytes]:
    return {
        name: data for name, data in contents(wheel).items() if name.startswith("union/sandbox/")
    }
