"""Attacks on start and end: survivors, orphans, a dead launcher, a misdirected clean-up."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import SOON_S, OpenSession, eventually, sandbox_processes
from tests.escape.inside import attack, program
from tests.escape.plants import drive, end, marked, snapshot, start_driver

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher

pytestmark = pytest.mark.spec("G4", "B2")

_DAEMON = """
mark = given["mark"]
def daemon(*prefix):
    subprocess.Popen([*prefix, "sh", "-c", "trap '' TERM HUP INT; while :; do sleep 1; done", mark],
                     start_new_session=True, stdin=subprocess.DEVNULL)
daemon()
daemon("nohup")
if os.fork() == 0:  # double fork, own group, a name of its own
    os.setsid()
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        os.execvp("sleep", ["sleep", "60.0" + mark.replace("-", "")[-1:].translate(str.maketrans("abcdef", "123456"))])
    os._exit(0)
stopped = subprocess.Popen(["sleep", "61"], start_new_session=True)
os.kill(stopped.pid, signal.SIGSTOP)
if os.fork() == 0:
    while True:
        pass
"""


def _mark() -> str:
    return f"sbx-life-{secrets.token_hex(6)}"


@pytest.mark.threat(107, 109)
@pytest.mark.spec("C7")
async def test_nothing_survives_a_timeout(jail: sb.Session) -> None:
    """setsid, double fork, stopped, deaf to SIGTERM, a busy loop, the pipe held."""
    mark = _mark()
    begun = time.monotonic()
    code = f"{_DAEMON}\nprint('begun', flush=True)\ntime.sleep(60)"
    source = program(code, given={"mark": mark})
    result = await jail.exec(source, script_type="python", timeout_s=2)
    assert result.termination_reason == "timeout"
    assert "begun" in result.stdout
    assert time.monotonic() - begun < SOON_S
    assert eventually(lambda: not marked(mark) and not sandbox_processes())
    assert (await jail.exec("echo usable")).stdout == "usable\n"


@pytest.mark.threat(108, 109)
@pytest.mark.spec("C8")
async def test_nothing_survives_the_end_of_a_run(jail: sb.Session) -> None:
    """Daemons end with the command, and do not hold its pipes open."""
    mark = _mark()
    begun = time.monotonic()
    seen = await attack(
        jail,
        f"{_DAEMON}\ntime.sleep(0.3)\nout['count'] = len([p for p in os.listdir('/proc') if p.isdigit()])",
        given={"mark": mark},
    )
    assert seen["count"] >= 6, "they did start"
    assert time.monotonic() - begun < SOON_S
    assert eventually(lambda: not marked(mark) and not sandbox_processes())


@pytest.mark.threat(108)
async def test_nothing_survives_close(jailed: OpenSession) -> None:
    """A background run with daemons, in the middle of its work."""
    mark = _mark()
    async with jailed() as jail:
        code = program(
            f"{_DAEMON}\nprint('begun', flush=True)\ntime.sleep(60)", given={"mark": mark}
        )
        proc = await jail.run(code, script_type="python", stdout=True)
        assert await anext(proc.iter_stdout_lines()) == "begun"
        assert marked(mark), "they did start"
    assert not marked(mark)
    assert not sandbox_processes()


@pytest.mark.threat(111)
@pytest.mark.parametrize("victim", ["1", "-1", "0", "$PPID", "$$"])
async def test_a_command_that_kills_its_supervisor_frees_nothing(
    jail: sb.Session, victim: str
) -> None:
    """Its first process, all processes, its group, its parent, itself."""
    mark = _mark()
    command = f"(setsid sleep 60 {mark} 2>/dev/null & ) ; kill -9 {victim}; echo after"
    proc = await jail.run(command, timeout_s=5)
    try:
        code = await proc.wait()
        assert code in {0, 1, 137}
    except sb.SandboxExecutionError:
        pass  # its supervisor is gone: reported as such
    assert eventually(lambda: not marked(mark) and not sandbox_processes())
    assert (await jail.exec("echo usable")).stdout == "usable\n"


_OWNER = """
sbx = await session(host_work_dir=sys.argv[2]).open()
for _ in range(3):
    await sbx.run(["sh", "-c", "setsid sleep 61 & trap '' TERM; while :; do sleep 0.1; done", sys.argv[1]], background=True)
