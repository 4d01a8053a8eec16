"""What stands behind a refused step, where the machine itself cannot be made to refuse it."""

from __future__ import annotations

import errno

import pytest

from union.sandbox._linux import causes, kernel

pytestmark = pytest.mark.spec("G1")

SYSCTL = "kernel.apparmor_restrict_unprivileged_userns"
NAMESPACES = "AppArmor restricts user namespaces"
OF_BWRAP = "AppArmor restricts what bwrap may do"


@pytest.fixture(autouse=True)
def nothing_else_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_filtered", lambda: False)
    monkeypatch.setattr(kernel, "is_gvisor", lambda: False)
    monkeypatch.setattr(causes, "_sysctl", lambda _: "")


@pytest.mark.parametrize(
    "op, error, what",
    [
        (causes.CLONE, errno.EPERM, NAMESPACES),
        (causes.IDS, errno.EPERM, NAMESPACES),
        (causes.PRIVATE, errno.EACCES, NAMESPACES),
        (causes.WRAP, 0, OF_BWRAP),
        (causes.RESIZE, errno.EPERM, OF_BWRAP),
        (causes.ATTRS, errno.EACCES, OF_BWRAP),
    ],
)
def test_apparmor_is_named_with_its_setting(
    op: int, error: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert what not in causes.cause(op, error).what, "the control"
    monkeypatch.setattr(causes, "_sysctl", lambda name: "1" if name == SYSCTL else "")
    found = causes.cause(op, error)
    assert found.what.startswith(what)
    assert f"sysctl -w {SYSCTL}=0" in found.hint


def test_userns_is_named_as_working_only_where_that_was_tried() -> None:
    assert "backend='userns' works here" in causes.cause(causes.WRAP, 0).hint
    for op, error in ((causes.WRAP, errno.EACCES), (causes.RESIZE, errno.EPERM)):
        assert "works here" not in causes.cause(op, error).hint


def test_bwrap_s_own_words_are_part_of_the_message() -> None:
    error = causes.unavailable("bubblewrap", causes.WRAP, 0, strict=False, said="loopback: no")
    assert str(error.args[0]).endswith("(bwrap says: loopback: no)")
    error = causes.unavailable("bubblewrap", causes.CLONE, errno.EPERM, strict=False, said="no ns")
    assert "(namespaces: Operation not permitted; bwrap says: no ns)" in str(error.args[0])
