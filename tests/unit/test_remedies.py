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


def test_bwrap_s_own_words_are_part_of_the_message() -> None:
    error = remedies.unavailable(
        "bubblewrap", plan.Wrap.op, 0, strict=False, stderr_text="loopback: no"
    )
    assert str(error.args[0]).endswith("(bwrap reports: loopback: no)")
    error = remedies.unavailable(
        "bubblewrap", FailurePlace.CLONE, errno.EPERM, strict=False, stderr_text="no ns"
    )
    assert "(namespaces: Operation not permitted; bwrap reports: no ns)" in str(error.args[0])