print("ready", flush=True)
await asyncio.sleep(60)
"""


@pytest.mark.threat(110)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_outlives_its_owner(cell: str, number: int, work: str) -> None:
    """The driving process is killed with three trees alive: all gone in a second."""
    mark = _mark()
    driver = start_driver(cell, _OWNER, args=[mark, work])
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        below = marked(mark) - {driver.pid}
        assert len(below) >= 3, "they did start"
        os.kill(driver.pid, number)
        begun = time.monotonic()
        assert eventually(lambda: not marked(mark) - {driver.pid})
        assert time.monotonic() - begun < SOON_S
    finally:
        end(driver)


_RIGHT_AFTER = """
delay = float(sys.argv[2])
sbx = await session(host_work_dir=sys.argv[3]).open()
task = asyncio.create_task(sbx.run(["sh", "-c", "while :; do sleep 0.1; done", sys.argv[1]], background=True))
print("ready", flush=True)
if delay < 0:
    await task
else:
    await asyncio.sleep(delay)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.threat(52, 110)
@pytest.mark.parametrize("delay", ["0", "0.002", "0.006", "-1"])
async def test_nothing_is_left_when_the_owner_dies_right_after_a_start(
    cell: str, delay: str, work: str
) -> None:
    """At several moments of a start, the first before its message was read."""
    mark = _mark()
    driver = start_driver(cell, _RIGHT_AFTER, args=[mark, delay, work])
    try:
        driver.wait(timeout=20)
        assert driver.returncode == -signal.SIGKILL
        assert eventually(lambda: not marked(mark))
        await asyncio.sleep(0.2)  # nor does anything appear later
        assert not marked(mark)
    finally:
        end(driver)


@pytest.mark.threat(111, 113)
async def test_a_killed_launcher_ends_its_runs_and_not_the_session(jail: sb.Session) -> None:
    """The run is reported as lost; the next one works."""
    mark = _mark()
    proc = await jail.run(["sh", "-c", "echo on; while :; do sleep 0.1; done", mark], stdout=True)
    assert await anext(proc.iter_stdout_lines()) == "on"
    launcher = Launcher._current
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(sb.SandboxExecutionError) as caught:
            await proc.wait()
    assert caught.value.returncode == -1
    assert eventually(lambda: not marked(mark))
    assert (await jail.exec("echo usable")).stdout == "usable\n"
    assert await jail.put_bytes("file", b"x") == 1


@pytest.mark.threat(111)
async def test_a_launcher_killed_while_idle_is_replaced(jail: sb.Session) -> None:
    """Between two runs; also for a second session."""
    launcher = Launcher._current
    assert launcher is not None
    await jail.run("true")
    os.kill(launcher.pid, signal.SIGKILL)
    await asyncio.sleep(0.05)
    assert (await jail.exec("echo usable")).stdout == "usable\n"
    assert Launcher._current is not None
    assert Launcher._current.pid != launcher.pid


@pytest.mark.threat(52)
def test_the_launcher_outlives_the_thread_that_started_it(cell: str) -> None:
    """A death signal is bound to a thread; ours must be bound to the process."""
    body = """
    from union.sandbox._linux.launcher import Launcher
    async def first():
        async with session() as sbx:
            await sbx.run("true")
    worker = threading.Thread(target=lambda: asyncio.run(first()))
    worker.start()
    worker.join()
    before = Launcher._current.pid
    time.sleep(0.2)
    async with session() as sbx:
        print((await sbx.exec("echo lives")).stdout.strip(), Launcher._current.pid == before)
    """
    assert drive(cell, body).split() == ["lives", "True"]


