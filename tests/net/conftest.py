from __future__ import annotations

import pytest
from tests.net.harness import EgressHarness


@pytest.fixture
async def open_egress():
    """Return a function that starts an egress; all are closed after the test."""
    made = []

    def make(policy_or_rules, **options):
        harness = EgressHarness(policy_or_rules, **options)
        made.append(harness)
        return harness

    yield make
    for harness in made:
        await harness.aclose()
