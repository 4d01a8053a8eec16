"""Attacks on the caller's terminal, and on the host's, by a command that has one of its own."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.escape.inside import program
from tests.escape.plants import end, start_driver

from union.sandbox._plan.plan import Devpts

if TYPE_CHECKING:
    from union import sandbox as sb

_ATTACK = """
import fcntl
char = ctypes.create_string_buffer(b"X")
tty = os.open("/dev/tty", os.O_RDWR)  # its own, which it may have
out["isatty"] = [os.isatty(fd) for fd in (0, 1, 2, tty)]
for fd in (0, tty):
    for number in (0x5412, 0x541C, 0x5412 | 7 << 32, 0x541C | 1 << 63, 0x5423):
        out[f"{fd} {number:x}"] = call("ioctl", fd, ctypes.c_ulong(number), char)
out["console"] = attempt(fcntl.ioctl, 0, 0x541D, 0)  # TIOCCONS
out["stolen"] = attempt(fcntl.ioctl, 0, 0x540E, 1)  # TIOCSCTTY by force
out["named"] = attempt(os.open, given["pty"], os.O_RDWR | os.O_NOCTTY) if given["pty"] != os.ttyname(0) else "its own"
out["pts"] = sorted(os.listdir("/dev/pts"))
out["held"] = sorted({os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")})
out["size"] = list(os.get_terminal_size(0))
"""

_TYPE = """
import fcntl, os, sys
os.setsid()
fcntl.ioctl(0, 0x540E, 0)
fcntl.ioctl(0, 0x5412, b"X")
"""


def _pending(master: int) -> bytes:
    os.set_blocking(master, False)
    try:
        return os.read(master, 100)
    except BlockingIOError:
        return b""


@pytest.mark.threat(39, 40)
@pytest.mark.spec("G2")
def test_a_command_with_a_terminal_types_nothing_into_the_callers(cell: str) -> None:
    """The caller has a controlling terminal while the command uses its own."""
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    body = """
    os.open(sys.argv[1], os.O_RDWR)  # of a session leader without one: it becomes ours
    async with session() as sbx:
        proc = await sbx.run(sys.argv[2], script_type="python", pty=(33, 111), timeout_s=25)
        print((await proc.communicate_text())[0], flush=True)
    """
    code = program(_ATTACK, given={"pty": name})
    process = start_driver(cell, body, args=[name, code], stdin=slave, start_new_session=True)
    try:
        text, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert _pending(master) == b"", "an injected byte would have been echoed"
    finally:
        end(process)
        os.close(master)
        os.close(slave)
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    assert found.pop("isatty") == [True] * 4
    assert found.pop("size") == [111, 33]
    assert found.pop("pts") == ["0", "ptmx"], "none but its own"
    assert found.pop("named") in {"its own", "ENOENT"}
    assert [path for path in found.pop("held") if "ptmx" in path] == []
    assert found.pop("stolen") in {"ok", "EPERM"}  # of its own terminal, which it leads already
    assert set(found.values()) == {"EPERM"}, found


def _may_type() -> bool:
    allowed = Path("/proc/sys/dev/tty/legacy_tiocsti")
    return os.geteuid() == 0 or not allowed.exists() or allowed.read_text().strip() == "1"


def test_outside_the_same_byte_would_arrive() -> None:
    """The attack works where nothing stops it, and is seen where the test above looks."""
    if not _may_type():
        pytest.skip("the kernel refuses TIOCSTI to everybody: sysctl dev.tty.legacy_tiocsti=1")
    master, slave = pty.openpty()
    try:
        subprocess.run([sys.executable, "-I", "-c", _TYPE], stdin=slave, check=True, timeout=30)
        assert _pending(master) == b"X"
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.spec("G3")
async def test_a_command_cannot_use_up_the_hosts_terminals(jail: sb.Session) -> None:
    code = """
        import os
        held = []
        try:
            while len(held) < 200:
                held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
        except OSError as exc:
            print(len(held), exc.strerror)
    """
    proc = await jail.run(code, script_type="python", pty=True, timeout_s=20)
    count, error = (await proc.communicate_text())[0].strip().split(" ", 1)
    assert error == "No space left on device"
    # One is its own.
    assert f"max={int(count) + 1}" in Devpts("/dev/pts").options.split(",")


@pytest.mark.spec("G2")
async def test_a_run_without_a_terminal_gets_none_from_a_run_with_one(jail: sb.Session) -> None:
    proc = await jail.run("sleep 60", pty=True, background=True)
    tries = "ls /dev/pts; cat /dev/ptmx; cat /dev/pts/ptmx; : > /dev/tty"
    found = await jail.exec(tries)
    proc.kill()
    await proc.wait()
    assert found.stdout == ""
    assert found.stderr.count("No such file or directory") == 2
    assert found.stderr.count("No such device or address") == 1
