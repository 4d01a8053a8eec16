"""Makes system calls of the launcher, and of what it starts, fail: by strace, from outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest

ODD = ("EXFULL", 54)
"""An errno that no kernel function here gives by itself, so that it is surely ours."""
_ATTACH_S = 20.0


class Strace:
    """Attached to a process while the block runs; ``expressions`` are strace's own ``-e``.

    The n-th call is counted for each process by itself.
    """

    def __init__(self, pid: int, log: Path, *expressions: str) -> None:
        program = shutil.which("strace")
        if program is None:
            pytest.skip("needs strace: apt-get install strace")
        self._pid = pid
        self._log = log
        options = [word for each in expressions for word in ("-e", each)]
        self._argv = [program, "-f", "-qq", "-o", str(log), *options, "-p", str(pid)]

    def __enter__(self) -> Self:
        self._strace = subprocess.Popen(self._argv, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + _ATTACH_S
        while not self._is_attached():
            if self._strace.poll() is not None and self.text:
                break  # what it attached to was killed by it already
            if self._strace.poll() is not None or time.monotonic() > end:
                self._strace.kill()
                stderr = self._strace.communicate()[1]
                if _may_attach(self._argv[0]):
                    pytest.fail(f"strace did not attach: {stderr}")
                pytest.skip(
                    "strace may not attach to a process here: run as root, allow CAP_SYS_PTRACE in "
                    f"a container, or sysctl kernel.yama.ptrace_scope=0 ({stderr})"
                )
            time.sleep(0.002)
        return self

    def _is_attached(self) -> bool:
        try:
            status = Path(f"/proc/{self._pid}/status").read_text()
        except OSError:
            return True  # killed by it, and reaped
        return "TracerPid:\t0" not in status

    def __exit__(self, *_: object) -> None:
        self._strace.terminate()
        self._strace.communicate(timeout=10)

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def injected(self) -> list[str]:
        """The calls that were made to fail."""
        return [line for line in self.text.splitlines() if "(INJECTED)" in line]

    def most_calls(self) -> dict[str, int]:
        """How often each call was made by the process that made it most often."""
        counts: dict[tuple[str, str], int] = {}
        for line in self.text.splitlines():
            if found := re.match(r"(\d+) +(\w+)\(", line):
                key = (found[1], found[2])
                counts[key] = counts.get(key, 0) + 1
        most: dict[str, int] = {}
        for (_, call), number in counts.items():
            most[call] = max(most.get(call, 0), number)
        return most


def _may_attach(program: str) -> bool:
    """Whether strace can be attached to any process of ours; one that has died refuses, too."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        argv = [program, "-qq", "-o", os.devnull, "-p", str(sleeper.pid)]
        strace = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        while strace.poll() is None:
            if "TracerPid:\t0" not in Path(f"/proc/{sleeper.pid}/status").read_text():
                return True
            time.sleep(0.002)
        return False
    finally:
        sleeper.kill()
        sleeper.wait()
        strace.wait()
