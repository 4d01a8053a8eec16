"""Run one command with a time limit and leave nothing of it alive.

This file is both a module (`run_supervised`) and a script. The script is a process of its own
because it becomes a child subreaper: whatever the command starts, however it detaches itself,
ends up as a child of the script, which can then kill it by its process id. Doing this inside the
test runner would make the runner adopt strangers.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# A process that ends because its parent ended needs a moment; what outlives this was left behind.
SETTLE_S = 1.0
# Killed processes vanish at once unless the kernel holds them; then it is better to say so.
REAP_LIMIT_S = 10.0


class Outcome(subprocess.CompletedProcess[str]):
    """A finished command, with the number of its processes that were still alive after it."""

    def __init__(
        self, args: Sequence[str], *, returncode: int, stdout: str, stderr: str, left_behind: int
    ) -> None:
        """Record the result."""
        super().__init__(list(args), returncode, stdout, stderr)
        self.left_behind = left_behind


def run_supervised(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str],
    cwd: Path,
    after: Sequence[str] = (),
    inherit_streams: bool = False,
) -> Outcome:
    """Run `argv` to its end or its limit, then kill every process it left.

    `after` is a command run once all of them are gone, also when this process has been killed
    meanwhile. Raises `subprocess.TimeoutExpired` with the output so far when the limit was hit.
    """
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.TemporaryFile() as report,
    ):
        order = {
            "argv": list(argv),
            "timeout_s": timeout_s,
            "env": dict(env),
            "cwd": str(cwd),
            "after": list(after),
            "report_fd": report.fileno(),
            "parent": os.getpid(),
        }
        # The order goes through the environment of the supervisor alone: the command's own
        # environment is spelled out in it, and nothing of it shows in the process list.
        supervisor = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__))],
            stdin=None if inherit_streams else subprocess.DEVNULL,
            stdout=None if inherit_streams else out,
            stderr=None if inherit_streams else err,
            pass_fds=[report.fileno()],
            env={**os.environ, "SUPERVISE_ORDER": json.dumps(order)},
        )
        try:
            supervisor.wait(timeout=timeout_s + SETTLE_S + 3 * REAP_LIMIT_S)
        finally:
            if supervisor.poll() is None:
                supervisor.terminate()
                supervisor.wait(timeout=3 * REAP_LIMIT_S)
        stdout, stderr, text = _text(out), _text(err), _text(report)
    if not text:
        message = f"the supervisor of {list(argv)!r} ended with {supervisor.returncode}: {stderr}"
        raise RuntimeError(message)
    result = _Report(**json.loads(text))
    if result.error:
        message = f"{list(argv)!r}: {result.error}\n{stderr}"
        raise RuntimeError(message)
    if result.returncode is None:
        raise subprocess.TimeoutExpired(list(argv), timeout_s, output=stdout, stderr=stderr)
    return Outcome(
        argv,
        returncode=result.returncode,
        stdout=stdout,
        stderr=stderr,
        left_behind=result.left_behind,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    returncode: int | None
    left_behind: int
    error: str


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class _ParentEnded(BaseException):
    """Carries a termination request to the clean-up; not an `Exception`, so nothing absorbs it."""


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found.extend(int(pid) for pid in (task / "children").read_text().split())
    return found


def _reap_ended() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _settle() -> int:
    """Wait for the command's orphans to end by themselves; return how many did not."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        _reap_ended()
        left = len(_children())
        if left == 0 or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _kill_all() -> str:
    """Kill children until none is left: each death hands us its own children."""
    deadline = time.monotonic() + REAP_LIMIT_S
    while True:
        _reap_ended()
        pids = _children()
        if not pids:
            return ""
        if time.monotonic() > deadline:
            return f"processes {pids} survive SIGKILL"
        for pid in pids:
            # Ours and not yet waited for, so the id cannot have been given to another process.
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _raise_parent_ended(_signum: int, _frame: object) -> None:
    raise _ParentEnded


def _check_parent(pid: int) -> None:
    """Notice a parent that ended before the death signal was armed."""
    if os.getppid() != pid:
        raise _ParentEnded


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _supervise() -> int:
    order = json.loads(os.environ.pop("SUPERVISE_ORDER"))
    signal.signal(signal.SIGTERM, _raise_parent_ended)
    signal.signal(signal.SIGINT, _raise_parent_ended)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    returncode: int | None = None
    left_behind = 0
    errors: list[str] = []
    try:
        _check_parent(order["parent"])
        command = subprocess.Popen(order["argv"], env=order["env"], cwd=order["cwd"])
        try:
            returncode = command.wait(timeout=order["timeout_s"])
            left_behind = _settle()
        except subprocess.TimeoutExpired:
            returncode = None
    except OSError as error:
        errors.append(f"could not be started: {error}")
    except _ParentEnded:
        errors.append("ended early, by a signal or because the test runner ended")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    errors.append(_kill_all())
    if order["after"]:
        after = subprocess.run(
            order["after"], check=False, capture_output=True, text=True, timeout=REAP_LIMIT_S
        )
        if after.returncode != 0:
            errors.append(f"{order['after']!r} failed: {after.stderr.strip()}")
    report = {
        "returncode": returncode,
        "left_behind": left_behind,
        "error": "; ".join(filter(None, errors)),
    }
    os.write(order["report_fd"], json.dumps(report).encode())
    return 0


if __name__ == "__main__":
    sys.exit(_supervise())
