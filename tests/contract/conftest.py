"""The contract holds over every backend on this machine, and over a server for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, REMOTE, REMOTE_WAYS, WAYS, marked, session_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb


@pytest.fixture(params=marked(*WAYS, *REMOTE_WAYS))
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[*ISOLATED, *(REMOTE + way for way in ISOLATED)])
async def jail(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """An open session of every way that isolates."""
    async with session_of(request.param) as session:
        yield session
