"""``sbx repl``: cells from stdin and at a terminal, interrupts, pictures, exit codes."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.cli.tool import PROGRAM, sbx
from tests.conftest import ISOLATED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.spec("K4")
WAY = ISOLATED[0]
AT_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {PROGRAM}"
"""So that Ctrl-C is a signal to the program."""


def test_cells_from_stdin_share_variables_and_print_results():
    done = sbx(
        "repl",
        "--backend",
        WAY,
        input="x = 41\ndef f(n):\n    return n + 1\n\nprint('out')\nf(x)\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "out\n42\n"


def test_the_last_failure_is_the_exit_code():
    done = sbx("repl", "--backend", WAY, input="1 / 0\n")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert sbx("repl", "--backend", WAY, input="1 / 0\n5\n").returncode == 0


def test_other_languages_timeouts_and_directories(tmp_path: Path):
    (tmp_path / "below").mkdir()
    done = sbx(
        "repl", "--backend", WAY, "--language", "bash", "--work-dir", str(tmp_path), "--cwd",
        "below", "--timeout", "0.5", input="x=1\nsleep 30; echo NO\necho $x ${PWD##*/}\n",
    )  # fmt: skip
    assert done.stdout == "1 below\n"
    assert done.returncode == 0


def test_a_lost_interpreter_is_reported_and_replaced():
    done = sbx("repl", "--backend", WAY, input="x = 1\nimport os; os._exit(3)\n'x' in globals()\n")
    assert done.stdout == "False\n"
    assert "the variables are gone: the interpreter exited with code 3" in done.stderr


def test_pictures_are_saved_and_named(tmp_path: Path):
    (tmp_path / "picture-1.png").write_bytes(b"kept")
    code = "class P:\n    def _repr_png_(self): return b'\\x89PNG'\n\nP()\n"
    done = sbx("repl", "--backend", WAY, "--pictures", str(tmp_path), input=code)
    assert done.stdout == f"saved {tmp_path}/picture-2.png\n"
    assert (tmp_path / "picture-1.png").read_bytes() == b"kept"
    assert (tmp_path / "picture-2.png").read_bytes() == b"\x89PNG"


class Terminal:
    """``sbx repl`` at a terminal of its own."""

    def __init__(self, near: int) -> None:
        self._near = near
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._near, text.encode())

    def wait_for(self, text: str, *, after: int = 0, pressing: str = "") -> int:
        """Wait for ``text``, typing ``pressing`` each second until it is there."""
        end = time.monotonic() + 40
        press_at = time.monotonic() if pressing else end
        while text not in self.seen[after:]:
            assert time.monotonic() < end, f"{text!r} is not in {self.seen[after:]!r}"
            if time.monotonic() >= press_at:
                self.type(pressing)
                press_at += 1
            wait_s = min(press_at, end) - time.monotonic()
            ready, _, _ = select.select([self._near], [], [], max(wait_s, 0))
            if ready:
                self.seen += os.read(self._near, 65536).decode("utf-8", "replace")
        return self.seen.index(text, after) + len(text)


@pytest.fixture
def terminal() -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    near, far = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-I", "-c", AT_TERMINAL, "repl", "--backend", WAY],
        stdin=far,
        stdout=far,
        stderr=far,
        start_new_session=True,
    )
    os.close(far)
    try:
        yield Terminal(near), program
    finally:
        if program.poll() is None:
            program.kill()
        program.wait()
        with contextlib.suppress(OSError):
            os.close(near)


def test_ctrl_c_interrupts_the_cell_and_keeps_the_variables(terminal):
    screen, program = terminal
    at = screen.wait_for(">>> ")
    screen.type("x = 6 * 7\n")
    at = screen.wait_for(">>> ", after=at)
    screen.type("if x:\n")
    at = screen.wait_for("... ", after=at)
    # CPython's readline misses a signal that arrives between the prompt and the wait for a key.
    at = screen.wait_for(">>> ", after=at, pressing="\x03\x03\x03")
    # So one that was pressed again may take effect only now, and abandon a line.
    at = screen.wait_for("at the prompt", after=at, pressing="print('at', 'the', 'prompt')\n")
    for line in ("while True:\n", "    if x == 42: x = print('begun', flush=True) or 43\n"):
        screen.type(line)
        at = screen.wait_for("... ", after=at)
    screen.type("\n")
    at = screen.wait_for("\nbegun", after=at)
    screen.type("\x03")
    at = screen.wait_for("KeyboardInterrupt", after=at)
    at = screen.wait_for(">>> ", after=at)
    screen.type("x\n")
    at = screen.wait_for("\r\n43\r\n", after=at)
    screen.wait_for(">>> ", after=at)  # a key that is typed before is no key of the prompt
    screen.type("\x04")
    assert program.wait(timeout=40) == 0
