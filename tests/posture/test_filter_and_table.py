"""The filter as the kernel holds it, and the mount table, compared with the plan."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, session_of
from tests.posture.inspection import NAMESPACES, filters, namespace, sandboxes, status

from union import sandbox as sb
from union.sandbox._linux import cgroup, kernel
from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import HELD_DIR, hiding_steps, own_steps, shared_steps
from union.sandbox._seccomp.filter import digest, filter_program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.spec("G2")
MIB = 1024 * 1024
_FLAGS = {p.RDONLY: "ro", p.NOSUID: "nosuid", p.NODEV: "nodev", p.NOEXEC: "noexec"}


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    jail: sb.Session
    command: int
    first: int


async def _asleep(jail: sb.Session) -> Live:
    """A program with threads, asleep."""
    code = (
        "import threading, time\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    proc = await jail.run(code, script_type="python", stdout=True, timeout_s=50)
    assert await anext(proc.iter_stdout_lines()) == "up"
    for one in sandboxes():
        command = one.get("2")
        if command is not None and status(command)["Threads"] == "4" and command not in _SEEN:
            _SEEN.add(command)
            return Live(jail, command, one["1"])
    raise AssertionError("the command is not to be found")


_SEEN: set[int] = set()


@pytest.fixture(params=ISOLATED)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def live(way: str) -> AsyncIterator[Live]:
    async with session_of(way) as jail:
        yield await _asleep(jail)


# The filter.


@pytest.mark.threat(74)
def test_every_thread_has_the_compiled_filter(live: Live) -> None:
    """Byte for byte, in the command, its threads and the first process."""
    shares_id = live.jail.isolation.ids == "caller"
    expected = filter_program(machine=kernel.machine(), only_counted_messages=shares_id)
    assert live.jail.isolation.seccomp == digest(expected)
    tasks = [
        int(task) for pid in (live.command, live.first) for task in os.listdir(f"/proc/{pid}/task")
    ]
    assert len(tasks) == 5
    ours = int(status("self").get("Seccomp_filters", "0"))
    for task in tasks:
        assert int(status(task).get("Seccomp_filters", ours + 1)) == ours + 1, "one, and its own"
    found = filters(tasks)
    if found is None:
        # The kernel returns it only to a process with CAP_SYS_ADMIN and without a filter.
        assert not int(status("self")["CapEff"], 16) & 1 << 21 or status("self")["Seccomp"] != "0"
        return
    assert found == [expected] * 5


# Mounts.


def _unescaped(text: str) -> str:
    return text.encode().decode("unicode_escape") if "\\" in text else text


def _table(pid: int | str) -> list[tuple[str, frozenset[str], str]]:
    """(place, options, type), in the order in which they were mounted."""
    found = []
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        options = frozenset(fields[5].split(","))
        found.append((_unescaped(fields[4]), options, right.split()[0]))
    return found


def _steps(jail: sb.Session) -> list[p.Step]:
    posture = jail._transport.postures.get("blocked")  # type: ignore[union-attr]
    view, shares = posture.view, posture.plan.shared is not None
    steps = [*shared_steps(view, hold=shares), *own_steps(view, held=shares)]
    if shares and view.fresh_proc:
        steps += [p.Proc("/proc"), *hiding_steps(view)]
    return steps


def _mounts_of_bind(step: p.Bind) -> list[str]:
    """Return the mounts that come with a bind, from below its source on the host."""
    source = step.source.rstrip("/")
    host = [place for place, _, _ in _table("self")]
    below = [place for place in host if place.startswith(f"{source}/")]
    return [step.path.rstrip("/") + place[len(source) :] for place in below]


@pytest.mark.threat(27, 28)
def test_the_mount_table_is_the_planned_one_and_nothing_more(live: Live) -> None:
    """Each path as often as planned, with the flags of the plan."""
    planned: Counter[str] = Counter({"/": 1})
    flags: dict[str, set[str]] = {}
    kinds: dict[str, str] = {"/": "tmpfs"}
    for step in _steps(live.jail):
        match step:
            case p.Bind():
                planned[step.path] += 1
                flags[step.path] = {word for bit, word in _FLAGS.items() if step.attrs & bit}
                kinds.pop(step.path, None)
                # Kept mounts come from there, with the mounts below them.
                kept = step.source.startswith(HELD_DIR)
                planned.update([] if kept else _mounts_of_bind(step))
            case p.Cover():
                planned[step.path] += 1
            case p.Tmpfs() | p.Proc() | p.Devpts():
                planned[step.path] += 1
                kinds[step.path] = type(step).__name__.lower()
    table = _table(live.command)
    found = Counter(place for place, _, _ in table)
    if live.jail.isolation.proc == "inherited":
        # The mounts that mask /proc in a container came with it.
        found = Counter({k: n for k, n in found.items() if not k.startswith("/proc/")})
        planned = Counter({k: n for k, n in planned.items() if not k.startswith("/proc/")})
    extra = {k: n for k, n in (found - planned).items() if not _is_kept_submount(k)}
    assert extra == {}
    assert planned - found == Counter()
    top = {place: (options, kind) for place, options, kind in table}
    for place, kind in kinds.items():
        assert top[place][1] == kind, place
    for place, wanted in flags.items():
        assert top[place][0] >= wanted, place
        assert ("ro" in wanted) == ("ro" in top[place][0]), place
    assert "ro" in top["/"][0]


def _is_kept_submount(place: str) -> bool:
    return place.startswith(f"{HELD_DIR}/")


# Two sandboxes, and groups.


@pytest.mark.threat(37)
async def test_sessions_share_no_namespace(live: Live, way: str) -> None:
    """Another session with the same settings; no namespace is the host's either."""
    async with session_of(way) as jail:
        other = await _asleep(jail)
        for name in NAMESPACES:
            three = {namespace(pid, name) for pid in ("self", live.command, other.command)}
            assert len(three) == 3, name


