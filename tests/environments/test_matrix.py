"""In every kind of place a session works as reported, or the error has cause and remedy."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.environments import matrix

# The error text of places where no session opens; the other rows work.
REFUSED = {
    "pod-root-bare": "root without CAP_SETFCAP",
    "default-user": "seccomp profile refuses user namespaces",
    "default-root": "seccomp profile refuses user namespaces",
    "gvisor-old": "runs in gVisor",
    "gvisor-2024": "runs in gVisor",
}
REMEDY = {
    "pod-root-bare": "runAsUser",
    "default-user": "seccompProfile: Unconfined",
    "default-root": "seccompProfile: Unconfined",
    "gvisor-old": "release-20260622 or newer",
    "gvisor-2024": "release-20260622 or newer",
}
NO_WORK_DIR = "read-only"
NO_PIVOT = (
    "admin-default-user",
    "admin-default-root",
    "admin-alone-default",
    "own-ids-admin-root",
    "own-ids-admin-user",
)
GVISOR = ("gvisor-user", "gvisor-root")
TOO_OLD = ("gvisor-old", "gvisor-2024")
"""Releases of gVisor without `pidfd_open`, which even the launcher needs."""
FRESH_PROC = ("root", "user", "pod-unmasked", *GVISOR)
CGROUPS = ("root", "cgroup")
HIDDEN = "processes"
# Root with the capabilities that containers have by default.
OWN_ID = (
    "root",
    "pod-root",
    "default-root",
    "nested-root",
    "admin-root",
    "admin-default-root",
    "cgroup",
    "own-ids-root",
    "own-ids-admin-root",
)

EVERYTHING = os.environ.get("EVERYWHERE") == "1"
LIKE = {
    "default-root": "default-user",  # the profile refuses both in the same way
    "nested-root": "nested-user",  # the profile allows both the same
    "admin-user": "admin-root",  # an ordinary user does not have what is granted
    "admin-default-user": "admin-alone-default",  # the other capabilities are not used
    "own-ids-admin-user": "own-ids-admin-root",
    "gvisor-2024": "gvisor-old",  # both lack pidfd_open
}
"""Places in which the same calls are refused as in another one: ``EVERYWHERE=1`` has them too."""


def test_places_that_are_left_out_are_like_one_that_is_not() -> None:
    assert LIKE.keys() | set(LIKE.values()) <= matrix.ROWS.keys()
    assert not LIKE.keys() & set(LIKE.values())


@pytest.mark.spec("P4", "G1", "G5", "B9")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in matrix.ROWS if EVERYTHING or name not in LIKE])
def test_place(name: str) -> None:
    """One container for all checks, because creating one takes most of the time."""
    if (reason := matrix.lacking(name)) is not None:
        pytest.skip(reason)
    found = matrix.look(name)
    doctor = found["doctor"]
    backends = {backend["name"]: backend for backend in doctor["backends"]}
    layers = {layer["name"]: layer for layer in doctor["layers"]}
    _check_layers(name, layers)
    for backend, opened in found["opened"].items():
        if backend == "landlock":
            _check_landlock(name, backends[backend], opened)
        else:
            _check_backend(name, backends[backend], opened)
    assert backends["none"]["available"] == (name not in (*TOO_OLD, NO_WORK_DIR))
    assert not backends["sandbox-exec"]["available"]
    works = backends[doctor["default"]]["available"]
    assert doctor["ok"] == works
    assert found["text"].splitlines()[-1].startswith("OK: " if works else "NOT OK: ")
    assert matrix.line(name, found) in matrix.PAGE.read_text(encoding="utf-8"), (
        "the page is out of date: python -m tests.environments.matrix --write"
    )


def _check_layers(name: str, layers: dict[str, dict[str, Any]]) -> None:
    refused = name in REFUSED
    assert layers["user-namespaces"]["available"] == (not refused)
    assert layers["fresh-proc"]["available"] == (name in FRESH_PROC)
    assert layers["pivot-root"]["available"] == (not refused and name not in NO_PIVOT)
    assert layers["move-root"]["available"] == (not refused)
    assert layers["cgroups"]["available"] == (name in CGROUPS)
    assert layers["uv"]["available"]
    if refused:
        cause = layers["launcher" if name in TOO_OLD else "user-namespaces"]
        assert REFUSED[name] in cause["detail"]
        assert REMEDY[name] in cause["hint"]


def _check_backend(name: str, status: dict[str, Any], opened: dict[str, dict[str, Any]]) -> None:
    """Doctor and ``open()`` agree with each other and with the live sandbox."""
    plain = opened["plain"]
    assert status["available"] == ("stdout" in plain)
    if status["available"]:
        assert (
            plain["stdout"]
            == opened["limited"]["stdout"]
            == opened["pinned"]["stdout"]
            == "inside\n"
        )
        assert status["isolation"] == plain["isolation"]
        _check_report(name, status, opened)
        return
    assert (status["reason"], status["hint"]) == (plain["message"], plain["hint"])
    assert plain["hint"]
    if name in REFUSED:
        assert plain["code"] == "backend-unavailable"
        assert REFUSED[name] in plain["message"]
        assert REMEDY[name] in plain["hint"]
    elif name == NO_WORK_DIR:
        assert plain["code"] == "usage"
        assert "no work dir could be created" in plain["message"]
        assert opened["pinned"]["stdout"] == "inside\n"
    elif name in GVISOR:
        assert status["name"] == "bubblewrap"
        assert "gVisor, where bwrap does not work" in plain["message"]
        assert "backend='userns'" in plain["hint"]
    else:
        assert name in NO_PIVOT
        assert status["name"] != "userns"
        assert "refuses pivot_root" in plain["message"]
        assert "backend='userns'" in plain["hint"]


def _check_landlock(name: str, status: dict[str, Any], opened: dict[str, dict[str, Any]]) -> None:
    """It needs no namespace, so it opens where the others are refused, and reports less."""
    plain = opened["plain"]
    assert status["available"] == ("stdout" in plain)
    if not status["available"]:
        assert (status["reason"], status["hint"]) == (plain["message"], plain["hint"])
        if name.startswith("gvisor"):
            assert plain["code"] == "backend-unavailable"
        else:
            assert name == NO_WORK_DIR
            assert "no work dir could be created" in plain["message"]
        return
    assert (
        plain["stdout"] == opened["limited"]["stdout"] == opened["pinned"]["stdout"] == "inside\n"
    )
    report = status["isolation"]
    assert report == plain["isolation"]
    assert (report["root"], report["proc"], report["egress"]) == ("host", "hidden", "mediated")
    assert report["ids"] == ("unprivileged" if name in OWN_ID else "caller")
    assert {attack["outcome"] for attack in status["attacks"]} == {"held"}
    assert opened["pinned"]["isolation"]["ids"] == "caller"
    strict = opened["strict"]
    if report["ids"] == "unprivileged":
        assert strict["stdout"] == "inside\n"
    else:
        assert "cannot give sandboxed code an id of its own" in strict["message"]
        assert "drop strict=True" in strict["hint"]


def _check_report(name: str, status: dict[str, Any], opened: dict[str, dict[str, Any]]) -> None:
    report = status["isolation"]
    assert report["proc"] == ("fresh" if name in FRESH_PROC else "inherited")
    outcomes = {attack["name"]: attack["outcome"] for attack in status["attacks"]}
    seen = outcomes.pop(HIDDEN)
    assert seen == ("held" if report["proc"] == "fresh" else "weaker")
    assert set(outcomes.values()) == {"held"}
    limited = opened["limited"]["isolation"]["limits"]["memory"]
    assert limited.startswith("cgroup") == (name in CGROUPS)
    strict = opened["strict"]
    assert report["securebits"] == (name not in GVISOR)
    assert report["proc_net"] == ("shared" if name in GVISOR else "own")
    assert report["read_only"] == ("contents" if name == "gvisor-user" else "full")
    assert (report["limits"]["processes"] == "rlimit-shared") == (name == "gvisor-user")
    if name in GVISOR:
        assert "/proc/net shows the sockets of the whole container" in strict["message"]
        assert "drop strict=True" in strict["hint"]
        return
    if report["proc"] == "fresh" and report["root"] == "pivot":
        assert strict["stdout"] == "inside\n"
    else:
        weaker = "refuses pivot_root" if report["root"] == "move" else "masks /proc"
        assert weaker in strict["message"]
        assert "drop strict=True" in strict["hint"]


@pytest.mark.parametrize("name", NO_PIVOT)
def test_userns_is_where_a_moved_root_is_needed(name: str) -> None:
    """The page lists it, and the test above compares the page with the results."""
    page = matrix.PAGE.read_text(encoding="utf-8")
    row = next(
        line for line in page.splitlines() if line.startswith(f"| {matrix.ROWS[name].title} |")
    )
    assert "works: root move" in row.split("|")[2 + matrix.BACKENDS.index("userns")]
