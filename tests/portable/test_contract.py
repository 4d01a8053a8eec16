"""The portable engine keeps the contract of ``none`` with every call that only Linux has removed.

``make test-all`` repeats the part of the suite that depends on the engine. All of it:
``python -m tests.portable.engine -n 2 --only-way none tests/contract``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually
from tests.portable.differences import LEFT_OUT, NONE, expected, left_out
from tests.portable.engine import PYTEST, ROOT

if TYPE_CHECKING:
    from tests.portable.engine import Engine

CONTRACT = Path(__file__).parents[1] / "contract"
SUITE = ("test_basics", "test_pty", "test_run", "test_stdin", "test_timeouts_and_ends")
PASSED = re.compile(r"^PASSED (tests/.+)$", re.MULTILINE)
EVERYWHERE = os.environ.get("EVERYWHERE") == "1"
"""Run all modules, with the exceptions of ``differences``."""

TAKEN = """\
import os, select, socket, fcntl
from union.sandbox._system import IS_LINUX, IS_MACOS
names = [(os, "O_PATH"), (os, "memfd_create"), (os, "pidfd_open"), (os, "pipe2"),
         (select, "epoll"), (socket, "SOCK_SEQPACKET"), (fcntl, "F_SETPIPE_SZ")]
from union.sandbox._linux.openat2 import has_openat2
print(IS_LINUX, IS_MACOS, has_openat2(), [n for m, n in names if hasattr(m, n)])
"""


def test_an_exception_that_passes_is_an_error(engine: Engine) -> None:
    """And one that fails is none: the whole suite is green with its exceptions, and only then."""
    plugin = ("-p", "tests.portable.differences", "--only-way", "none")
    test = "tests/contract/test_documents.py::test_quickstart"
    assert engine.pytest(*plugin, test).returncode == 0, "expected, and it fails"
    assert engine.pytest("--only-way", "none", test).returncode == 1, "the control"
    assert not {name for name in NONE if name.partition("::")[0] == "test_basics.py"}
    assert expected("tests/contract/test_basics.py::test_x[none]") is None
    assert all((CONTRACT / name.partition("::")[0]).exists() for name in {*NONE, *LEFT_OUT})


def test_the_calls_are_really_gone(engine: Engine) -> None:
    assert engine.python("-c", TAKEN).stdout == "False True False []\n"


@pytest.mark.elsewhere
@pytest.mark.slow
@pytest.mark.timeout(900 if EVERYWHERE else 300)
@pytest.mark.spec("P3", "G1")
def test_the_contract_of_none(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"tests/contract/{name}.py" for name in SUITE]
    if EVERYWHERE:
        files = ["tests/contract"]
    plugin = ("-p", "tests.portable.differences") if EVERYWHERE else ()
    done = engine.pytest("-n", "2", "-rp", "--only-way", "none", *plugin, *files)
    assert done.returncode == 0, done.stdout[-4000:]
    # Each test of the suite, and not a number of them: the list is that of the Linux engine.
    listed = {name for name in collected(files) if not left_out(name) and not expected(name)}
    assert {Path(name.partition("::")[0]).stem for name in listed} >= set(SUITE)
    passed = set(PASSED.findall(done.stdout))
    assert passed == listed, sorted(passed ^ listed)
    with capsys.disabled():
        print(f"\n  portable engine: {len(passed)} tests of the contract passed")


def collected(files: list[str]) -> set[str]:
    """Return the tests of ``none`` in some files, as this Python has them on Linux."""
    command = [*PYTEST, "--collect-only", "--only-way", "none", *files]
    done = subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return set(re.findall(r"^(tests/\S+\.py::.+)$", done.stdout, re.MULTILINE))


HOST = """\
import asyncio, sys
from union import sandbox as sb

async def main():
    async with sb.on_device.session(backend="none") as sbx:
        await sbx.run("setsid sleep 3123 & sleep 3123", stdout=True)
        print("up", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def running(argument: str) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and argument in (entry / "cmdline").read_text().split("\0"):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.spec("C7")
def test_commands_end_with_their_host(engine: Engine) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOST],
        stdout=subprocess.PIPE,
        env=engine.environment(),
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"up\n"
        assert eventually(lambda: len(running("3123")) == 2)
        os.kill(host.pid, signal.SIGKILL)
        assert eventually(lambda: not running("3123")), running("3123")


LEFT = """\
import asyncio, os, signal
from union import sandbox as sb

async def main():
    async with sb.on_device.session(backend="none") as sbx:
        print(sbx.isolation.processes)
        leave = "setsid sh -c 'echo $$ > left; exec sleep 600' &"
        result = await sbx.exec(f"{leave} until test -s left; do sleep 0.01; done; cat left")
        os.kill(int(result.stdout), signal.SIGKILL)
        print("left")

asyncio.run(main())
"""


def test_a_process_that_left_its_session_is_reported_as_not_found(engine: Engine) -> None:
    """Without a kernel that adopts orphans one can outlive its command: `isolation` says so."""
    done = engine.python("-W", "ignore", "-c", LEFT)
    assert done.stdout == "session\nleft\n", done.stderr
