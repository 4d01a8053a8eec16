"""`make soak`: mixed load with kills; after each round, check for growth and leftovers.

One process opens and closes sessions, locally and on its own server, and runs commands with known
results. Meanwhile it kills its launcher, its sandboxes, its server and other host programs. A job
may then end in an expected error, never in a wrong result.
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
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="minimum duration (3)")
    parser.add_argument("--most-minutes", type=float, help="maximum duration (same as --minutes)")
    parser.add_argument("--runs", type=int, default=0, help="continue until this many commands ran")
    parser.add_argument(
        "--sessions", type=int, default=0, help="and this many sessions were opened"
    )
    parser.add_argument("--kills", type=int, default=0, help="and this many processes were killed")
    parser.add_argument(
        "--round-seconds", type=float, default=10.0, help="duration of a round (10)"
    )
    parser.add_argument("--seed", type=int, help="random seed (from the clock)")
    parser.add_argument("--workers", type=int, default=6, help="concurrent sessions (6)")
    parser.add_argument("--no-kills", action="store_true", help="load only")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--record", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(given)
    if not 0 < options.minutes <= 24 * 60 or not 0 < options.round_seconds <= 600:
        parser.error("--minutes and --round-seconds must be more than 0, and not days")
    if not 1 <= options.workers <= 64:
        parser.error("--workers must be from 1 to 64")
    options.most_minutes = max(options.minutes, options.most_minutes or 0)
    if options.seed is None:
        options.seed = int(time.time())
    return options


async def soak(options: argparse.Namespace) -> Summary:
    """Run rounds until all requested counts are reached, or the time is over."""
    begun = time.monotonic()
    chance = random.Random(options.seed)
    async with Soak(chance, workers=options.workers, kills=not options.no_kills) as it:
        while True:
            await it.round(options.round_seconds)
            passed = (time.monotonic() - begun) / 60
            report(it, passed)
            done = it.runs >= options.runs and it.sessions >= options.sessions
            done = done and (options.no_kills or it.killer.kills >= options.kills)
            if passed >= options.most_minutes or (done and passed >= options.minutes) or it.wrong:
                break
    return it.summary(seconds=time.monotonic() - begun)


def report(it: Soak, minutes: float) -> None:
    """Print progress: one changing line on a terminal, otherwise a line per minute."""
    state = it.looks[-1]
    text = (
        f"{minutes:6.1f} min  {it.runs} runs  {it.sessions} sessions  {it.killer.kills} kills  "
        f"{len(it.wrong)} wrong  {state['resident_kib'] // 1024} MiB  "
        f"{state['descriptors']} descriptors "
    )
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}")
    elif int(minutes) != it.reported_at:
        it.reported_at = int(minutes)
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def go_apart() -> None:
    """Continue in a new mount namespace if possible: mounts of other programs must not count."""
    mark = "SOAK_IS_APART"
    enter = ["unshare", "--mount"]
    if mark in os.environ or os.geteuid() != 0 or shutil.which(enter[0]) is None:
        return
    if subprocess.run([*enter, "true"], check=False, capture_output=True).returncode == 0:
        argv = [*enter, sys.executable, "-m", "scripts.soak", *sys.argv[1:]]
        os.execvpe(argv[0], argv, os.environ | {mark: "1"})


def machine() -> dict[str, object]:
    """Describe the machine, without its name."""
    return {
        "kernel": platform.release().split("-")[0],
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "root": os.geteuid() == 0,
    }


def main() -> int:
    """Return 0 if every result was right, nothing has grown and nothing is left."""
    options = arguments()
    go_apart()
    # Refusals and lost servers are part of the load, so they are not logged.
    logging.getLogger("union.sandbox").addHandler(logging.NullHandler())
    summary = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "seed": options.seed,
        **asyncio.run(soak(options)),
    }
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    text = json.dumps(summary, indent=2) + "\n"
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text)
    # At the end, where the reader of a log finds it.
    for problem in summary["problems"]:
        lines = problem.strip().splitlines()
        sys.stdout.write(f"wrong: {lines[0][:300]} ... {lines[-1][:300]}\n")
    if options.record:
        PAGE.write_text(page.render(summary))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
