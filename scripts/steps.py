"""Programs that run beside each other, each with one line when it begins and one when it ends.

``make check`` and ``make test`` are made of them. The output of a program goes to the terminal, or
to a file that is shown at its end: all of it if the program failed.
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


def tool(name: str) -> str:
    """Return the path of a program of the virtualenv that runs this."""
    return str(Path(sys.executable).parent / name)


STATIC = {
    "style": [tool("ruff"), "check", "."],
    "format": [tool("ruff"), "format", "--check", "--quiet", "."],
    "layers": [tool("lint-imports")],
    "types": [tool("mypy")],
}
"""The checks that run no code of the project, as `make lint types` makes them."""


class Step:
    """One program. With ``log``, its output goes there; with ``limit_s``, it is killed then."""

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
        self._log = log
        self._good = good
        self._verbose = verbose
        self._limit_s = limit_s
        self._begun = time.monotonic()
        self._code: int | None = None
        say(f"{name}: begun" + ("" if log is None else ", beside the others"))
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
        self._process.terminate()  # does nothing to one that has ended
        self._process.wait()

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self._code is not None and not self._good(self._code)

    def code(self) -> int | None:
        """Return the exit code, and report the end when it is first seen; None while it runs."""
        taken = time.monotonic() - self._begun
        if self._limit_s is not None and taken > self._limit_s:
            self._process.kill()
        if self._code is None and (code := self._process.poll()) is not None:
            self._code = code
            if self._log is not None and (self._verbose or self.failed):
                print(f"\n{self._log.read_text(errors='replace')}", end="", flush=True)
            end = f"FAILED, exit code {code}," if self.failed else "done"
            say(f"{self.name}: {end} in {taken:.0f}s")
        return self._code


def say(line: str) -> None:
    """Print one line of progress; the dots of a run of tests may precede it."""
    print(f"\n--- {line} ---", flush=True)


def wait(steps: Iterable[Step]) -> None:
    """Wait until all have ended, reporting each as it ends."""
    steps = list(steps)
    while None in [step.code() for step in steps]:
        time.sleep(POLL_S)