@pytest.mark.threat(102)
async def test_a_limited_sandbox_is_in_a_group_of_its_own(way: str) -> None:
    """Where the host has control groups; elsewhere the report names the replacement."""
    limited = sb.Resources(memory="256Mi")
    async with session_of(way, resources=limited) as one, session_of(way) as bare:
        first, second = await _asleep(one), await _asleep(bare)
        ours = _groups("self")
        assert _groups(second.command) == ours, "without limits nothing is moved"
        mechanism = dict(one.isolation.limits)["memory"]
        where = cgroup.hierarchy()
        if where is None:
            assert mechanism == "watch"
            assert _groups(first.command) == ours
            return
        assert mechanism == f"cgroup-v{where.version}"
        moved = {k: v for k, v in _groups(first.command).items() if ours[k] != v}
        assert moved
        assert all(f"sandbox-{os.getpid()}-" in path for path in moved.values())
        assert _groups(first.first) == _groups(first.command)


def _groups(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines}


@pytest.mark.threat(101, 104)
async def test_limits_are_the_requested_ones(way: str) -> None:
    """Soft and hard alike, in the command; seen from the host."""
    asked = sb.Resources(open_files=128, file_size="7Mi", processes=33)
    async with session_of(way, resources=asked) as jail:
        live = await _asleep(jail)
        found = {}
        for line in Path(f"/proc/{live.command}/limits").read_text().splitlines()[1:]:
            found[line[:26].strip()] = line[26:].split()[:2]
        assert found["Max open files"] == ["128", "128"]
        assert found["Max file size"] == [str(7 * MIB)] * 2
        core = "1" if dict(jail.isolation.limits)["core"] == "rlimit" else "0"
        assert found["Max core file size"] == [core, core]
        if dict(jail.isolation.limits)["processes"] == "rlimit":
            assert found["Max processes"] == ["34", "34"], "one is ours"
