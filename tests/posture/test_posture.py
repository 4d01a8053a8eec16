"""Posture: a live sandbox, inspected from the host, where it cannot forge the result."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, eventually, sandbox_processes, session_of

from union.sandbox._linux.host import CA_VARIABLES
from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import HELD_DIR, RUN_DIR, own_steps, shared_steps
from union.sandbox.constants import (
    DEFAULT_FILE_SIZE_MIB,
    DEFAULT_OPEN_FILES,
    DEFAULT_PROCESSES,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb

pytestmark = pytest.mark.spec("G2")

_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_NS_FILES = {"mount": "mnt"}
_PROGRAM = """
import threading, time
for _ in range(3):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("up", flush=True)
time.sleep(60)
"""


@dataclass(frozen=True, slots=True)
class Live:
    """A sleeping run: its session, and the host pids of its processes."""

    jail: sb.Session
    command: int
    first: int

    def status(self, pid: int, task: int | None = None) -> dict[str, str]:
        path = f"/proc/{pid}/status" if task is None else f"/proc/{pid}/task/{task}/status"
        lines = Path(path).read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    def tasks(self) -> list[tuple[int, int]]:
        return [
            (pid, int(task))
            for pid in (self.command, self.first)
            for task in os.listdir(f"/proc/{pid}/task")
        ]


@pytest.fixture(params=ISOLATED)
async def live(request: pytest.FixtureRequest) -> AsyncIterator[Live]:
    """A Python program with threads, asleep in a sandbox."""
    async with session_of(request.param) as jail:
        proc = await jail.run(
            _PROGRAM,
            script_type="python",
            stdout=True,
            stderr=True,
            env={"OWN": "value"},
            timeout_s=50,
        )
        assert await anext(proc.iter_stdout_lines()) == "up"
        pids = {int(_inside_pid(pid)): pid for pid in _inside()}
        assert set(pids) == {1, proc.pid}, pids
        yield Live(jail, pids[proc.pid or 0], pids[1])


def _inside() -> set[int]:
    """Return the processes in a pid namespace of their own, which leaves out bwrap."""
    ours = len(_numbers("self"))
    found = set()
    for pid in sandbox_processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if len(_numbers(pid)) > ours:
                found.add(pid)
    return found


def _inside_pid(pid: int) -> str:
    """Return the pid of a process in its innermost namespace."""
    return _numbers(pid)[-1]


def _numbers(pid: int | str) -> list[str]:
    """Return the pids of a process, one per pid namespace, ours first."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("NSpid")).split()[1:]


@pytest.mark.threat(54)
def test_no_process_or_thread_has_a_capability(live: Live) -> None:
    for pid, task in live.tasks():
        status = live.status(pid, task)
        assert {status[name] for name in _CAPABILITIES} == {"0" * 16}, status["Name"]
    assert live.jail.isolation.capabilities == ()


@pytest.mark.threat(74)
def test_every_process_and_thread_is_filtered(live: Live) -> None:
    tasks = live.tasks()
    assert len(tasks) >= 5, "threads are looked at too"
    for pid, task in tasks:
        status = live.status(pid, task)
        assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1"), status["Name"]


@pytest.mark.threat(31, 38, 76)
def test_every_namespace_is_its_own(live: Live) -> None:
    names = live.jail.isolation.namespaces
    assert set(names) == {"user", "mount", "pid", "ipc", "uts", "cgroup", "net"}
    for name in names:
        assert _namespace("self", name) != _namespace(live.command, name), name


def _namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{_NS_FILES.get(name, name)}")


@pytest.mark.threat(37)
async def test_two_runs_share_no_namespace(live: Live) -> None:
    """Of one session: each run is a sandbox of its own."""
    before = _inside()
    other = await live.jail.run(["sleep", "20"], background=True)
    command = next(pid for pid in _inside() - before if _inside_pid(pid) == str(other.pid))
    for name in live.jail.isolation.namespaces:
        assert _namespace(command, name) != _namespace(live.command, name), name
    other.kill()
    await other.wait()


def _mounts(pid: int) -> list[tuple[str, set[str], str]]:
    """Return (path, options, type) of every mount of a process."""
    found = []
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        found.append((fields[4], set(fields[5].split(",")), right.split()[0]))
    return found


def _planned(jail: sb.Session) -> set[str]:
    transport = jail._transport
    view = transport.postures.get("blocked").view  # type: ignore[union-attr]  # the local transport
    made = (p.Bind, p.Tmpfs, p.Proc, p.Devpts)
    shares = transport.postures.get("blocked").plan.shared is not None  # type: ignore[union-attr]
    steps = (*shared_steps(view, hold=shares), *own_steps(view, held=shares))
    return {"/"} | {step.path for step in steps if isinstance(step, made)}


