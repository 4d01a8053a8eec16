"""What stands behind a refused step, where the machine itself cannot be made to refuse it."""

from __future__ import annotations

import errno

import pytest

from union.sandbox._linux import kernel, remedies
from union.sandbox._linux.protocol import FailurePlace
from union.sandbox._plan import plan

pytestmark = pytest.mark.spec("G1")

SYSCTL = "kernel.apparmor_restrict_unprivileged_userns"
NAMESPACES = "AppArmor restricts user namespaces"
OF_BWRAP = "AppArmor restricts what bwrap may do"


@pytest.fixture(autouse=True)
def nothing_else_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_filtered", lambda: False)
    monkeypatch.setattr(kernel, "is_gvisor", lambda: False)
    monkeypatch.setattr(remedies, "_sysctl", lambda _: "")


@pytest.mark.parametrize(
    "op, error, what",
    [
        (FailurePlace.CLONE, errno.EPERM, NAMESPACES),
        (FailurePlace.IDS, errno.EPERM, NAMESPACES),
        (FailurePlace.PRIVATE, errno.EACCES, NAMESPACES),
        (plan.Wrap.op, 0, OF_BWRAP),
        (plan.Resize.op, errno.EPERM, OF_BWRAP),
        (plan.Attrs.op, errno.EACCES, OF_BWRAP),
    ],
)
def test_apparmor_is_named_with_its_setting(
    op: int, error: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert what not in remedies.cause(op, error).what, "the control"
    monkeypatch.setattr(remedies, "_sysctl", lambda name: "1" if name == SYSCTL else "")
    found = remedies.cause(op, error)
    assert found.what.startswith(what)
    assert f"sysctl -w {SYSCTL}=0" in found.hint


def test_userns_is_named_as_working_only_where_that_was_tried() -> None:
    assert "backend='userns' works here" in remedies.cause(plan.Wrap.op, 0).hint
    for op, error in ((plan.Wrap.op, errno.EACCES), (plan.Resize.op, errno.EPERM)):
        assert "works here" not in remedies.cause(op, error).hint


@pytest.mark.parametrize("op", [FailurePlace.CLONE, plan.Root.op, plan.Bind.op, plan.Lockdown.op])
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_gvisor_is_the_cause_of_what_its_kernel_lacks(
    op: int, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "gVisor" not in remedies.cause(op, error).what, "the control"
    monkeypatch.setattr(kernel, "is_gvisor", lambda: True)
    found = remedies.cause(op, error)
    assert "this release of it lacks" in found.what
    assert "release-20260622" in found.hint


@pytest.mark.parametrize(
    "error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE, errno.EIO]
)
def test_gvisor_is_not_the_cause_of_other_errors(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "is_gvisor", lambda: True)
    for op in (FailurePlace.CLONE, plan.Root.op, plan.Bind.op):
        assert "gVisor" not in remedies.cause(op, error).what


def test_a_profile_in_gvisor_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """runsc applies one only with --oci-seccomp."""
    monkeypatch.setattr(kernel, "is_gvisor", lambda: True)
    monkeypatch.setattr(kernel, "is_filtered", lambda: True)
    assert "seccomp profile" in remedies.cause(FailurePlace.CLONE, errno.EPERM).what


def test_bwrap_in_gvisor_names_the_backend_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_gvisor", lambda: True)
    assert "backend='userns'" in remedies.cause(plan.Wrap.op, 0).hint


def test_bwrap_s_own_words_are_part_of_the_message() -> None:
    error = remedies.unavailable(
        "bubblewrap", plan.Wrap.op, 0, strict=False, stderr_text="loopback: no"
    )
    assert str(error.args[0]).endswith("(bwrap reports: loopback: no)")
    error = remedies.unavailable(
        "bubblewrap", FailurePlace.CLONE, errno.EPERM, strict=False, stderr_text="no ns"
    )
    assert "(namespaces: Operation not permitted; bwrap reports: no ns)" in str(error.args[0])


def test_a_missing_call_is_named_by_who_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (plan.Seccomp.op, FailurePlace.PROCESS):
        assert "is too old" in remedies.cause(op, errno.ENOSYS).what
    monkeypatch.setattr(kernel, "is_filtered", lambda: True)
    for op in (plan.Seccomp.op, FailurePlace.PROCESS):
        assert "refuses a system call that sandboxes need" in remedies.cause(op, errno.ENOSYS).what
    assert "refuses mounts" in remedies.cause(plan.Bind.op, errno.ENOSYS).what


def test_a_namespace_that_does_not_exist_may_be_an_emulators() -> None:
    found = remedies.cause(FailurePlace.CLONE, errno.EINVAL)
    assert "qemu-user" in found.what
    assert "--platform" in found.hint
    assert "qemu-user" not in remedies.cause(FailurePlace.CLONE, errno.EPERM).what


@pytest.mark.parametrize(
    "error, what",
    [
        (errno.EBUSY, "only one listener"),
        (errno.EINVAL, "no seccomp notifications"),
        (errno.ENOSYS, "no seccomp notifications"),
        (errno.EFAULT, "could not be built"),
    ],
)
def test_why_there_is_no_mediator(error: int, what: str) -> None:
    assert what in remedies.cause(plan.Mediate.op, error).what
