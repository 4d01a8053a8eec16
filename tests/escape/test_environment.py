"""Attacks by environment, terminal, standard input and arguments."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import asyncio
import json
import os
import pty
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.escape.inside import attack, program
from tests.escape.plants import command_lines, drive, end, start_driver

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher

if TYPE_CHECKING:
    from tests.conftest import OpenSession

_TOKEN = "host-token-91ab"


@pytest.mark.threat(41)
@pytest.mark.spec("C5", "G2")
def test_the_environment_of_the_owner_is_not_inherited(cell: str) -> None:
    """Neither in the command's environment nor in that of any process it can inspect."""
    code = """
    texts = [json.dumps(dict(os.environ))]
    for entry in os.listdir("/proc"):
        try:
            texts.append(read(f"/proc/{entry}/environ"))
        except OSError:
            pass
    out["hits"] = sum(given["mark"] in text for text in texts)
    out["control"] = sum("VIRTUAL_ENV" in text for text in texts)
    """
    body = """
    assert os.environ["PLANT_TOKEN"] == sys.argv[1]  # the plant is there
    async with session() as sbx:
        print(await sbx.run_code(sys.argv[2]))
    """
    args = [_TOKEN, program(code, given={"mark": _TOKEN})]
    text = drive(cell, body, args=args, env={"PLANT_TOKEN": _TOKEN})
    found = json.loads(text.strip().splitlines()[-1])
    assert found["hits"] == 0
    assert found["control"] >= 1


@pytest.mark.threat(41)
@pytest.mark.spec("G2")
async def test_the_launcher_carries_no_environment(jail: sb.Session) -> None:
    """Inspected from the host, because sandboxes are forked from it."""
    launcher = Launcher._current
    assert launcher is not None
    assert Path(f"/proc/{launcher.pid}/environ").read_bytes() == b""
    assert Path("/proc/self/environ").read_bytes() != b""


@pytest.mark.threat(42)
@pytest.mark.spec("C5")
async def test_a_secret_in_env_is_on_no_command_line(jail: sb.Session) -> None:
    """While a run that has it is alive, no process of the host shows it."""
    secret = f"env-secret-{os.getpid()}"
    # The shell stays: while a process executes another program, it shows no command line.
    command = 'echo "$KEY"; sleep 20; true'
    proc = await jail.run(command, env={"KEY": secret}, stdout=True, timeout_s=25)
    assert await anext(proc.iter_stdout_lines()) == secret, "the command has it"
    lines = command_lines()
    assert any(b"sleep" in line for line in lines.values()), "the run is seen"
    assert not [pid for pid, line in lines.items() if secret.encode() in line]
    proc.kill()
    await proc.wait()


