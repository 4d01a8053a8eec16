from __future__ import annotations

import pytest
from tests.net.harness import EgressHarness


@pytest.fixture
async def open_egress():
    """Make doors; all are closed at the end."""
    made = []

    def make(judge, **options):
        harness = EgressHarness(judge, **options)
        made.append(harness)
        return harness

    yield make
    for harness in made:
        await harness.aclose()
