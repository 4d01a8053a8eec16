"""The portable launcher, compiled for Linux, and Pythons that use it."""

from __future__ import annotations

import pytest
from tests.portable.engine import Engine, build_launcher, stand_in


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Environment variables that make a Python use the portable engine."""
    directory = tmp_path_factory.mktemp("portable")
    return Engine(build_launcher(directory), stand_in(directory))
