"""`make soak`: mixed load with kills, and a look after each round that nothing has grown or stayed.

One process opens and closes sessions, here and on a server of its own, and gives them commands that
each have a known answer. Meanwhile its launcher, its sandboxes, its server and whole programs
beside it are killed. A job may end in an honest error then, never in a wrong result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.soaking import page
from scripts.soaking.soak import Soak

if TYPE_CHECKING:
    from scripts.soaking.soak import Summary

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "soak.md"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long, at least (3)")
    parser.add_argument("--most-minutes", type=float, help="how long, at most (as --minutes)")
    parser.add_argument("--runs", type=int, default=0, help="go on until so many commands ran")
    parser.add_argument("--sessions", type=int, default=0, help="and so many sessions were opened")
    parser.add_argument("--kills", type=int, default=0, help="and so many processes were killed")
    parser.add_argument("--round-seconds", type=float, default=10.0, help="between two looks (10)")
    parser.add_argument("--seed", type=int, help="of everything that is random (from the clock)")
    parser.add_argument("--workers", type=int, default=6, help="sessions in use at a time (6)")
    parser.add_argument("--no-kills", action="store_true", help="load alone")
    parser.add_argument("--output", type=Path, help="a file for the JSON, too")
    parser.add_argument("--record", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args(given)
    if not 0 < asked.minutes <= 24 * 60 or not 0 < asked.round_seconds <= 600:
        parser.error("--minutes and --round-seconds must be more than 0, and not days")
    if not 1 <= asked.workers <= 64:
        parser.error("--workers must be from 1 to 64")
    asked.most_minutes = max(asked.minutes, asked.most_minutes or 0)
    if asked.seed is None:
        asked.seed = int(time.time())
    return asked


async def soak(asked: argparse.Namespace) -> Summary:
    """Runs rounds until everything that was asked for has been done, or the time is over."""
    begun = time.monotonic()
    chance = random.Random(asked.seed)
    async with Soak(chance, workers=asked.workers, kills=not asked.no_kills) as it:
        while True:
            await it.round(asked.round_seconds)
            passed = (time.monotonic() - begun) / 60
            tell(it, passed)
            done = it.runs >= asked.runs and it.sessions >= asked.sessions
            done = done and (asked.no_kills or it.killer.kills >= asked.kills)
            if passed >= asked.most_minutes or (done and passed >= asked.minutes) or it.wrong:
                break
    return it.summary(seconds=time.monotonic() - begun)


def tell(it: Soak, minutes: float) -> None:
    """Progress, for a person who watches; a line each minute for one who reads it later."""
    state = it.looks[-1]
    text = (
        f"{minutes:6.1f} min  {it.runs} runs  {it.sessions} sessions  {it.killer.kills} kills  "
        f"{len(it.wrong)} wrong  {state['resident_kib'] // 1024} MiB  "
        f"{state['descriptors']} descriptors "
    )
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}")
    elif int(minutes) != it.told_at:
        it.told_at = int(minutes)
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def go_apart() -> None:
    """Go on with a table of mounts of our own, if we may: others on the machine make some, too."""
    mark = "SOAK_IS_APART"
    enter = ["unshare", "--mount"]
    if mark in os.environ or os.geteuid() != 0 or shutil.which(enter[0]) is None:
        return
    if subprocess.run([*enter, "true"], check=False, capture_output=True).returncode == 0:
        argv = [*enter, sys.executable, "-m", "scripts.soak", *sys.argv[1:]]
        os.execvpe(argv[0], argv, os.environ | {mark: "1"})


def machine() -> dict[str, object]:
    """The kind of machine, without its name."""
    return {
        "kernel": platform.release().split("-")[0],
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "root": os.geteuid() == 0,
    }


def main() -> int:
    """Returns 0 if every result was right, nothing has grown and nothing is left."""
    asked = arguments()
    go_apart()
    # Refusals and lost servers are part of the load, not news.
    logging.getLogger("union.sandbox").addHandler(logging.NullHandler())
    summary = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "seed": asked.seed,
        **asyncio.run(soak(asked)),
    }
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    text = json.dumps(summary, indent=2) + "\n"
    sys.stdout.write(text)
    if asked.output is not None:
        asked.output.write_text(text)
    if asked.record:
        PAGE.write_text(page.render(summary))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
