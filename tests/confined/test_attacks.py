"""Attacks on ``landlock`` sessions, in containers with the engines' default seccomp profile."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.confined import rows
from tests.environments import matrix, pod
from tests.environments.places import open_pod
from tests.environments.suite import user_venv
from tests.escape.catalogue import ROWS

HERE = Path(__file__).parent
SHAPES = {
    "user": pod.Pod(uid=1000, default_profile=True),
    "root": pod.Pod(uid=0, capabilities=pod.DEFAULT_CAPABILITIES, default_profile=True),
}
NETWORKS = ("blocked", "allowlist", "open")
NOT_KEPT = {"stat"}
"""Promises of the other backends that this one does not make; see SECURITY.md."""
OF_THE_OPEN_NETWORK = {
    "tcp to loopback", "tcp to ::1", "tcp to 0.0.0.0", "tcp to a mapped address", "tcp fast open",
    "tcp fast open by sendmsg", "udp", "netlink", "listen without bind", "bind and listen",
}  # fmt: skip
OF_THE_FILE_SYSTEM = {"flags of a readable file", "set an attribute"}
"""Not every file system supports these, so they may fail without a sandbox too."""


@cache
def attacked(shape: str, cases: tuple[str, ...], abi: int | None = None) -> dict[str, Any]:
    if (reason := matrix.lacking("default-user")) is not None:
        pytest.skip(reason)
    venv = user_venv()
    options = {"cases": cases} | ({} if abi is None else {"abi": abi})
    driver = (HERE / "driver.py").read_text(encoding="utf-8")
    head, future, rest = driver.partition("from __future__ import annotations\n")
    inside = {
        name: (HERE / name).read_text(encoding="utf-8") for name in ("inside.py", "inside_base.py")
    }
    program = f"{head}{future}INSIDE = {inside!r}\nOPTIONS = {options!r}\n{rest}"
    env = {"PATH": f"{venv / 'bin'}:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(venv)}
    with open_pod("default-user", SHAPES[shape], readable=[venv]) as place:
        done = place.run([str(venv / "bin" / "python"), "-c", program], env=env, timeout_s=200)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def outcomes(found: dict[str, Any], outcome: str) -> dict[str, str]:
    return {name: detail for name, got, detail in found["rows"] if got == outcome}


CASES = tuple(f"landlock/{network}" for network in NETWORKS)


@pytest.mark.spec("P2", "B9")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attacks_are_held(shape: str, network: str) -> None:
    found = attacked(shape, CASES)[f"landlock/{network}"]
    assert found["exit_code"] == 0, found["stderr"]
    assert found["isolation"]["ids"] == ("caller" if shape == "user" else "unprivileged")
    expected = NOT_KEPT | (OF_THE_OPEN_NETWORK if network == "open" else set())
    beyond = set(outcomes(found, "OPEN")) - expected
    assert not beyond, {name: outcomes(found, "OPEN")[name] for name in beyond}
    assert outcomes(found, "OPEN").keys() >= NOT_KEPT, "the page says that this is not kept"
    assert len(outcomes(found, "held")) > 80
    assert not outcomes(found, "BROKEN")
    assert found["bait_alive"]
    assert found["sigio_alive"]
    assert found["hits"] == 0
    assert not found["changed"]


@pytest.mark.spec("P2", "B9")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_the_catalogue_are_held(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a list, where the race on an address has something to connect to."""
    found = attacked(shape, CASES)
    outcomes_of = {name: got for name, got, _ in found["landlock/allowlist"]["rows"]}
    ends = found["landlock/blocked"]["ends"]
    held = [row for row in rows.ATTACKED if rows.held(row, outcomes_of, ends)]
    with capsys.disabled():
        print(f"\n  landlock, {shape}: {len(held)} of {len(rows.ATTACKED)} rows held")
    assert held == list(rows.ATTACKED)


def test_every_row_is_in_one_group() -> None:
    groups = (rows.ATTACKED, rows.NOT_KEPT, rows.NO_SUCH_PART, rows.SAME_FILTER, rows.SAME_CODE)
    assert sorted(row for group in groups for row in group) == sorted(ROWS)


def test_an_attack_that_was_not_tried_is_not_held() -> None:
    held = {name: "held" for names in rows.ATTACKED.values() for name in names}
    held.pop(rows.DESCRIPTORS)
    ends = {"quiet": True, "bomb": "timeout", "left": 0}
    assert all(rows.held(row, held, ends) for row in rows.ATTACKED)
    assert not rows.held(20, {**held, "truncate a file": "OPEN"}, ends)
    assert not rows.held(20, {}, ends)
    assert not rows.held(1, {**held, "descriptor 7": "OPEN"}, ends)
    assert not rows.held(101, held, None)


@pytest.mark.timeout(300)
def test_attacks_succeed_where_nothing_stands_in_their_way() -> None:
    """Positive control: with ``backend="none"`` the same program reaches the same baits."""
    found = attacked("user", ("none/open",))["none/open"]
    assert found["exit_code"] == 0, found["stderr"]
    assert set(outcomes(found, "held")) <= {"signal by a descriptor's owner", *OF_THE_FILE_SYSTEM}
    assert not found["sigio_alive"], "the signal by a descriptor's owner"
    assert len(outcomes(found, "OPEN")) > 60


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_left_behind_ends_with_its_run(shape: str) -> None:
    found = attacked(shape, CASES)["landlock/blocked"]["ends"]
    assert found == {"quiet": True, "bomb": "timeout", "left": 0}


@pytest.mark.timeout(300)
def test_signals_are_notified_before_abi_6() -> None:
    """The kernel of the tests has more, so the backend is made to use less."""
    found = attacked("user", ("landlock/blocked",), abi=5)["landlock/blocked"]
    assert found["isolation"]["signals"] == "notified"
    assert set(outcomes(found, "OPEN")) == NOT_KEPT
    assert not outcomes(found, "BROKEN")
    assert found["sigio_alive"]
    assert found["hits"] == 0
