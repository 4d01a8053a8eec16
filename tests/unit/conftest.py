"""Unit tests start no sandbox, so they need no look at the machine after each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import sandbox_processes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """In place of the look after each test; see ``nothing_left_behind_by_a_module``."""


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind_by_a_module() -> Iterator[None]:
    """No test of a module may have started a sandbox after all."""
    yield
    assert not sandbox_processes(), "a test that opens sessions belongs to another directory"
