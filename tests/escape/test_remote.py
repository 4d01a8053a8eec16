"""The same attacks, over a server: its sandboxes are as closed as those of a local session.

Every attack that needs no more than a session is taken from its own file; those whose plants or
controls are parts of the owning process stay there. A server builds its sandboxes with the engine
that the attacks of those files are repeated over, for each backend. What the server adds is the
same for all of them, so ``make test`` repeats the attacks over one; ``EVERYWHERE=1``: over each.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, REMOTE, OpenSession, session_of
from tests.escape import (
    test_environment,
    test_exhaustion,
    test_file_api,
    test_file_trees,
    test_filesystem,
    test_kernel_surface,
    test_network,
    test_processes,
    test_shown_read_only,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.spec("I1", "G2")

EVERYTHING = os.environ.get("EVERYWHERE") == "1"
_FROM = (
    test_environment,
    test_file_api,
    test_file_trees,
    test_filesystem,
    test_network,
    test_processes,
    test_shown_read_only,
    # The kernel holds these, in a sandbox that the engine has built: a server adds nothing.
    *((test_exhaustion, test_kernel_surface) if EVERYTHING else ()),
)
_STAY = {
    # Long, and about nothing that a server changes.
    "test_everyday_python_works",
    "test_a_classic_fork_bomb_ends_with_its_time",
    "test_a_tree_with_too_many_entries_is_refused",
    "test_private_files_of_etc_are_not_there",
    # The filter is the same program, and every call of a table is tried.
    "test_a_call_is_refused",
    # They look at this process, or change the work dir from it.
    "test_the_launcher_carries_no_environment",
    "test_control_a_plain_copy_is_fooled_by_the_swap",
    "test_a_file_that_changes_between_counting_and_copying",
    "test_a_tree_that_is_too_deep_is_refused",
    # Their control is a call with more network than its session, which a server does not grant.
    "test_a_listener_on_the_hosts_loopback_is_unreachable",
    "test_a_datagram_does_not_reach_the_host",
    "test_path_sockets_of_the_host_are_unreachable",
}


SERVED = ISOLATED if EVERYTHING else ISOLATED[-1:]


@pytest.fixture(params=[REMOTE + way for way in SERVED])
def cell(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def jailed(cell: str) -> OpenSession:
    return lambda **options: session_of(cell, **options)


@pytest.fixture
async def jail(cell: str) -> AsyncIterator[object]:
    async with session_of(cell) as session:
        yield session


def _attacks() -> dict[str, object]:
    """Tests that ask for a session, and for nothing that starts an owner of its own."""
    found: dict[str, object] = {}
    for module in _FROM:
        for name, test in vars(module).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                asked = set(inspect.signature(test).parameters)
                if asked & {"jail", "jailed"} and "cell" not in asked and name not in _STAY:
                    found[name] = test
    return found


# Under their own names in this module, where its fixtures are the nearest.
globals().update(_attacks())


def test_there_are_many() -> None:
    assert len(_attacks()) > 40
