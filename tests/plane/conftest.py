"""One plane for the tests of a file; its tasks are deployed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flyte
import pytest
from tests.plane.client import standing_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.plane.plane import Plane

SECRETS = {"team/api-key": "of the team"}


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with standing_in(secrets=SECRETS, grace_s=1) as plane:
        import plane_tasks

        flyte.deploy(plane_tasks.env)
        yield plane
    assert not plane.processes()
    assert not plane.place.exists()


@pytest.fixture(autouse=True)
def no_faults_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reset the faults after each test."""
    yield
    if "plane" in request.fixturenames:
        faults = request.getfixturevalue("plane").faults
        faults.no_pod, faults.logs_down = None, False
        faults.start_delay_s = faults.pod_delay_s = faults.log_lag_s = 0.0
