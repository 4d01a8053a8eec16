"""One plane for the tests of a file; its tasks are deployed once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import flyte
import pytest
from tests.conftest import leave_out
from tests.plane.client import standing_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.plane.plane import Plane

EVERY_TIME = frozenset(
    {
        "test_a_run_by_reference_has_phases_a_pod_a_log_and_outputs",
        "test_a_pod_does_not_inherit_this_environment",
        "test_stopping_leaves_nothing_behind",
    }
)
"""Of the tests of the stand-in itself, these are run every time: tests/cluster uses what the others
are about, and each starts the SDK several times. ``EVERYWHERE=1`` runs all of them."""
SECRETS = {"team/api-key": "of the team"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what tests the stand-in alone."""
    if os.environ.get("EVERYWHERE") == "1" or any("::" in word for word in config.args):
        return

    def is_about_the_stand_in(item: pytest.Item) -> bool:
        name = item.name.partition("[")[0]
        return item.path.name == "test_plane.py" and name not in EVERY_TIME

    leave_out(config, items, is_about_the_stand_in)


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
