"""Every step of the launcher fails in turn, or the process that does it is killed there.

strace makes the n-th call of a kind fail in each process below the launcher, the launcher included.
After each: a true error that names the step and the errno, no invented exit code, nothing left, the
session usable again, and another session of the same process unharmed.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import eventually, sandbox_processes, session_of
from tests.faults.strace import ODD, Strace

from union import sandbox as sb
from union.sandbox._linux import channel as channels
from union.sandbox._linux.launcher import Launcher
from union.sandbox._linux.protocol import FAILURE_NAMES
from union.sandbox.on_device import _probe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAME, NUMBER = ODD
POSITIONS = 0 if os.environ.get("ALL_FAULTS") else 2
"""How many calls of one kind fail, one at a time: the first and the last; 0: all."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 if POSITIONS else 3600)]
FILTERED = {"network_mode": "allowlist", "network_allowlist": ["127.0.0.1"]}
SHAPES: dict[str, dict[str, Any]] = {
    "userns": {"backend": "userns", **FILTERED},
    "blocked": {"backend": "userns"},
    "bubblewrap": {"backend": "bubblewrap"},
}
STEPS = (
    "bind", "capset", "chdir", "clone", "close_range", "dup2", "epoll_ctl", "execve", "fchdir",
    "fchmod", "fcntl", "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self",
    "listen", "mkdir", "mmap", "mount", "mount_setattr", "move_mount", "newfstatat", "open_tree",
    "openat", "pipe2", "pivot_root", "prctl", "prlimit64", "read", "recvfrom", "seccomp",
    "sendfile", "setgroups", "sethostname", "setns", "setresgid", "setresuid", "setsid",
    "setsockopt", "socket", "symlink", "umount2", "write",
)  # fmt: skip
PROGRAMS = "execve,execveat"
BLOCKED = ("newfstatat", "openat", "recvfrom", "setns", "socket", "unshare")
"""What is done for a network that may be used again."""
WRAPPED = ("execveat", "fcntl", "memfd_create", "open_tree", "pipe2", "write")
"""What is done for bwrap; its own calls are its own affair."""
LINES = ("epoll_wait", "poll", "recvmsg", "sendmsg", "sendto")
"""Where these fail there is no way left to say so: the error tells of an end without words."""
KILLED_AT = (
    "chdir", "clone", "close_range", "epoll_wait", "mount", "openat", "pipe2", "pivot_root", "poll",
    "prctl", "recvmsg", "seccomp", "sendmsg", "setns", "setsid", "write",
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """How an attempt to open a session and use it went."""

    stage: str
    error: BaseException | None = None
    results: tuple[tuple[int | None, str, str], ...] = ()
    other_way: bool = False

    @property
    def is_right(self) -> bool:
        return self.results == ((0, "hi\n", ""), (0, "hi\r\n", ""), (0, "hi\n", ""))


async def attempt(options: dict[str, Any]) -> Seen:
    """A session with a command, one on a terminal, and one in Python, from nothing."""
    _probe.verified.clear()
    _probe._known.clear()
    session = sb.on_device.session(**options, warm=0, strict=True)
    stage, results = "open", []
    try:
        await session.open()
        stage = "run"
        other_way = session._transport.postures.features != _probe.HostFeatures()  # type: ignore[union-attr]
        for command in ({}, {"pty": True}, {"script_type": "python"}):
            text = "print('hi')" if "script_type" in command else "echo hi"
            proc = await session.run(text, stdout=True, timeout_s=20, **command)  # type: ignore[arg-type]
            out, _ = await proc.communicate_text()
            results.append((proc.returncode, out, proc.termination_reason))
    except Exception as exc:  # noqa: BLE001 - it is looked at by the test
        return Seen(stage, exc)
    finally:
        await session.close()
    return Seen(stage, None, tuple(results), other_way)


class Bystander:
    """Another session of this process, with a command that answers."""

    def __init__(self, session: sb.Session) -> None:
        self.session = session

    async def begin(self) -> None:
        self.proc = await self.session.run("cat", stdin=sb.PIPE, stdout=True)
        self._lines = self.proc.iter_stdout_lines()
        assert await self.answers()
        self.processes = sandbox_processes()
        self.launcher = Launcher.current()

    async def answers(self) -> bool:
        assert self.proc.stdin is not None
        self.proc.stdin.write(b"still here\n")
        async with asyncio.timeout(40):
            return await anext(self._lines) == "still here"

    async def recovers(self) -> bool:
        """After the launcher died: its command has a true error, and a new one works."""
        try:
            if await self.answers():
                return True
        except sb.SandboxExecutionError:
            # It ends its sandboxes first, and then itself; what it is asked between is lost.
            assert eventually(lambda: not self.launcher.is_usable())
            await self.begin()
        return await self.answers()


@pytest.fixture
async def bystander(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bystander]:
    # An answer that was lost is not waited for as long as elsewhere.
    monkeypatch.setattr(_probe, "_TIMEOUT_S", 5.0)
    monkeypatch.setattr(channels, "_CONFIRM_S", 5.0)
    monkeypatch.setattr(channels, "_DRAIN_S", 5.0)
    async with session_of("userns", warm=0) as session:
        found = Bystander(session)
        await found.begin()
        yield found


_COUNTS: dict[str, dict[str, int]] = {}


async def positions(shape: str, call: str, log: Path) -> list[int]:
    """Which calls of this kind are to fail, of all that one process makes."""
    if shape not in _COUNTS:
        with Strace(Launcher.current().pid, log) as strace:
            seen = await attempt(SHAPES[shape])
        assert seen.is_right, seen
        _COUNTS[shape] = strace.most_calls()
    count = _COUNTS[shape].get(call, 0)
    if not POSITIONS or count <= POSITIONS:
        return list(range(1, count + 1))
    step = (count - 1) / (POSITIONS - 1)
    return sorted({round(1 + step * n) for n in range(POSITIONS)})


def whose(strace: Strace) -> set[str]:
    """Who made the calls that failed: the launcher and its sandboxes, or programs in them."""
    programs: set[str] = set()
    found: set[str] = set()
    for line in strace.text.splitlines():
        pid = line.split(" ", 1)[0]
        if re.search(r"\bexecve(at)?\(.*= 0$|<\.\.\. execve(at)? resumed", line):
            programs.add(pid)
        elif "(INJECTED)" in line:
            found.add("theirs" if pid in programs else "ours")
    return found


def check_error(seen: Seen, what: str, *, wrapped: bool) -> None:
    """The error of a failed step: true, and of the right kind."""
    text = f"{what}: {seen.error!r}"
    if what.startswith("read ") and getattr(seen.error, "stage", "") == "stream":
        # The command runs already: what cannot be read then is that it has ended.
        assert "ended without reporting how" in str(seen.error), text
        return
    assert isinstance(seen.error, sb.BackendUnavailableError | sb.SandboxExecutionError), text
    assert getattr(seen.error, "returncode", -1) == -1, text
    if seen.stage == "run":
        assert isinstance(seen.error, sb.SandboxExecutionError), text
    if wrapped and ("bwrap" in str(seen.error) or "not ready within" in str(seen.error)):
        return  # bwrap's own words; or it has none, and waits for ever
    gone = ("the launcher has ended", "it, or the launcher, was killed")  # whichever is seen first
    if what.startswith("setresuid ") and any(text in str(seen.error) for text in gone):
        return  # it could not take its own id back, and does nothing as another user
    assert os.strerror(NUMBER) in str(seen.error), text
    named = any(name in str(seen.error) for name in FAILURE_NAMES.values())
    assert named or "launcher refuses" in str(seen.error), text


async def check_after(bystander: Bystander, call: str, what: str) -> None:
    # A launcher that cannot take its own ids back must not continue: it ends and is replaced.
    survived = bystander.recovers if call == "setresuid" else bystander.answers
    assert await survived(), what
    assert eventually(lambda: sandbox_processes() <= bystander.processes), what


@pytest.mark.parametrize(
    "shape,call",
    [
        *(("userns", call) for call in STEPS),
        *(("blocked", call) for call in BLOCKED),
        *(("bubblewrap", call) for call in WRAPPED),
    ],
)
@pytest.mark.spec("D8", "G4")
async def test_a_step_that_fails_is_named(
    shape: str, call: str, bystander: Bystander, tmp_path: Path
) -> None:
    places = await positions(shape, call, tmp_path / "log")
    if not places:
        pytest.skip(f"{call} is not used on this kind of machine: try another, such as x86-64")
    failed = 0
    for place in places:
        expressions = f"trace={call},{PROGRAMS}", f"inject={call}:error={NAME}:when={place}+"
        what = f"{call} {place}"
        with Strace(Launcher.current().pid, tmp_path / "log", *expressions) as strace:
            seen = await attempt(SHAPES[shape])
        failed += seen.error is not None or seen.other_way
        if seen.error is not None:
            check_error(seen, what, wrapped=shape == "bubblewrap")
        elif not seen.other_way and "ours" in whose(strace):
            # Nothing may be passed over that the sandbox is built of; only a look around may fail.
            # A network namespace that cannot be entered again is replaced by a new one.
            is_reuse = all("CLONE_NEWNET" in line for line in strace.injected)
            looks = {"read", "newfstatat", "mmap", "openat"}
            assert call in looks or (call == "setns" and is_reuse), (what, strace.injected)
            assert seen.is_right or "theirs" in whose(strace), (what, seen)
        await check_after(bystander, call, what)
    # The same again, with nothing in its way.
    assert (await attempt(SHAPES[shape])).is_right
    assert failed, f"no failure of {call} was seen"


@pytest.mark.parametrize("call", LINES)
@pytest.mark.spec("D8", "G4")
async def test_a_line_that_fails_ends_in_a_true_error(
    call: str, bystander: Bystander, tmp_path: Path
) -> None:
    for place in await positions("userns", call, tmp_path / "log"):
        expression = f"inject={call}:error={NAME}:when={place}"
        with Strace(Launcher.current().pid, tmp_path / "log", f"trace={call}", expression):
            seen = await attempt(SHAPES["userns"])
        what = f"{call} {place}: {seen}"
        assert seen.is_right or isinstance(
            seen.error, sb.SandboxExecutionError | sb.BackendUnavailableError
        ), what
        assert await bystander.recovers(), what
    assert (await attempt(SHAPES["userns"])).is_right


@pytest.mark.parametrize("call", KILLED_AT)
@pytest.mark.spec("D8", "G4")
async def test_a_process_that_is_killed_at_a_step_is_no_exit(
    call: str, bystander: Bystander, tmp_path: Path
) -> None:
    for place in await positions("userns", call, tmp_path / "log"):
        expressions = f"trace={call},{PROGRAMS}", f"inject={call}:signal=KILL:when={place}"
        with Strace(Launcher.current().pid, tmp_path / "log", *expressions) as strace:
            seen = await attempt(SHAPES["userns"])
        what = f"{call} {place}: {seen} {strace.text[-2000:]}"
        if seen.error is not None:
            assert isinstance(seen.error, sb.SandboxExecutionError), what
            assert seen.error.returncode == -1
        for result, right in zip(seen.results, ("hi\n", "hi\r\n", "hi\n"), strict=False):
            # Killed as the command it had become, which is the truth; or not at all.
            assert result == (0, right, "") or (result[0], result[2]) == (137, "signal"), what
        assert await bystander.recovers(), what
    assert (await attempt(SHAPES["userns"])).is_right
