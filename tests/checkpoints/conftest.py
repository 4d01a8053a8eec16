"""Fixtures of checkpoints: every backend, on this machine and over a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, REMOTE, REMOTE_WAYS, WAYS, session_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb


EVERYWHERE = os.environ.get("EVERYWHERE") == "1"
OVER_A_SERVER = REMOTE_WAYS if EVERYWHERE else (REMOTE + "userns",)
"""The wire is the same for every backend."""


@pytest.fixture(params=(*WAYS, *OVER_A_SERVER))
def place(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def kept(place: str) -> AsyncIterator[sb.Session]:
    """An open session with a few files."""
    async with session_of(place) as session:
        await session.exec(
            "mkdir -p src/deep; echo one > src/a.txt; echo two > b.txt; printf x > src/deep/run.sh;"
            "chmod 755 src/deep/run.sh; ln -s b.txt link; chmod 700 src",
            check=True,
        )
        yield session


@pytest.fixture(params=(*ISOLATED, *(OVER_A_SERVER if EVERYWHERE else ())))
async def layered(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """An open session whose work dir becomes layers."""
    async with session_of(request.param) as session:
        yield session