@pytest.mark.threat(70)
def test_the_mounts_are_exactly_the_planned_ones(live: Live) -> None:
    planned = _planned(live.jail)
    found = [place for place, _, _ in _mounts(live.command)]
    assert {place for place in found if not _below(place, planned)} <= planned
    assert set(found) >= planned
    kinds = {kind for _, _, kind in _mounts(live.command)}
    assert not kinds & {"sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "mqueue"}


def _below(place: str, planned: set[str]) -> bool:
    """Return whether a mount lies below a planned one, as mounts of the host in a bind do."""
    return any(place.startswith(f"{top}/") for top in planned if top not in {"/", "/dev", "/run"})


@pytest.mark.threat(28)
def test_all_but_a_few_mounts_are_read_only(live: Live) -> None:
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
    writable = {live.jail.work_dir, "/tmp", "/dev/shm", RUN_DIR}
    mounts = _mounts(live.command)
    for place, options, kind in mounts:
        if place.startswith(f"{HELD_DIR}/"):
            # Mounted elsewhere; here a later mount covers the whole directory.
            covers = [one for one in mounts if one[0] == HELD_DIR]
            assert covers[-1][1] >= {"nosuid", "nodev"}
            assert mounts.index(covers[-1]) > mounts.index((place, options, kind))
            continue
        if kind == "proc" or (
            live.jail.isolation.proc == "inherited" and place.startswith("/proc")
        ):
            assert options >= {"nosuid", "nodev", "noexec"}, place
            continue
        assert "nosuid" in options, place
        if place in devices:
            assert "noexec" in options, place
            continue
        assert "nodev" in options, place
        assert ("rw" in options) == (place in writable), place


@pytest.mark.threat(1)
def test_the_command_has_three_descriptors(live: Live) -> None:
    fds = {fd: os.readlink(f"/proc/{live.command}/fd/{fd}") for fd in _fds(live.command)}
    assert sorted(fds) == [0, 1, 2]
    assert fds[0] == "/dev/null"
    assert fds[1].startswith("pipe:")
    assert fds[2].startswith("pipe:")


def _fds(pid: int) -> list[int]:
    return [int(fd) for fd in os.listdir(f"/proc/{pid}/fd")]


@pytest.mark.threat(41)
def test_the_environment_holds_documented_names_only(live: Live) -> None:
    raw = Path(f"/proc/{live.command}/environ").read_bytes()
    names = {entry.partition(b"=")[0].decode() for entry in raw.split(b"\0") if entry}
    documented = {"PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TERM", "VIRTUAL_ENV"}
    documented |= {"EMAIL", "SANDBOX_NETWORK", "UV_HTTP_RETRIES"}  # without network
    given = {name for name in CA_VARIABLES if os.environ.get(name)}
    assert names - given == documented | {"OWN"}
    assert set(os.environ) - documented - given, "the host has more"


@pytest.mark.threat(101, 104)
@pytest.mark.spec("G3")
def test_limits_are_set_hard(live: Live) -> None:
    found = {}
    for line in Path(f"/proc/{live.command}/limits").read_text().splitlines()[1:]:
        found[line[:26].strip()] = line[26:].split()[:2]
    report = dict(live.jail.isolation.limits)
    core = "1" if report["core"] == "rlimit" else "0"
    assert found["Max core file size"] == [core, core], "with 0 a core dump program is started"
    soft, hard = found["Max open files"]
    assert soft == hard
    assert int(hard) <= DEFAULT_OPEN_FILES
    size = found["Max file size"]
    assert size[0] == size[1]
    assert int(size[1]) <= DEFAULT_FILE_SIZE_MIB * 2**20
    if report["processes"] == "rlimit":
        most = found["Max processes"]
        assert most[0] == most[1]
        assert int(most[1]) <= DEFAULT_PROCESSES + 2


def test_the_ids_are_the_reported_ones(live: Live) -> None:
    """Seen from the host: not the id of root if reported so, and no further group."""
    for pid in (live.command, live.first):
        status = live.status(pid)
        uids, gids = set(status["Uid"].split()), set(status["Gid"].split())
        assert len(uids) == len(gids) == 1
        if live.jail.isolation.ids == "unprivileged":
            assert int(uids.pop()) >= 1_000_000
            assert int(gids.pop()) >= 1_000_000
            assert status["Groups"].split() == []
        else:
            assert uids == {str(os.geteuid())}
    mapped = Path(f"/proc/{live.command}/uid_map").read_text().split()
    assert mapped[2] == "1", "one id and no other exists inside"


@pytest.mark.threat(39)
def test_the_command_leads_a_session_of_its_own(live: Live) -> None:
    fields = Path(f"/proc/{live.command}/stat").read_text().rpartition(")")[2].split()
    group, session, terminal = (int(value) for value in fields[2:5])
    assert group == session == live.command
    assert terminal == 0
    assert session != os.getsid(0)


def test_the_root_and_the_directory_are_private(live: Live) -> None:
    """Its root is no directory of the host; its directory is the work dir."""
    theirs, ours = os.stat(f"/proc/{live.command}/root/"), os.stat("/")
    assert (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino)
    assert os.path.samestat(os.stat(f"/proc/{live.command}/cwd/"), os.stat(live.jail.work_dir))
    assert not os.path.exists(f"/proc/{live.command}/root/etc/shadow")
    assert os.path.exists(f"/proc/{live.command}/root/etc/passwd")


@pytest.mark.threat(1, 41)
def test_process_one_is_bare(live: Live) -> None:
    """The supervisor inside: its own user cannot inspect it, and root finds nothing in it."""
    if os.geteuid() != 0 or _closed(live.first):
        assert _closed(live.first)
        return
    # bwrap sets PWD to the directory it starts in, which is always the root.
    assert Path(f"/proc/{live.first}/environ").read_bytes() in {b"", b"PWD=/\0"}
    # The other end of the pipe was closed when the command was executed.
    known = ("socket:", "pipe:", "/dev/null")
    for fd in _fds(live.first):
        target = os.readlink(f"/proc/{live.first}/fd/{fd}")
        assert target.startswith(known), target


def _closed(pid: int) -> bool:
    try:
        Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return True
    return False


@pytest.mark.threat(108)
async def test_no_process_is_left_after_the_end(live: Live) -> None:
    await live.jail.close()
    assert eventually(lambda: not Path(f"/proc/{live.command}").exists())
    assert not Path(f"/proc/{live.first}").exists()
