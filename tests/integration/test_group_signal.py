"""A signal for the command's own process group, beside the one for the whole process tree."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from tests.conftest import session_of

from union.sandbox._linux.run import LocalRun

if TYPE_CHECKING:
    from union import sandbox as sb

# The command and the child that it waits for are in one group; the daemon has a session of its own.
_PROGRAM = """
import os, signal, subprocess, sys, time

caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append("command"))
report = (
    "import signal, sys, time\\n"
    "signal.signal(signal.SIGINT, lambda *_: sys.exit(3))\\n"
    "print('up', flush=True)\\n"
    "sys.stdin.readline()\\n"
    "sys.exit(0)\\n"
)
pipe = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child = subprocess.Popen([sys.executable, "-c", report], **pipe)
daemon = subprocess.Popen([sys.executable, "-c", report], start_new_session=True, **pipe)
for process in (child, daemon):
    assert process.stdout.readline() == "up\\n"
print("ready", flush=True)
print(child.wait(), flush=True)
while not caught:
    time.sleep(0.01)
# The daemon has ended with 3 if the signal reached it, and ends with 0 otherwise.
daemon.communicate("end\\n")
print(daemon.returncode, flush=True)
"""


async def _interrupt(sbx: sb.Session, *, group: bool) -> tuple[str, str]:
    """Return the exit codes of the command's child and of its daemon after SIGINT."""
    process = await sbx.run(_PROGRAM, script_type="python", stdout=True)
    lines = process.iter_stdout_lines()
    assert await anext(lines) == "ready"
    run = process._sink.run  # a session offers signals to the whole tree only
    assert isinstance(run, LocalRun)
    run.signal(signal.SIGINT, group=group)
    found = (await anext(lines), await anext(lines))
    assert await process.wait() == 0
    return found


@pytest.mark.parametrize("backend", ["userns", "bubblewrap", "none"])
@pytest.mark.filterwarnings("ignore:.*isolates nothing")
async def test_a_group_signal_reaches_the_command_and_its_child_but_no_daemon(backend: str) -> None:
    async with session_of(backend) as sbx:
        assert await _interrupt(sbx, group=False) == ("3", "3"), "the whole tree"
        assert await _interrupt(sbx, group=True) == ("3", "0"), "only the group"
