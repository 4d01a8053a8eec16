"""Tests that cannot pass in gVisor, each with the fact about its kernel that is the cause.

A test is expected to fail only in gVisor and only where its fact holds: where a newer release has
what is missing, the test counts again.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux import kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}
_EXCHANGE = 2


def _status_lacks(field: str) -> bool:
    return f"\n{field}:" not in Path("/proc/self/status").read_text(encoding="ascii")


def no_exchange() -> bool:
    """Whether two names cannot be exchanged in one step, which programs that race need."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory() as place:
        for name in ("a", "b"):
            Path(place, name).touch()
        paths = [os.fsencode(f"{place}/{name}") for name in ("a", "b")]
        number = ctypes.c_long(_RENAMEAT2[kernel.machine()])
        done = libc.syscall(number, -100, paths[0], -100, paths[1], _EXCHANGE)
        return bool(done) and ctypes.get_errno() in {errno.EINVAL, errno.ENOSYS}


def no_bwrap() -> bool:
    program = shutil.which("bwrap")
    if program is None:
        return True
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode != 0


def no_nf_tables() -> bool:
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).close()
    except OSError:
        return True
    return False


FACTS: dict[str, tuple[str, Callable[[], bool]]] = {
    "nspid": (
        "/proc/PID/status has no NSpid, by which the helper finds a process inside",
        lambda: _status_lacks("NSpid"),
    ),
    "no-new-privs": (
        "/proc/PID/status has no NoNewPrivs",
        lambda: _status_lacks("NoNewPrivs"),
    ),
    "high-water mark": ("/proc/PID/status has no VmHWM", lambda: _status_lacks("VmHWM")),
    "exchange": ("renameat2 has no RENAME_EXCHANGE, which the attack needs", no_exchange),
    "bwrap": ("bwrap does not work", no_bwrap),
    "nf_tables": ("there is no nf_tables to take away; iptables redirects", no_nf_tables),
    "strict": (
        "strict=True is refused: /proc/net is not of the namespace",
        lambda: not kernel.features().own_proc_net,
    ),
    "proc-net": (
        "/proc/net counts and lists the whole container; a network is never reused",
        lambda: not os.path.exists("/proc/net/sockstat"),
    ),
    "cgroup namespace": (
        "there are no cgroup namespaces",
        lambda: not kernel.features().cgroup_namespaces,
    ),
    "epoll watches": (
        "the kernel limits neither epoll watches nor descriptors in flight, so none are guarded",
        lambda: not os.path.exists("/proc/sys/fs/epoll/max_user_watches"),
    ),
    "cgroups": (
        "no control group has an enforced memory limit",
        lambda: not kernel.features().own_process_count,
    ),
    "truncate": (
        "the filter refuses truncate and extended attributes, also where the control uses them",
        lambda: not kernel.features().read_only_metadata,
    ),
    "metadata": (
        "the owner of files on a read-only tmpfs, such as the private root, can change their mode",
        lambda: not kernel.features().read_only_metadata,
    ),
    "processes": (
        "processes are counted over all sessions of the id",
        lambda: not kernel.features().own_process_count,
    ),
    "watch": (
        "memory is sampled slowly, and pages shared since a fork count for each process",
        lambda: not os.path.exists("/proc/self/smaps_rollup"),
    ),
    "terminals": (
        "a devpts has no limit, and a terminal neither TIOCSTI nor signals for a job",
        lambda: not kernel.features().terminal_options,
    ),
    "files of /proc": (
        "the file of /proc that the test reads does not exist, or reads differently",
        lambda: not os.path.exists("/proc/sysvipc"),
    ),
    "id-mapped mounts": (
        "mount_setattr does not exist: root's sessions, which have their own id, lack the caller's",
        lambda: os.geteuid() == 0 and not kernel.features().mount_trees,
    ),
    "machines": (
        "persist='machine' is refused there; of these modules, tests without a machine pass",
        kernel.is_gvisor,
    ),
    "arguments": ("execve has no limit on the size of all arguments", kernel.is_gvisor),
    "errno": (
        "the call is refused with another error, or by a time-out",
        kernel.is_gvisor,
    ),
}


@functools.cache
def holds(fact: str) -> bool:
    return FACTS[fact][1]()


@dataclass(frozen=True, slots=True)
class _Tests:
    module: str
    names: str
    sometimes: bool = False
    """Depends on what is sampled, or on other sessions that are counted too: it may pass."""


