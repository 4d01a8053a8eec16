"""Tests of the contract that sessions of the portable engine do not pass, each with the reason.

Read by ``engine.py``, as a plugin of pytest, and by ``scripts/check_mac.py``.
"""

from __future__ import annotations

import os

import pytest

_USERNS = "names `userns`, a backend of Linux"
_MACHINE = "opens a machine, which needs the namespaces of Linux"
NONE = {
    **{
        f"test_machine.py::{name}": _MACHINE
        for name in (
            "test_a_helper_has_a_socket_and_is_not_listed",
            "test_cancelling_while_a_sandbox_is_made_leaves_nothing",
            "test_close_ends_everything",
            "test_commands_leak_no_descriptor",
            "test_scratch_is_limited_over_the_whole_session",
            "test_the_work_dir_stays_in_its_place",
        )
    },
    "test_machine_files.py::test_other_sessions_refuse_the_calls_of_a_machine": _MACHINE,
    "test_opening.py::test_another_asynchronous_library": "trio needs epoll on Linux",
    "test_work_dir_name.py::test_a_name_over_something_visible_is_refused": _USERNS,
    **{
        f"test_documents.py::{name}": _USERNS
        for name in (
            "test_a_failing_command_is_signal_not_an_error",
            "test_errors_versus_non_zero_exits",
            "test_install_is_just_a_run",
            "test_managing_the_lifetime_yourself",
            "test_one_shot_commands",
            "test_quickstart",
            "test_reading_output",
            "test_script_versus_shell",
            "test_the_more_involved_example",
            "test_the_run_example_with_every_argument",
            "test_the_shape_of_an_agent_loop",
        )
    },
}
"""Of every backend of the portable engine; trio's only where the engine runs on Linux. Each must
fail: one that passes is an error."""

_NO_MOUNTS = "a backend without mounts shows no other name: skipped for `none` everywhere"
LEFT_OUT = {
    "test_machine.py::test_other_backends_refuse[async-sandbox-exec]": "names another backend",
    "test_machine.py::test_other_backends_refuse[sync-sandbox-exec]": "names another backend",
    "test_work_dir_name.py::test_a_pinned_work_dir_gets_the_name_too": _NO_MOUNTS,
    "test_work_dir_name.py::test_a_renamed_private_work_dir_is_removed": _NO_MOUNTS,
}
"""Of the whole suite, neither passed nor failed for ``none`` here."""

_TMP = "TMPDIR is a directory of the run; /tmp is refused, and has no limit of its own"
_NOT_LISTED = "a directory above a visible path can be entered, but not listed"
_NO_TRANSPARENT = "an allow-list serves programs that use proxies; there is no private network"
_REPORT = "the report of a Linux sandbox: namespaces, private root, system paths of Linux"
_READ_ONLY = "a read-only path inside a writable one is refused"
_LINUX_FILES = "reads files of /proc, or system paths of Linux"
_WATCHED = "processes are counted every 30 ms: a run above the limit is killed, not refused a fork"
_REMOVED = "the directory of a run is removed in a thread, which still holds a descriptor"
_REFUSED = "a refused path is a permission error, not a missing path or a read-only file system"
_SLOW = "the stand-in is a Python program, which takes time to start"
_STAND_IN = "Landlock, which stands for the profile on Linux, does not restrict this; Seatbelt does"

SANDBOX_EXEC = {
    "test_env_cwd.py::test_the_environment_is_small_and_clean": _TMP,
    "test_lifecycle.py::test_only_the_work_dir_persists": _TMP,
    "test_lifecycle.py::test_scratch_is_capped_and_the_rest_read_only": _TMP,
    "test_call_posture.py::test_scratch_space_of_one_call": _TMP,
    "test_env_cwd.py::test_a_companys_certificate_is_carried_in": _NOT_LISTED,
    "test_files.py::test_added_paths": _NOT_LISTED,
    "test_env_cwd.py::test_a_host_directory_is_not_visible": _NOT_LISTED,
    "test_network_rule.py::test_without_a_mode_a_call_may_ask_for_any": _NO_TRANSPARENT,
    "test_network_rule.py::test_a_mode_is_the_default_and_the_ceiling": _NO_TRANSPARENT,
    "test_call_posture.py::test_a_path_is_visible_to_its_call_alone": _REFUSED,
    "test_call_posture.py::test_every_call_takes_them": _REFUSED,
    "test_env_cwd.py::test_a_path_of_the_call_can_be_its_cwd": _STAND_IN,
    "test_results_errors.py::test_runtime_is_wall_clock": _SLOW,
    "test_files.py::test_the_report_of_paths": _REPORT,
    "test_lifecycle.py::test_the_session_reports_what_it_enforces": _REPORT,
    "test_call_posture.py::test_a_writable_path_can_be_made_read_only": _READ_ONLY,
    "test_call_posture.py::test_part_of_the_work_dir_can_be_made_read_only": _READ_ONLY,
    "test_files.py::test_paths_visible_by_default": _LINUX_FILES,
    "test_run.py::test_the_call_replaces_the_sessions_network": _LINUX_FILES,
    "test_timeouts_and_ends.py::test_the_number_of_processes_is_limited": _WATCHED,
    "test_files.py::test_a_host_socket_is_out_of_reach": _STAND_IN,
    "test_lifecycle.py::test_no_session_sees_another": _STAND_IN,
    "test_lifecycle.py::test_no_session_shares_ipc_objects": _STAND_IN,
    "test_pty.py::test_no_descriptor_is_left": _REMOVED,
}

DOCUMENTS = "tests/contract/test_documents.py"
"""The documents name ``userns``, a backend of Linux."""


def expected(nodeid: str) -> str | None:
    """Return why a test of ``none`` fails with the portable engine; None for every other."""
    return NONE.get(_named(nodeid))


def left_out(nodeid: str) -> str | None:
    """Return why a test of the suite is none of ``none``; None for every other."""
    return LEFT_OUT.get(_named(nodeid)) or LEFT_OUT.get(os.path.basename(nodeid))


def _named(nodeid: str) -> str:
    file, _, name = nodeid.partition("::")
    return f"{os.path.basename(file)}::{name.partition('[')[0]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As a plugin: expect the failures above, and only those."""
    for item in items:
        if (reason := expected(item.nodeid)) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
