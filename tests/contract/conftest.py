"""The contract holds over every backend on this machine, and over a server for each of them.

``REPEATED`` and ``NOT_OVER_SYNC`` define which modules are repeated where, and tests/tiers.toml
which of these repetitions only ``make test-all`` runs. ``EVERYWHERE=1`` runs each combination,
``--only-way`` all of one way, and ``--sync-face`` all over the synchronous face.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.conftest import (
    BARE,
    CONTEXT_WAYS,
    EVERY_WAY,
    MACHINE_WAYS,
    REMOTE_MACHINE_WAYS,
    Face,
    leave_out,
    marked,
    named,
    session_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from union import sandbox as sb

EVERYTHING = os.environ.get("EVERYWHERE") == "1"
# bubblewrap, the default, and userns over a server have all modules. Everything below is a part of
# them, chosen by what the way changes.
_USED = frozenset({"test_basics", "test_opening"})
# userns makes the same root by other steps. Output, results, refused arguments and contexts are the
# work of the host and of the runner inside, which all backends on this machine share; the
# synchronous face, which runs with userns, repeats most of these.
_SET_UP = _USED | {
    "test_call_posture",
    "test_documents",
    "test_env_cwd",
    "test_files",
    "test_lifecycle",
    "test_network_rule",
    "test_pty",
    "test_run",
    "test_stdin",
    "test_timeouts_and_ends",
    "test_venv",
    "test_work_dir_name",
}
REPEATED = {
    "userns": _SET_UP,
    # Nothing is set up: a command begins and has its files. The portable engine, which has only
    # this backend here, runs the modules of ends, input and terminals (tests/portable).
    "none": _USED | {"test_files", "test_network_rule", "test_run"},
    # The wire is that of userns: it remains to show that the server uses the backend.
    "remote-bubblewrap": _USED | {"test_network_rule"},
    "remote-none": _USED,
    # No namespaces: other steps at the beginning, other ways to end a tree. tests/confined attacks.
    "landlock": _USED | {
        "test_files", "test_lifecycle", "test_run", "test_timeouts_and_ends", "test_venv",
    },
    "remote-landlock": _USED | {"test_network_rule"},
    # A command joins what is there. test_machine and test_machine_files have the rest.
    "machine-userns": frozenset({"test_basics", "test_run", "test_timeouts_and_ends"}),
    "machine-bubblewrap": frozenset({"test_basics"}),
    "remote-machine-userns": frozenset({"test_basics"}),
    "remote-machine-bubblewrap": frozenset[str](),
}  # fmt: skip
"""The modules of these ways; all modules of every other way. ``EVERYWHERE=1``: all of all ways."""
SYNC_WAY = "userns"
"""The only way that is repeated over the synchronous face, unless ``EVERYWHERE=1``."""
_INSIDE = "its tests look at the sandbox, which is the same; with EVERYWHERE=1 and --sync-face"
_OTHERS = "other drivers and files behind the methods that test_contexts calls"
NOT_OVER_SYNC = {
    "test_bad_input": _INSIDE,
    "test_call_posture": _INSIDE,
    "test_contexts_bash": _OTHERS,
    "test_contexts_hostile": _INSIDE,
    "test_contexts_node": _OTHERS,
    "test_contexts_saved": _OTHERS,
    "test_documents": "the documents' own programs, which await",
    "test_env_cwd": _INSIDE,
    "test_network_rule": _INSIDE,
    "test_pty": _INSIDE,
    "test_shell": _INSIDE,
    "test_timeouts_and_ends": _INSIDE,
    "test_venv": _INSIDE,
    "test_work_dir_name": _INSIDE,
}
"""Modules that are not repeated over the synchronous face by default, with the reason."""
NEVER_OVER_SYNC = frozenset({"test_documents"})
_LOOP = "opens the session in an event loop of the test"
_ENDS = "interrupting a synchronous wait ends the command; tests/sync has the test of that"
_EVENT = "its callback sets an asyncio.Event, which only works in the test's own loop"
_ORDER = "calls of several threads have no order"
ONLY_ASYNC = {
    "test_a_busy_context_can_refuse_to_wait_and_its_queue_is_bounded": _ORDER,
    "test_cells_run_one_after_another_in_order": _ORDER,
    "test_a_cancelled_copy_leaves_no_part_of_a_file": _EVENT,
    "test_a_reader_that_gives_up_inside_a_line_loses_nothing": _ENDS,
    "test_a_forged_end_belongs_to_its_own_cell_alone": "calls the transport in the test's loop",
    "test_a_helper_has_a_socket_and_is_not_listed": "calls the transport in the test's loop",
    "test_a_helper_that_was_killed_is_replaced": "acts on the helper in the test's loop",
    "test_a_helper_that_was_stopped_does_not_hang_a_call": "acts on the helper in the test's loop",
    "test_a_loop_that_does_not_run_is_named": _LOOP,
    "test_a_session_is_entered_once": "the message names `async with`",
    "test_a_session_stays_with_its_loop": _LOOP,
    "test_another_asynchronous_library": _LOOP,
    "test_attaching_by_id": "tests/sync has its own, with sync.on_device.attach()",
    "test_await_opens": "there is no `await`",
    "test_closing_the_session_ends_a_copy": _EVENT,
    "test_each_thread_and_loop_may_have_its_own": _LOOP,
    "test_lines_of_one_stream_and_then_the_other": "a long output; the bridge takes 0.2 ms a line",
    "test_no_loop_at_all": _LOOP,
    "test_one_loop_after_another": _LOOP,
    "test_stop_and_continue": _ENDS,
    "test_use_from_another_loop_or_thread": _LOOP,
    "test_waiting_with_a_limit_does_not_kill": _ENDS,
}
"""Tests that make no sense over the synchronous face, with the reason."""


_GO_ON = "processes that a command leaves behind go on in a machine: row R1 instead of C8"
_MEASURED = "the control group is the machine's, so the memory of one command is not measured"
_OF_ONE_CALL = "paths and limits of one call are refused; test_machine has the test of that"
_HELPER = "counts all processes, and a machine has a helper for files; see test_machine"
ONLY_WITHOUT_MACHINE = {
    "test_a_missing_path_is_an_error_before_anything_starts": _OF_ONE_CALL,
    "test_limits_of_one_call": _OF_ONE_CALL,
    "test_limits_that_are_not_named_stay_the_sessions": _OF_ONE_CALL,
    "test_memory_of_one_call": _OF_ONE_CALL,
    "test_cancelling_a_call_from_another_loop_kills_the_command": _HELPER,
    "test_a_daemon_ends_with_its_command": _GO_ON,
    "test_background_processes_end_with_their_command": _GO_ON,
    "test_memory_is_that_of_the_tree": _MEASURED,
    "test_out_of_memory_is_reported_as_such": _MEASURED,
}
"""Tests whose rows have another meaning with ``persist="machine"``, with the reason."""
FILES_OF_A_WORK_DIR = frozenset({"test_files", "test_files_entries", "test_files_trees"})
"""Modules of rows E1 and E2. A machine has R2 instead: ``test_machine_files``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sync-face",
        action="store_true",
        help="run all modules of the contract over the synchronous face, and nothing else",
    )