_EXCEPTIONS: tuple[tuple[str, _Tests], ...] = (
    ("nspid", _Tests("posture/test_posture", "*")),
    ("nspid", _Tests("posture/test_waiting", "*")),
    ("nspid", _Tests("posture/test_filter_and_table", "*")),
    ("nspid", _Tests("escape/test_one_root", "test_all_modes_share_one_root")),
    ("strict", _Tests("posture/test_strict", "*")),
    ("strict", _Tests("escape/test_moved_root", "test_strict_refuses_a_moved_root")),
    ("strict", _Tests("escape/test_read_only_below_writable", "test_strict_refuses_a_file_whose")),
    ("no-new-privs", _Tests("escape/test_kernel_surface", "test_the_filter_holds_in_every_kind")),
    ("high-water mark", _Tests("escape/test_file_api", "test_a_sparse_file")),
    ("high-water mark", _Tests("escape/test_file_trees", "test_a_sparse_file")),
    ("exchange", _Tests("escape/test_call_paths", "test_an_exchanged_link")),
    ("exchange", _Tests("escape/test_file_api", "test_a_parent_exchanged")),
    ("exchange", _Tests("escape/test_file_trees", "test_a_download_from_under_a_swap")),
    ("exchange", _Tests("escape/test_file_trees", "test_an_upload_into_a_swap")),
    ("exchange", _Tests("escape/test_file_trees", "test_control_a_plain_copy")),
    ("exchange", _Tests("escape/test_inspected_links", "test_a_variable_cannot_be_raced")),
    ("exchange", _Tests("escape/test_inspected_links", "test_a_fingerprint_cannot_be_raced")),
    ("exchange", _Tests("escape/test_inspected_links", "test_held_names_cannot_be_raced")),
    ("bwrap", _Tests("escape/test_downgrade", "test_a_bwrap")),
    ("nf_tables", _Tests("network/test_proxies_alone", "*")),
    ("proc-net", _Tests("escape/test_networks_used_again", "test_of_what_was_done_nothing")),
    ("proc-net", _Tests("escape/test_networks_used_again", "test_what_the_kernel_still_has")),
    ("proc-net", _Tests("escape/test_networks_used_again", "test_a_file_of_proc_net_shows")),
    ("proc-net", _Tests("escape/test_networks_used_again", "test_its_owner_is_not_the")),
    ("proc-net", _Tests("escape/test_networks_used_again", "test_nothing_is_kept_for_a_session")),
    ("cgroup namespace", _Tests("escape/test_kernel_surface", "test_control_groups_are_out")),
    ("cgroup namespace", _Tests("contract/test_lifecycle", "test_the_session_reports_what")),
    ("truncate", _Tests("escape/test_filesystem", "test_metadata_verbs")),
    ("truncate", _Tests("escape/test_exhaustion", "test_one_file_cannot_exceed")),
    ("truncate", _Tests("escape/test_shown_read_only", "test_a_read_only_path_cannot_be_changed")),
    ("strict", _Tests("escape/test_ids_stay", "test_strict_refuses_roots_own_id")),
    ("files of /proc", _Tests("escape/test_ids_stay", "test_roots_own_id_reads_nothing_of_proc")),
    ("files of /proc", _Tests("escape/test_shared_root_id", "test_kernel_settings_stay_closed")),
    ("metadata", _Tests("escape/test_shared_root_id", "test_nodes_of_dev_keep_their_metadata")),
    ("metadata", _Tests("escape/test_one_root", "test_no_run_can_change_the_name_files")),
    ("metadata", _Tests("escape/test_one_root", "test_the_directory_above_the_work_dir")),
    ("processes", _Tests("escape/test_exhaustion", "test_the_process_limit_can_be_set", True)),
    ("processes", _Tests("escape/test_process_budgets", "test_one_session_leaves", True)),
    ("processes", _Tests("escape/test_process_budgets", "test_runs_of_a_session_share", True)),
    ("processes", _Tests("escape/test_process_budgets", "test_runs_with_different", True)),
    ("processes", _Tests("contract/test_timeouts_and_ends", "test_the_number_of_processes", True)),
    ("watch", _Tests("escape/test_memory_watch", "test_memory_that_processes_share")),
    (
        "watch",
        _Tests("escape/test_memory_watch", "test_the_watch_counts*shared with a child", True),
    ),
    ("watch", _Tests("contract/test_call_posture", "test_memory_of_one_call", True)),
    ("watch", _Tests("escape/test_exhaustion", "test_one_process_beyond_the_limit", True)),
    ("terminals", _Tests("escape/test_terminal", "test_outside_the_same_byte")),
    ("terminals", _Tests("escape/test_terminal", "test_a_command_cannot_use_up")),
    ("terminals", _Tests("contract/test_pty", "test_ctrl_c_interrupts")),
    ("terminals", _Tests("contract/test_pty", "test_ctrl_z_does_not_stop")),
    ("files of /proc", _Tests("escape/test_kernel_surface", "test_kernel_memory_symbols")),
    ("files of /proc", _Tests("escape/test_kernel_surface", "test_a_program_from_memory")),
    ("files of /proc", _Tests("escape/test_kernel_surface", "test_no_kernel_setting_opens")),
    ("files of /proc", _Tests("escape/test_processes", "test_ipc_objects_of_the_host")),
    ("files of /proc", _Tests("escape/test_processes", "test_the_first_process_of_the_sandbox")),
    ("files of /proc", _Tests("escape/test_venv_supply", "test_the_script_file_cannot_be")),
    ("errno", _Tests("escape/test_kernel_surface", "test_32_bit_calls")),
    ("errno", _Tests("escape/test_inherited", "test_no_advantage_of_the_caller", True)),
    ("errno", _Tests("escape/test_kernel_surface", "test_a_call_is_refused*34 kcmp")),
    ("errno", _Tests("escape/test_inherited", "test_no_lease_on_a_file")),
    ("errno", _Tests("escape/test_inherited", "test_limits_that_the_kernel_counts")),
    ("errno", _Tests("escape/test_network", "test_the_network_cannot_be_reconfigured")),
    (
        "errno",
        _Tests(
            "escape/test_shared_counters",
            "test_a_counter_used_up*descriptors in",
        ),
    ),
    (
        "errno",
        _Tests(
            "network/test_refused",
            "test_a_raw_connect*addresses",
        ),
    ),
    ("errno", _Tests("network/test_refused", "test_no_datagram_leaves")),
    ("errno", _Tests("network/test_refused", "test_no_raw_packet_or_ping")),
    ("errno", _Tests("network/test_names", "test_names_that_are_not_allowed")),
    ("id-mapped mounts", _Tests("contract/test_documents", "test_install_is_just_a_run")),
    ("id-mapped mounts", _Tests("contract/test_env_cwd", "test_a_path_of_the_call_can_be_its_cwd")),
    (
        "id-mapped mounts",
        _Tests("contract/test_call_posture", "test_a_path_is_visible_to_its_call_alone"),
    ),
    (
        "id-mapped mounts",
        _Tests("contract/test_call_posture", "test_a_writable_path_can_be_made_read_only"),
    ),
    (
        "id-mapped mounts",
        _Tests("contract/test_call_posture", "test_a_missing_path*read_write_paths"),
    ),
    ("machines", _Tests("contract/test_machine", "*", sometimes=True)),
    ("machines", _Tests("contract/test_machine_files", "*", sometimes=True)),
    ("machines", _Tests("escape/test_machine_commands", "*", sometimes=True)),
    ("machines", _Tests("escape/test_machine_lifetime", "*", sometimes=True)),
    ("machines", _Tests("escape/test_passed_sockets", "test_a_connection_ends*machine")),
    ("epoll watches", _Tests("escape/test_epoll_watches", "*")),
    ("epoll watches", _Tests("escape/test_in_flight", "test_a_command_that_holds_too_many")),
    ("epoll watches", _Tests("escape/test_in_flight", "test_without_the_guard")),
    ("epoll watches", _Tests("escape/test_in_flight", "test_sockets_that_no_table")),
    ("arguments", _Tests("contract/test_results_errors", "test_arguments_larger_than")),
    ("arguments", _Tests("contract/test_documents", "test_errors_versus_non_zero_exits")),
)


