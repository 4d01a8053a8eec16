"""``bubblewrap``: the arguments of the program, and the errors if it is missing or fails."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S, children_of, eventually, sandbox_processes, session_of

from union import sandbox as sb
from union.sandbox._linux import bwrap, host_programs
from union.sandbox._linux.launcher import Launcher
from union.sandbox.on_device import _probe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

REAL = shutil.which("bwrap") or ""
pytestmark = pytest.mark.skipif(
    not REAL, reason="bwrap is not installed: apt-get install bubblewrap"
)


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a host without shared parts: bwrap builds each sandbox, and keeps running."""
    monkeypatch.setattr(_probe, "_known", {"bubblewrap": _probe.HostFeatures(share=False)})


@pytest.fixture
async def whole(tmp_path: Path, unshared: None) -> AsyncIterator[sb.Session]:
    """A session whose sandboxes are built without a shared part."""
    work = tmp_path / "a secret name"
    work.mkdir()
    async with session_of("bubblewrap", host_work_dir=str(work), env={"SECRET": "s3cret"}) as sbx:
        yield sbx


async def begun(sbx: sb.Session) -> tuple[sb.SandboxProcess, int]:
    """Return a running command and the pid of its bwrap."""
    proc = await sbx.run("echo begun; sleep 60; : s3cret-command", stdout=True)
    assert await anext(proc.iter_stdout_lines()) == "begun"
    (used,) = (
        pid
        for pid in watchers()
        if any(b"s3cret-command" in _read(below, "cmdline") for below in tree(pid))
    )
    return proc, used


def watchers() -> set[int]:
    launcher = Launcher._current
    assert launcher is not None
    return {p for p in children_of(launcher.pid) if _read(p, "comm") == b"bwrap\n"}


def tree(pid: int) -> set[int]:
    found, waiting = set(), [pid]
    while waiting:
        found.add(waiting[-1])
        waiting += children_of(waiting.pop())
    return found


