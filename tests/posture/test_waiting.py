"""Spare sandboxes and waiting Pythons are as isolated as running commands."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, SOON_S, eventually, session_of
from tests.posture.inspection import (
    CAPABILITIES,
    NAMESPACES,
    filters,
    inside,
    is_closed,
    namespace,
    numbers,
    sandboxes,
    status,
)

from union.sandbox._linux import kernel
from union.sandbox._linux.host import CA_VARIABLES
from union.sandbox._seccomp.filter import digest, filter_program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb

pytestmark = pytest.mark.spec("G2")


@pytest.fixture(params=ISOLATED)
async def waiting(request: pytest.FixtureRequest) -> AsyncIterator[sb.Session]:
    """A session in which nothing runs and all spares are ready."""
    async with session_of(request.param, env={"OWN": "value"}) as session:
        await session.run_code("pass")
        await session.run("true")
        before: set[int] = set()
        async with asyncio.timeout(SOON_S):
            # Until the set is stable: a spare under construction does not count yet.
            while not _all_is_there() or before != inside():
                before = inside()
                await asyncio.sleep(0.15)
        yield session


def _all_is_there() -> bool:
    try:
        whole = all(set(one) == {"1", "2"} for one in sandboxes())
        return whole and bool(_python() and _spares())
    except OSError:
        return False


def _python() -> int | None:
    """Return the pid of a Python that waits for its script."""
    for pid in inside():
        try:
            if os.path.exists(f"/proc/{pid}/fd/100"):
                return pid
        except OSError:
            continue
    return None


def _spares() -> list[dict[str, int]]:
    """Return the sandboxes whose second process has not executed a command yet."""
    return [
        one
        for one in sandboxes()
        if set(one) == {"1", "2"} and status(one["1"])["Name"] == status(one["2"])["Name"]
    ]


@pytest.mark.threat(74)
def test_spares_are_filtered_and_have_no_capability(waiting: sb.Session) -> None:
    for pid in inside():
        found = status(pid)
        assert {found[name] for name in CAPABILITIES} == {"0" * 16}, found["Name"]
        assert (found["Seccomp"], found["NoNewPrivs"]) == ("2", "1"), found["Name"]
    assert len(inside()) >= 4, "there is something to look at"


@pytest.mark.threat(74)
def test_spares_have_the_reported_filter(waiting: sb.Session) -> None:
    shares_id = waiting.isolation.ids == "caller"
    expected = filter_program(machine=kernel.machine(), only_counted_messages=shares_id)
    assert waiting.isolation.seccomp == digest(expected)
    found = filters(sorted(inside()))
    if found is None:
        # The kernel returns filters only to CAP_SYS_ADMIN; tests/escape attacks the filter itself.
        assert os.geteuid() != 0 or not int(status("self")["CapEff"], 16) & 1 << 21 or _filtered()
        return
    assert {digest(one) for one in found} == {digest(expected)}


def _filtered() -> bool:
    return status("self")["Seccomp"] != "0"


@pytest.mark.threat(37)
def test_no_two_spares_share_a_namespace(waiting: sb.Session) -> None:
    # Only root can inspect processes that are closed to their own user.
    seen = [[pid for pid in one.values() if not is_closed(pid)] for one in sandboxes()]
    seen = [one for one in seen if one]
    assert len(seen) >= (2 if os.geteuid() == 0 else 1)
    for name in NAMESPACES:
        held = [{namespace(pid, name) for pid in one} for one in seen]
        assert all(len(one) == 1 for one in held), name
        values = [one.pop() for one in held]
        assert len(set(values)) == len(values), name
        assert namespace("self", name) not in values, name


@pytest.mark.threat(1, 41)
def test_a_spare_holds_its_own_socket_and_nothing_else(waiting: sb.Session) -> None:
    known = ("socket:", "pipe:", "/dev/null", "/run/sandbox/main.")
    for one in _spares():
        for pid in one.values():
            if is_closed(pid):
                continue
            assert Path(f"/proc/{pid}/environ").read_bytes() in {b"", b"PWD=/\0"}
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                assert target.startswith(known), (fd, target)


@pytest.mark.threat(1, 41)
def test_a_waiting_python_holds_its_streams_and_its_script(waiting: sb.Session) -> None:
    pid = _python()
    assert pid is not None
    assert numbers(pid)[-1] == "2"
    assert status(pid)["Threads"] == "1"
    held = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    own = f"{waiting.work_dir}/.sandbox-venv/"
    # A fork has the file that Python reads at that moment replaced by one without content.
    held = {fd: target for fd, target in held.items() if fd == 0 or target != "/dev/null"}
    assert {fd for fd, target in held.items() if not target.startswith(own)} == {0, 1, 2, 100, 101}
    assert held[0] == "/dev/null"
    assert all(held[fd].startswith("pipe:") for fd in (1, 2, 100))
    assert held[101] == "/run/sandbox/main.py"
    raw = Path(f"/proc/{pid}/environ").read_bytes()
    names = {entry.partition(b"=")[0].decode() for entry in raw.split(b"\0") if entry}
    documented = {"PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TERM", "VIRTUAL_ENV", "OWN"}
    documented |= {"EMAIL", "SANDBOX_NETWORK", "UV_HTTP_RETRIES"}  # without network
    given = {name for name in CA_VARIABLES if os.environ.get(name)}
    assert names - given <= documented


@pytest.mark.threat(108)
async def test_no_spare_is_left_after_the_session(waiting: sb.Session) -> None:
    seen = inside()
    assert seen
    await waiting.close()
    assert eventually(lambda: not inside() & seen)