@pytest.mark.threat(7, 15)
async def test_clean_up_does_not_follow_links(jailed: OpenSession, plant: Path) -> None:
    """Links to plants among directories without any permission."""
    before = snapshot(plant)
    code = """
    os.makedirs("a/b/c")
    for name, target in given["links"].items():
        for place in (".", "a", "a/b/c"):
            os.symlink(target, f"{place}/{name}")
    write("a/b/c/own")
    os.chmod("a/b/c/own", 0)
    for path in ("a/b/c", "a/b", "a"):
        os.chmod(path, 0)
    """
    links = {
        "dir": str(plant),
        "file": str(plant / "secret"),
        "up": "..",
        "root": "/",
        "loop": "loop",
    }
    async with jailed() as jail:
        where = jail.work_dir
        await attack(jail, code, given={"links": links})
        assert os.path.islink(f"{where}/dir"), "the plant is there"
    assert not os.path.lexists(where)
    assert snapshot(plant) == before


@pytest.mark.threat(16)
@pytest.mark.slow
@pytest.mark.timeout(240)  # on a disk that others may be using
async def test_a_deep_and_a_wide_tree_are_removed_at_close(jailed: OpenSession) -> None:
    """2,000 levels and 5,000 files; tests/unit/test_removal.py has more of both."""
    code = """
    for number in range(5_000):
        os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY))
    for _ in range(2_000):
        os.mkdir("d")
        os.chdir("d")
    """
    async with jailed() as jail:
        where = jail.work_dir
        await attack(jail, code)
        assert len(os.listdir(where)) > 5_000
    assert not os.path.lexists(where)


@pytest.mark.threat(17, 27)
async def test_the_work_dir_cannot_be_exchanged(jailed: OpenSession, plant: Path) -> None:
    """Its parent is not writable, so its name cannot come to mean the plant."""
    before = snapshot(plant)
    code = """
    where, parent = os.getcwd(), os.path.dirname(os.getcwd())
    out["rename"] = attempt(os.rename, where, where + "-old")
    out["rmdir"] = attempt(os.rmdir, where)
    out["exchange"] = "ok" if libc.renameat2(-100, where.encode(), -100, (parent + "/x").encode(), 2) == 0 else "no"
    out["beside"] = attempt(os.symlink, given["plant"], parent + "/beside")
    out["mkdir"] = attempt(os.mkdir, parent + "/made")
    out["control"] = attempt(os.mkdir, "made")
    """
    async with jailed() as jail:
        where = jail.work_dir
        found = await attack(jail, code, given={"plant": str(plant)})
        assert found.pop("control") == "ok"
        assert "ok" not in {found["rename"], found["rmdir"], found["exchange"]}, found
        parent = os.path.dirname(where)
        if parent != "/tmp":  # which is writable inside, and the run's own
            assert "ok" not in {found["beside"], found["mkdir"]}, found
        assert not os.path.lexists(f"{parent}/beside")
        assert not os.path.lexists(f"{parent}/made")
        assert await jail.put_bytes("made/file", b"x") == 1
        assert Path(where, "made", "file").read_bytes() == b"x"
    assert not os.path.lexists(where)
    assert snapshot(plant) == before


@pytest.mark.threat(107)
@pytest.mark.spec("D7")
async def test_nothing_survives_a_cancelled_call(jail: sb.Session) -> None:
    """The awaiting task is cancelled while daemons are up."""
    mark = _mark()
    cmd = f"echo up > up; setsid sh -c 'while :; do sleep 0.1; done' {mark} & sleep 60"
    task = asyncio.create_task(jail.exec(cmd))
    # The script is on the shell's command line, so only the file shows that it has started; the
    # shell creates it before it writes it.
    while not (await _content(jail, "up") == b"up\n" and marked(mark)):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert eventually(lambda: not sandbox_processes())
    assert not marked(mark)
    assert (await jail.exec("cat up")).stdout == "up\n"


async def _content(session: sb.Session, path: str) -> bytes:
    try:
        return await session.get_bytes(path)
    except FileNotFoundError:
        return b""


def test_the_marks_are_seen_from_the_host() -> None:
    """The control of all above: a process with a mark is found, and not when it has ended."""
    mark = _mark()
    process = subprocess.Popen([sys.executable, "-Ic", "import time; time.sleep(20)", mark])
    try:
        assert eventually(lambda: marked(mark) == {process.pid})
    finally:
        end(process)
    assert not marked(mark)