def lives(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return _read(pid, "stat").rpartition(b")")[2][1:2] not in {b"", b"Z"}


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@pytest.mark.spec("B1", "G1")
async def test_it_is_the_default() -> None:
    async with sb.on_device.session() as sbx:
        assert sbx.backend == sbx.isolation.backend == "bubblewrap"
        assert (await sbx.exec("echo fine")).stdout == "fine\n"


@pytest.mark.spec("G5")
def test_it_is_reported_as_available() -> None:
    status = {s.name: s for s in sb.on_device.available_backends()}["bubblewrap"]
    assert (status.available, status.reason) == (True, "")


@pytest.mark.spec("G2")
async def test_no_data_of_the_caller_is_in_the_arguments(whole: sb.Session) -> None:
    """Command lines are world-readable; the environment of the command is the control."""
    proc, watcher = await begun(whole)
    lines = [_read(pid, "cmdline") + _read(pid, "environ") for pid in tree(watcher)]
    ours = [line for line in lines if b"/proc/self/fd/6" in line]
    assert len(ours) == 2, "bwrap, and the first process inside"
    assert any(b"s3cret" in line for line in lines), "it can be found where it is meant to be"
    assert not any(b"s3cret" in line or b"secret name" in line for line in ours)
    assert _read(watcher, "cmdline").split(b"\0")[:3] == [b"bwrap", b"--args", b"3"]
    assert _read(watcher, "environ") == b""
    proc.kill()
    await proc.wait()


@pytest.mark.spec("G2")
async def test_bwrap_holds_no_capability_and_no_descriptor_of_the_caller(whole: sb.Session) -> None:
    proc, watcher = await begun(whole)
    status = dict(
        line.split(":\t", 1)
        for line in _read(watcher, "status").decode().splitlines()
        if ":\t" in line
    )
    assert {status[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {"0" * 16}
    if whole.isolation.ids == "unprivileged":
        assert not status["Groups"].split()
    if os.geteuid() == 0:
        held = [os.readlink(f"/proc/{watcher}/fd/{fd}") for fd in os.listdir(f"/proc/{watcher}/fd")]
        known = (
            "/dev/null",
            "/memfd:bwrap-stderr",
            "anon_inode:[signalfd]",
            "anon_inode:[eventfd]",
        )
        assert [target for target in held if not target.startswith(known)] == []
    proc.kill()
    await proc.wait()


@pytest.mark.spec("G4")
async def test_a_sandbox_ends_with_its_bwrap(whole: sb.Session) -> None:
    proc, watcher = await begun(whole)
    inside = tree(watcher)
    os.kill(watcher, signal.SIGKILL)
    with pytest.raises(sb.SandboxExecutionError):
        await asyncio.wait_for(proc.wait(), SOON_S)
    assert eventually(lambda: not any(map(lives, inside)))
    assert (await whole.exec("echo usable")).stdout == "usable\n"


@pytest.mark.spec("G4")
async def test_a_sandbox_of_bwrap_ends_with_the_launcher(whole: sb.Session) -> None:
    proc, watcher = await begun(whole)
    inside = tree(watcher)
    launcher = Launcher._current
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGKILL)
    with pytest.raises(sb.SandboxExecutionError):
        await asyncio.wait_for(proc.wait(), SOON_S)
    assert eventually(lambda: not any(map(lives, inside)))
    assert (await whole.exec("echo usable")).stdout == "usable\n"


def orphans() -> set[int]:
    """Return processes of ours without a launcher."""
    found = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if not _read(pid, "cmdline").endswith(b"/proc/self/fd/6\0inside\0") or not lives(pid):
            continue
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if fields and _read(int(fields[1]), "comm") not in {b"sandbox\n", b"bwrap\n"}:
            found.add(pid)
    return found


@pytest.mark.spec("G4")
async def test_a_launcher_killed_at_any_moment_leaves_nothing(whole: sb.Session) -> None:
    """Also while bwrap runs and its child waits for it."""
    before = orphans()
    for moment in range(12):
        runs = [asyncio.create_task(whole.exec("true")) for _ in range(3)]
        await asyncio.sleep(moment * 0.002)
        launcher = Launcher._current
        assert launcher is not None
        os.kill(launcher.pid, signal.SIGKILL)
        async with asyncio.timeout(40):
            await asyncio.gather(*runs, return_exceptions=True)
    assert eventually(lambda: orphans() <= before), orphans() - before
    assert (await whole.exec("echo usable")).stdout == "usable\n"


@pytest.mark.spec("C7", "B2")
@pytest.mark.parametrize("how", ["kill", "timeout", "close"])
async def test_every_end_leaves_no_bwrap(whole: sb.Session, how: str) -> None:
    command = "(setsid sleep 60 &) ; sleep 60"
    if how == "timeout":
        assert (await whole.exec(command, timeout_s=0.1)).returncode == 143
    else:
        proc = await whole.run(command, background=True)
        if how == "kill":
            proc.kill()
            assert await proc.wait() == 137
        else:
            await whole.close()
    assert eventually(lambda: not sandbox_processes())


@pytest.mark.spec("D4")
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.usefixtures("unshared")
async def test_a_failed_set_up_is_not_an_exit_code(tmp_path: Path, *, replaced: bool) -> None:
    """The work dir is moved away or replaced, and restored afterwards."""
    work, away = tmp_path / "work", tmp_path / "away"
    work.mkdir()
    async with session_of("bubblewrap", host_work_dir=str(work), warm=0) as sbx:
        work.rename(away)
        if replaced:
            work.mkdir()
        with pytest.raises(sb.SandboxExecutionError) as caught:
            await sbx.exec("true")
        assert (caught.value.returncode, caught.value.stage) == (-1, "spawn")
        if replaced:
            work.rmdir()
        away.rename(work)
        assert (await sbx.exec("echo well")).stdout == "well\n"


@pytest.mark.threat(132)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("gone", ["in/settings", "in", "out/more"])
async def test_a_mount_point_that_is_deleted_meanwhile_is_not_created_again(
    outside_tmp: Path,
    install: Callable[[str], Path],
    request: pytest.FixtureRequest,
    gone: str,
    *,
    shares: bool,
) -> None:
    """The caller deletes it after its source was opened, before bwrap mounts it."""
    if not shares:
        request.getfixturevalue("unshared")
    work, armed = outside_tmp / "work", outside_tmp / "armed"
    asked = f'case "$1" in --help|--version) exec {REAL} "$@";; esac\n'
    install(f'{asked}[ -e {armed} ] && /bin/rm -r {work / gone}\nexec {REAL} "$@"')
    (work / "in").mkdir(parents=True)
    (work / "in" / "settings").write_text("kept")
    (work / "out" / "more").mkdir(parents=True)
    options = {
        "host_work_dir": str(work),
        "read_only_paths": [str(work / "in" / "settings")],
        "read_write_paths": [str(work / "out" / "more")],
        "warm": 0,
    }
    async with session_of("bubblewrap", **options) as sbx:
        assert (await sbx.exec("cat in/settings; echo new > out/more/new")).stdout == "kept"
        sbx._transport.postures.close()  # type: ignore[union-attr]  # the next one is built anew
        armed.touch()
        with pytest.raises(sb.SandboxError, match="No such file"):
            await sbx.exec("true")
        armed.unlink()
        assert not (work / gone).exists(), "nothing was created in its place"
        (work / "in").mkdir(exist_ok=True)
        (work / "in" / "settings").write_text("again")
        (work / "out" / "more").mkdir(exist_ok=True)
        script = "cat in/settings; echo x > in/settings; mv in moved; echo new > out/more/new"
        assert (await sbx.exec(script)).stdout == "again", "the control"
    assert (work / "in" / "settings").read_text() == "again"
    assert (work / "out" / "more" / "new").exists()


# No usable bwrap.


@pytest.fixture
def install(trusted_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make a script the only bwrap of this machine."""
    monkeypatch.setenv("PATH", str(trusted_dir))
    monkeypatch.setattr(host_programs, "SYSTEM_DIRECTORIES", ())

    def write(body: str) -> Path:
        program = trusted_dir / "bwrap"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        return program

    return write


@pytest.mark.spec("G1")
@pytest.mark.usefixtures("install")
async def test_a_missing_bwrap_is_reported_with_its_package() -> None:
    with pytest.raises(sb.BackendUnavailableError, match="bwrap, which is not installed") as caught:
        await sb.on_device.session().open()
    assert (caught.value.backend, caught.value.missing) == ("bubblewrap", ("bwrap",))
    assert "apt-get install bubblewrap" in caught.value.hint
    assert "backend='userns'" in caught.value.hint


@pytest.mark.spec("G1")
async def test_a_bwrap_that_is_too_old_is_reported_with_the_missing_options(
    install: Callable[[str], Path],
) -> None:
    old = f"{REAL} --help | grep -v as-pid-1"
    install(f"case $1 in --version) echo bubblewrap 0.1.7;; *) {old};; esac")
    with pytest.raises(sb.BackendUnavailableError, match="has no --as-pid-1") as caught:
        await sb.on_device.session().open()
    assert "bwrap 0.1.7" in str(caught.value)
    assert caught.value.missing == ("--as-pid-1",)
    assert "0.5 or newer" in caught.value.hint


@pytest.mark.spec("G1")
async def test_a_bwrap_that_does_not_start_is_reported(install: Callable[[str], Path]) -> None:
    install("").write_bytes(b"\x7fELF no program")
    with pytest.raises(sb.BackendUnavailableError, match="does not start"):
        await sb.on_device.session().open()


@pytest.mark.spec("G1")
def test_a_set_uid_bwrap_is_reported_to_callers_it_does_not_serve(
    install: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = install(f'exec {REAL} "$@"')
    program.chmod(0o755 | stat.S_ISUID)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(sb.BackendUnavailableError, match="set-uid") as caught:
        bwrap.find()
    assert f"chmod u-s {program}" in caught.value.hint
    program.chmod(0o755)
    assert bwrap.find().program == str(program), "the control"


@pytest.mark.spec("G1")
async def test_the_stderr_of_a_failing_bwrap_is_in_the_error(
    install: Callable[[str], Path],
) -> None:
    """The host lacks nothing, so bwrap is the cause, and its stderr is in the error."""
    install(
        f'case $1 in --args) echo "bwrap: the moon is \x1b[31mred" >&2; exit 1;; '
        f'*) exec {REAL} "$@";; esac'
    )
    with pytest.raises(sb.BackendUnavailableError) as caught:
        await sb.on_device.session().open()
    message = str(caught.value)
    assert "(bwrap reports: the moon is  [31mred)" in message
    assert "can be built without it" in message
    assert "backend='userns' works here" in caught.value.hint


@pytest.mark.spec("D4")
@pytest.mark.usefixtures("unshared")
async def test_a_bwrap_that_fails_later_fails_the_run(
    install: Callable[[str], Path], tmp_path: Path
) -> None:
    """Between two runs; the first is the control."""
    work = tmp_path / "work"
    work.mkdir()
    install(f'exec {REAL} "$@"')
    async with session_of("bubblewrap", host_work_dir=str(work), warm=0) as sbx:
        assert (await sbx.exec("echo one")).stdout == "one\n"
        install('echo "bwrap: no more" >&2; exit 1')
        with pytest.raises(sb.SandboxExecutionError, match="bwrap: no more") as caught:
            await sbx.exec("true")
        assert caught.value.returncode == -1


@pytest.mark.spec("G1")
async def test_another_bwrap_is_checked_again(install: Callable[[str], Path]) -> None:
    program = install("echo nothing")
    with pytest.raises(sb.BackendUnavailableError, match="has no --args"):
        await sb.on_device.session().open()
    program.unlink()
    shutil.copy(REAL, program)
    async with sb.on_device.session() as sbx:
        assert (await sbx.exec("echo fine")).stdout == "fine\n"
