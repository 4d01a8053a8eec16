"""Connect this process's SDK to a plane, and restore it afterwards."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import flyte
import flyte._initialize
import pytest
from flyte._persistence._db import LocalDB
from tests.plane.plane import Plane

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT_DIR = Path(__file__).parent / "project"


@contextlib.contextmanager
def connected(plane: Plane, root_dir: Path = PROJECT_DIR) -> Iterator[Plane]:
    """Call `flyte.init` with a plane, in a new home, because the SDK keeps a cache there."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="plane-home-", dir="/var/tmp") as home,
    ):
        for name, value in {**plane.client_env(), "HOME": home}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "path", [str(root_dir), *sys.path])
        flyte.init(**plane.init_options(), root_dir=root_dir)
        try:
            yield plane
        finally:
            # There is no public way back to a process that was never initialised.
            flyte._initialize._init_config = None
            LocalDB.close_sync()


@contextlib.contextmanager
def standing_in(**options: object) -> Iterator[Plane]:
    """Start a plane, and connect this process to it."""
    with Plane(**options) as plane, connected(plane):  # type: ignore[arg-type]  # of the test
        yield plane
