from __future__ import annotations

import pytest
from tests.net.harness import Doors


@pytest.fixture
async def open_doors():
    """Make doors; all are closed at the end."""
    made = []

    def make(judge, **options):
        doors = Doors(judge, **options)
        made.append(doors)
        return doors

    yield make
    for doors in made:
        await doors.aclose()