def exception(nodeid: str) -> pytest.MarkDecorator | None:
    """Return the mark of a test that fails here for a known cause; None for every other."""
    path, _, name = nodeid.partition("::")
    module = path.removeprefix("tests/").removesuffix(".py")
    for fact, tests in _EXCEPTIONS:
        if tests.module == module and fnmatchcase(name, f"{tests.names}*"):
            if not holds(fact):
                return None
            # Such programs only wait for their time limit there.
            return pytest.mark.xfail(
                reason=f"{fact}: {FACTS[fact][0]}",
                run=fact not in {"exchange", "epoll watches"},
                strict=not tests.sometimes,
            )
    return None


def table(counted: Mapping[str, Sequence[int]]) -> str:
    """Return the exceptions as a table for docs/reference/portability.md.

    `counted` has for each fact how many tests failed for it, as uid 1000 and as root.
    """
    lines = ["| fact | cause | uid 1000 | root | tests |", "|---|---|--:|--:|---|"]
    for fact, (cause, _) in FACTS.items():
        tests = [one for name, one in _EXCEPTIONS if name == fact]
        names = sorted({f"`{one.module}`: `{one.names}`" for one in tests})
        numbers = " | ".join(str(number) for number in counted[fact])
        lines += [f"| {fact} | {cause} | {numbers} | {'; '.join(names)} |"] if names else []
    return "\n".join(lines)


class Exceptions:
    """Marks the tests that fail here for a known cause."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (mark := exception(item.nodeid)) is not None:
                item.add_marker(mark)