@pytest.mark.threat(43)
@pytest.mark.spec("C5")
async def test_loader_variables_act_inside_only(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """The loader's debug output to a host dir; into the work dir it is written."""
    env = {"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": f"{plant}/ld", "LD_PRELOAD": "/nowhere/x.so"}
    before = sorted(os.listdir(plant))
    async with jailed(host_work_dir=work, env=env) as jail:
        assert (await jail.exec(["/bin/true"])).returncode == 0
        assert (await jail.exec("true", env=env)).returncode == 0
        assert sorted(os.listdir(plant)) == before
        assert not list(Path(work).glob("ld*"))
        await jail.exec(["/bin/true"], env={"LD_DEBUG_OUTPUT": f"{work}/ld"})
        assert list(Path(work).glob("ld.*")), "the variable does act, inside"


@pytest.mark.threat(43)
@pytest.mark.spec("C5")
async def test_start_up_variables_act_inside_only(
    jailed: OpenSession, plant: Path, work: str
) -> None:
    """Python's and the shell's: the code they name runs in the sandbox alone."""
    marker = plant / "ran-outside"
    module = f"open({str(marker)!r}, 'w')"
    Path(work, "sitecustomize.py").write_text(
        f"try:\n    {module}\nexcept OSError:\n    open({work!r} + '/ran-inside', 'w').close()\n"
    )
    Path(work, "rc").write_text(f"echo x > {marker}\n")
    env = {"PYTHONPATH": work, "PYTHONSTARTUP": f"{work}/sitecustomize.py", "PYTHONHOME": "",
           "ENV": f"{work}/rc", "BASH_ENV": f"{work}/rc", "PYTHONWARNINGS": "error"}  # fmt: skip
    async with jailed(host_work_dir=work, env=env) as jail:
        await jail.run_code("pass")
        await jail.exec("true")
        await jail.exec(["sh", "-i", "-c", "true"])
        await jail.put_bytes("file", b"x")
    assert Path(work, "ran-inside").exists(), "the variable does act, inside"
    assert not marker.exists()


@pytest.mark.threat(44)
@pytest.mark.spec("C1", "C6")
async def test_values_with_a_dash_are_never_options(jail: sb.Session) -> None:
    """A command, a script, a directory and a variable that begin with dashes."""
    missing = await jail.exec(["--help"])
    assert (missing.returncode, missing.stdout) == (127, ""), missing
    assert "--help" in missing.stderr
    assert (await jail.exec("--version; echo after")).stdout == "after\n"
    await jail.put_bytes("--bind/x", b"")
    assert (await jail.exec("ls", cwd="--bind")).stdout == "x\n"
    assert (await jail.exec("echo $A", env={"A": "--unshare"})).stdout == "--unshare\n"


@pytest.mark.threat(45)
@pytest.mark.spec("C2")
def test_the_owners_stdin_is_not_read(cell: str) -> None:
    """Inside it is at its end at once; the owner's input is still unread afterwards."""
    body = """
    async with session() as sbx:
        for kind in ("shell", "python"):
            cmd = "cat" if kind == "shell" else "import sys; print(repr(sys.stdin.read()))"
            print(repr((await sbx.exec(cmd, script_type=kind, timeout_s=5)).stdout))
    print(sys.stdin.readline())
    """
    text = drive(cell, body, feed="the owner's line\n")
    assert text.split("\n")[:3] == ["''", "\"''\\n\"", "the owner's line"]


_TERMINAL = """
import fcntl
out["tty"] = attempt(os.open, "/dev/tty", os.O_RDWR)
out["set"] = attempt(os.setsid)
out["names"] = [attempt(os.open, path, os.O_RDWR | os.O_NOCTTY)
                for path in (given["pty"], "/dev/ptmx", "/dev/pts/ptmx", "/dev/console", "/dev/tty0")]
char = ctypes.create_string_buffer(b"X")
for fd in (0, 1, 2):
    for number in (0x5412, 0x541C, 0x5412 | 7 << 32, 0x541C | 1 << 63, 0x5423):
        out[f"{fd} {number:x}"] = call("ioctl", fd, ctypes.c_ulong(number), char)
out["control"] = call("ioctl", 0, 0x5451, 0)  # FIOCLEX: ioctl itself works
"""


@pytest.mark.threat(39, 40)
@pytest.mark.spec("G2")
def test_nothing_can_be_typed_into_the_owners_terminal(cell: str) -> None:
    """The owner has a controlling terminal, and passes its streams on."""
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    body = """
    os.open(sys.argv[1], os.O_RDWR)  # of a session leader without one: it becomes ours
    os.close(os.open("/dev/tty", os.O_RDWR))  # the plant is there
    async with session() as sbx:
        print(await sbx.run_code(sys.argv[2]), flush=True)
    """
    code = program(_TERMINAL, given={"pty": name})
    process = start_driver(cell, body, args=[name, code], stdin=slave, start_new_session=True)
    try:
        text, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        os.set_blocking(master, False)
        with pytest.raises(BlockingIOError):
            os.read(master, 100)  # an injected byte would have been echoed
    finally:
        end(process)
        os.close(master)
        os.close(slave)
    found = json.loads(text.strip().splitlines()[-1])
    assert found.pop("control") == "ok"
    assert found.pop("tty") == "ENXIO", "no controlling terminal inside"
    assert "ok" not in found.pop("names")
    assert found.pop("set") == "EPERM", "it leads a session of its own already"
    assert set(found.values()) == {"EPERM"}, found


@pytest.mark.threat(39)
@pytest.mark.spec("G2")
async def test_streams_passed_on_are_no_terminal(jail: sb.Session) -> None:
    """INHERIT copies output; it does not pass the file descriptor on."""
    proc = await jail.run(
        "test -t 0 || test -t 1 || test -t 2; echo $? > answer",
        stdout=sb.INHERIT,
        stderr=sb.INHERIT,
    )
    assert proc.returncode == 0
    assert await jail.get_bytes("answer") == b"1\n"


@pytest.mark.threat(112)
@pytest.mark.spec("C5")
async def test_a_huge_environment_is_a_clean_error(jail: sb.Session) -> None:
    """One variable beyond the kernel's limit; the session goes on."""
    with pytest.raises(sb.SandboxError) as caught:
        await jail.exec("true", env={"BIG": "x" * (8 * 2**20)})
    assert caught.value.code
    assert await attack(jail, "out['fine'] = True") == {"fine": True}
    await asyncio.sleep(0)
