"""Run programs in parallel, with one line at the start and one at the end of each.

``make check``, ``make test`` and ``make test-all`` consist of such programs. The output of a
program goes to the terminal, or to a file that is printed at its end: all of it if it failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.1
NO_PLUGIN = ("-p", "no:anyio")
"""A plugin of pytest that no test uses: it loads another event loop in every worker."""


def tool(name: str) -> str:
    """Return the path of a program in the current virtualenv."""
    return str(Path(sys.executable).parent / name)


STATIC = {
    "style": [tool("ruff"), "check", "."],
    "format": [tool("ruff"), "format", "--check", "--quiet", "."],
    "layers": [tool("lint-imports")],
    "types": [tool("mypy")],
}
"""The static checks, as in `make lint types`."""


class Step:
    """One program. ``log`` receives its output; after ``limit_s`` seconds it is killed."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        good: Callable[[int], bool] = lambda code: code == 0,
        verbose: bool = False,
        limit_s: float | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._good = good
        self._verbose = verbose
        self._limit_s = limit_s
        self._begun = time.monotonic()
        self._code: int | None = None
        self.processor_s = 0.0
        """What it has used, with the programs that it has waited for, once it has ended."""
        report(f"{name}: begun" + ("" if log is None else ", in the background"))
        with log.open("wb") if log is not None else nullcontext() as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | (env or {}),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # No effect if it has ended.
        self._process.wait()

    @property
    def failed(self) -> bool:
        """Return whether it has ended with an error."""
        return self._code is not None and not self._good(self._code)

    def code(self) -> int | None:
        """Return the exit code, or None while it runs; report the end once."""
        taken = time.monotonic() - self._begun
        if self._limit_s is not None and taken > self._limit_s:
            self._process.kill()
        if self._code is None and (code := self._poll()) is not None:
            self._code = code
            if self.log is not None and (self._verbose or self.failed):
                print(f"\n{self.log.read_text(errors='replace')}", end="", flush=True)
            end = f"FAILED, exit code {code}," if self.failed else "done"
            report(f"{self.name}: {end} in {taken:.0f}s, {self.processor_s:.0f}s of processors")
        return self._code

    def _poll(self) -> int | None:
        """Like ``Popen.poll``, and note the processor time of the program and of its children."""
        if self._process.returncode is None:
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self.processor_s = used.ru_utime + used.ru_stime
        return self._process.returncode


def report(line: str) -> None:
    """Print one line of progress, on a new line after the dots of pytest."""
    print(f"\n--- {line} ---", flush=True)


def wait(steps: Iterable[Step]) -> None:
    """Wait until all have ended, and report each end."""
    steps = list(steps)
    while None in [step.code() for step in steps]:
        time.sleep(POLL_S)
