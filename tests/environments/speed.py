"""How fast sessions are in a container, next to the same without one in the same container.

By hand: `python -m tests.environments.speed` prints the tables, `--write` puts them into their
pages. Each figure is the median of many, taken by turns. An idle machine is needed for figures that
mean anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.environments import matrix, pod, runsc
from tests.environments.places import open_pod
from tests.environments.suite import PROJECT, user_venv

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LIMIT_S = 600.0
FORK_LIMIT = 1.5
"""How much longer fork and exec may take inside a `landlock` session, as its page promises."""

PROGRAM = """\
import asyncio, json, statistics, subprocess, sys, time, warnings
warnings.simplefilter("ignore")
from union import sandbox as sb

FORKS = '''
import os, statistics, time
taken = []
for _ in range(FORKS_EACH):
    begun = time.perf_counter()
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    taken.append(time.perf_counter() - begun)
print(statistics.median(taken))
'''.replace("FORKS_EACH", str(FORKS_EACH))

async def bare(*argv):
    child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    return (await child.communicate())[0].decode()

async def inside(sbx):
    process = await sbx.run("true")
    await process.wait()

async def timed(times, name, work):
    begun = time.perf_counter()
    await work
    times.setdefault(name, []).append(time.perf_counter() - begun)

async def main():
    times = {}
    async with sb.on_device.session(backend=BACKEND) as sbx:
        for turn in range(ROUNDS + 2):
            kept = times if turn >= 2 else {}
            await timed(kept, "bare true", bare("/bin/sh", "-c", "true"))
            await timed(kept, "true", inside(sbx))
            await timed(kept, "bare code", bare(sys.executable, "-c", "print(2+2)"))
            await timed(kept, "code", sbx.run_code("print(2+2)"))
        for _ in range(TURNS):
            # Commands of landlock run at nice 5, which counts on a busy machine only.
            nice = ["nice", "-n", "5"] if BACKEND == "landlock" else []
            found = await bare(*nice, sys.executable, "-c", FORKS)
            times.setdefault("bare fork", []).append(float(found))
            times.setdefault("fork", []).append(float(await sbx.run_code(FORKS)))
    print(json.dumps({name: statistics.median(found) for name, found in times.items()}))

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A place, the backend that is measured in it, and the page that has the table."""

    shape: pod.Pod
    backend: str
    page: Path
    mark: str


PLACES: Mapping[str, Measured] = {
    "gvisor": Measured(
        shape=pod.Pod(uid=1000, runtime=matrix.NEW_RUNSC),
        backend="userns",
        page=PROJECT / "docs" / "reference" / "portability.md",
        mark="speed",
    ),
    "landlock": Measured(
        shape=pod.Pod(uid=1000, default_profile=True),
        backend="landlock",
        page=PROJECT / "docs" / "concepts" / "landlock.md",
        mark="speed",
    ),
}
LINES = {
    '`run("true")`': ("bare true", "true"),
    '`run_code("print(2+2)")`': ("bare code", "code"),
    "fork and exec of `true`, by a program": ("bare fork", "fork"),
}


def lacking(name: str) -> str | None:
    """Return what this machine lacks for a place, or None."""
    return matrix.lacking({"gvisor": "gvisor-user", "landlock": "default-user"}[name])


def measure(name: str, *, rounds: int = 30, forks: int = 200, turns: int = 9) -> dict[str, float]:
    """Return the median seconds of each operation, bare and in a session."""
    place, venv = PLACES[name], user_venv()
    shape = place.shape
    if shape.runtime == matrix.NEW_RUNSC:
        shape = dataclasses.replace(shape, runtime=runsc.command())
    head = f"BACKEND, ROUNDS, FORKS_EACH, TURNS = {place.backend!r}, {rounds}, {forks}, {turns}\n"
    env = {"PATH": f"{venv / 'bin'}:/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": str(venv)}
    with open_pod(name, shape, readable=[venv]) as opened:
        done = opened.run(
            [str(venv / "bin" / "python"), "-c", head + PROGRAM], env=env, timeout_s=LIMIT_S
        )
    if done.returncode != 0:
        message = f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        raise RuntimeError(message)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: Mapping[str, float]) -> str:
    """Return the table of one place."""
    rows = ["| | bare, in the same container | session | multiple |", "|---|--:|--:|--:|"]
    for title, (bare, session) in LINES.items():
        times = f"{found[bare] * 1000:.2f} ms | {found[session] * 1000:.2f} ms"
        rows.append(f"| {title} | {times} | {found[session] / found[bare]:.2f} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="speed", description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    parser.add_argument("places", nargs="*", choices=(*PLACES, []), default=[])
    options = parser.parse_args()
    for name in options.places or PLACES:
        if (reason := lacking(name)) is not None:
            parser.error(reason)
        made = table(measure(name))
        print(f"{name}\n{made}")
        if options.write:
            place = PLACES[name]
            text = place.page.read_text(encoding="utf-8")
            begin, end = f"<!-- {place.mark}: begin -->\n", f"<!-- {place.mark}: end -->\n"
            before, _, rest = text.partition(begin)
            after = rest.partition(end)[2]
            place.page.write_text(f"{before}{begin}{made}{end}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
