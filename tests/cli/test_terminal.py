"""``sbx`` at a real terminal: tmux presses the keys and looks at the screen."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.tool import on_path
from tests.conftest import ISOLATED, descendants, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.spec("H")
WAY = ISOLATED[0]
PROMPT = r"^\[sbx\] ~\$ $"
"""The prompt of the shell inside, before any input."""


class Terminal:
    """A terminal of tmux with a plain shell at its prompt."""

    def __init__(self, place: Path) -> None:
        self._socket = str(place / "tmux")
        self._env = {**on_path(str(place)), "SHELL": "/bin/bash"}
        rc = place / "rc"
        rc.write_text("PS1='outer> '\n")
        shell = f"exec bash --rcfile {rc}"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", shell)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *words],
            env=self._env,
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.stdout

    @property
    def pid(self) -> int:
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    def keys(self, *keys: str) -> None:
        """Named keys, such as Up and C-c."""
        self._tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def enter(self, text: str) -> None:
        self.type(text)
        self.keys("Enter")

    def cat(self, text: str, before: str = "") -> None:
        """Runs ``cat`` and waits until it surely reads: a shell on its way to it may miss a key."""
        self.enter(f"{before}sh -c 'echo begun-{text}; exec cat'")
        self.until(f"^begun-{text}$")
        self.enter(text)
        self.until(f"^{text}$", times=2)

    def resize(self, rows: int, cols: int) -> None:
        self._tmux("resize-window", "-x", str(cols), "-y", str(rows))

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-J", "-S", "-200")

    def until(self, pattern: str, times: int = 1) -> None:
        """Waits until the screen shows it; what was typed must not match it."""
        found = re.compile(pattern, re.MULTILINE)
        end = time.monotonic() + 40
        while len(found.findall(screen := self.screen())) < times:
            assert time.monotonic() < end, f"{pattern!r} did not come:\n{screen.rstrip()}"
            time.sleep(0.05)

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: apt-get install tmux")
    (tmp_path / "work").mkdir()
    made = Terminal(tmp_path)
    try:
        made.until("outer> $")
        yield made
    finally:
        made.close()


def enter_shell(terminal: Terminal, *, way: str = WAY) -> None:
    terminal.enter(
        f'cd "$(dirname "$(command -v sbx)")"; sbx shell --backend {way} --work-dir work'
    )
    terminal.until(PROMPT)


def assert_left(terminal: Terminal, code: int) -> None:
    """The outer shell has its terminal back, as it was."""
    terminal.enter("echo code=$?; stty -a | grep -wo -e icanon -e echo -e isig -e onlcr | xargs")
    terminal.until(rf"^code={code}$")
    terminal.until("^onlcr isig icanon echo$")


@pytest.mark.parametrize("way", ISOLATED)
def test_a_shell_behaves_like_a_shell(terminal: Terminal, way: str) -> None:
    enter_shell(terminal, way=way)
    terminal.enter("echo first-$((1 + 1))")
    terminal.until("^first-2$")
    terminal.until(PROMPT)
    terminal.keys("Up", "Enter")
    terminal.until("^first-2$", times=2)
    terminal.until(PROMPT)
    terminal.type("echo ac-$((1 + 1))")
    terminal.keys(*["Left"] * len("c-$((1 + 1))"))
    terminal.enter("b")
    terminal.until("^abc-2$")
    terminal.until(PROMPT)

    terminal.cat("one")
    terminal.keys("C-c")
    terminal.until(PROMPT)
    terminal.enter("echo interrupted=$?")
    terminal.until("^interrupted=130$")

    terminal.cat("two")
    terminal.keys("C-z")
    terminal.until(r"^\[1\]\+ +Stopped")
    terminal.until(PROMPT)
    terminal.enter("jobs -l; fg")
    terminal.until(r"^\[1\]\+ +\d+ Stopped")
    terminal.until("^sh -c 'echo begun-two")
    terminal.enter("three")
    terminal.until("^three$", times=2)
    terminal.keys("C-c")
    terminal.until(PROMPT)
    terminal.enter("echo continued=$?")
    terminal.until("^continued=130$")

    terminal.enter("stty size")
    terminal.until("^30 100$")
    terminal.resize(25, 90)
    terminal.enter("stty size; echo $LINES:$COLUMNS; echo $TERM; tty")
    terminal.until("^25 90$")
    terminal.until("^25:90$")
    terminal.until("^(tmux|screen)")
    terminal.until("^/dev/pts/0$")

    terminal.enter("exit 5")
    terminal.until("outer> $")
    assert_left(terminal, 5)


def test_an_editor_opens_draws_and_saves(terminal: Terminal, tmp_path: Path) -> None:
    if shutil.which("vi") is None:
        pytest.skip("vi is not installed: apt-get install vim-tiny")
    enter_shell(terminal)
    terminal.enter("vi note")
    terminal.until("^~", times=10)
    terminal.type("iwritten inside")
    terminal.keys("Escape")
    terminal.enter(":wq")
    terminal.until(PROMPT)
    terminal.enter("cat note | tr a-z A-Z")
    terminal.until("^WRITTEN INSIDE$")
    # Before it, the terminal is in the mode of the command: a Ctrl-D there is no key for the shell.
    terminal.until(PROMPT)
    terminal.keys("C-d")
    terminal.until("outer> $")
    assert (tmp_path / "work/note").read_text() == "written inside\n"
    assert_left(terminal, 0)


def _sbx_pid(terminal: Terminal) -> int:
    """The one that the outer shell has started."""
    children = Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def test_a_shell_that_is_ended_from_outside_gives_the_terminal_back(terminal: Terminal) -> None:
    enter_shell(terminal)
    pid = _sbx_pid(terminal)
    below = descendants(pid)
    os.kill(pid, signal.SIGTERM)
    terminal.until("outer> $")
    assert_left(terminal, 128 + signal.SIGTERM)
    assert eventually(lambda: not any(Path(f"/proc/{p}").exists() for p in below))


def test_a_shell_that_is_stopped_from_outside_goes_on(terminal: Terminal) -> None:
    enter_shell(terminal)
    os.kill(_sbx_pid(terminal), signal.SIGSTOP)
    terminal.until(r"^\[1\]\+ +Stopped")
    terminal.until("^outer> $")
    terminal.enter("fg")
    terminal.until("^sbx shell")
    terminal.keys("Enter")
    terminal.until(PROMPT)
    terminal.enter("echo back-$((1 + 1))")
    terminal.until("^back-2$")
    terminal.enter("exit")
    terminal.until("outer> $")
    assert_left(terminal, 0)


def test_ctrl_c_ends_a_command_without_a_terminal(terminal: Terminal) -> None:
    terminal.cat("one", f"sbx run --backend {WAY} -- ")
    terminal.keys("C-c")
    terminal.until("outer> $")
    assert_left(terminal, 130)


def test_a_command_with_a_terminal_sees_every_key(terminal: Terminal) -> None:
    source = "import os, tty; tty.setraw(0); print('ready', end='\\r\\n'); print(os.read(0, 9))"
    terminal.enter(f"sbx run --backend {WAY} --tty --python {shlex.quote(source)}")
    terminal.until("^ready$")
    terminal.keys("C-c")
    terminal.until(r"^b'\\x03'$")
    terminal.until("outer> $")
    assert_left(terminal, 0)


def test_a_program_that_is_not_there_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.enter(f"sbx run --backend {WAY} --tty -- no-such-program")
    terminal.until("^no-such-program: not found in the sandbox$")
    terminal.until("outer> $")
    assert_left(terminal, 127)