def _over_sync(path: Path, config: pytest.Config) -> bool:
    if path.stem in NEVER_OVER_SYNC:
        return False
    every = EVERYTHING or config.getoption("--sync-face", default=False)
    return every or path.stem not in NOT_OVER_SYNC


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat the tests over their ways and over the synchronous face.

    A repetition that only ``EVERYWHERE=1`` has is not even made: every worker collects all tests.
    """
    names, path = metafunc.fixturenames, metafunc.definition.path
    has_sync = "face" in names and _over_sync(path, metafunc.config)
    sync = pytest.mark.sync_face
    own = {
        name
        for mark in metafunc.definition.iter_markers("parametrize")
        for name in str(mark.args[0]).replace(" ", "").split(",")
    }
    if "way" not in names or "way" in own:
        if has_sync:
            faces = ("async", pytest.param("sync", marks=sync))
            metafunc.parametrize("face", faces, indirect=True)
        return
    ways = _ways_of(path, metafunc.config)
    if not has_sync:
        metafunc.parametrize("way", marked(*ways), indirect=True)
        return
    pairs = [
        pytest.param("async", way, marks=pytest.mark.bare if way in BARE else ()) for way in ways
    ]
    over_sync = set(EVERY_WAY if EVERYTHING else (SYNC_WAY,))
    if only := metafunc.config.getoption("--only-way"):
        over_sync &= {only}
    pairs += [
        pytest.param("sync", way, marks=(sync, pytest.mark.bare) if way in BARE else sync)
        for way in EVERY_WAY
        if way in over_sync
    ]
    metafunc.parametrize(("face", "way"), pairs, indirect=True)


def _ways_of(path: Path, config: pytest.Config) -> list[str]:
    """Return the ways of a module over the asynchronous face."""
    if only := config.getoption("--only-way"):
        return [only]
    if EVERYTHING:
        return list(EVERY_WAY)
    return [way for way in EVERY_WAY if path.stem in REPEATED.get(way, {path.stem})]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the synchronous face of all backends but one, and where a test has no use for it."""
    alone = config.getoption("--sync-face", default=False)
    every = EVERYTHING or config.getoption("--only-way") is not None
    leave_out(
        config,
        items,
        lambda item: _is_dropped(item, alone=alone) or (not every and _is_repetition(item)),
    )


def _is_repetition(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None) if item.path.parent.name == "contract" else None
    if call is None or call.params.get("face") == "sync":
        return False
    modules = REPEATED.get(call.params.get("way", ""))
    return modules is not None and item.path.stem not in modules


def _is_dropped(item: pytest.Item, *, alone: bool) -> bool:
    call = getattr(item, "callspec", None)
    params = {} if call is None else call.params
    if params.get("way") in (*MACHINE_WAYS, *REMOTE_MACHINE_WAYS) and (
        item.originalname in ONLY_WITHOUT_MACHINE  # type: ignore[attr-defined]
        or item.path.stem in FILES_OF_A_WORK_DIR
    ):
        return True
    if params.get("face") != "sync":
        return alone
    ways = named(item).intersection(EVERY_WAY)
    # A test that names no way opens a session of one, or none at all.
    is_other = bool(ways) and not EVERYTHING and ways != {SYNC_WAY}
    return is_other or item.function.__name__ in ONLY_ASYNC  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def face(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The face of the API under test: ``async`` or ``sync``."""
    chosen: str = getattr(request, "param", "async")
    if chosen == "sync":
        from tests.sync import bridge

        monkeypatch.setattr(Face, "current", bridge.API)
    return chosen


@pytest.fixture
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=CONTEXT_WAYS)
async def jail(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """An open session of every way that isolates."""
    async with session_of(request.param) as session:
        yield session


@pytest.fixture
async def ctx(jail: sb.Session) -> AsyncIterator[sb.Context]:
    """An open Python context of such a session."""
    async with jail.context() as context:
        yield context
