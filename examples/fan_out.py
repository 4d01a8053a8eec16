"""Fifty sessions in parallel, a few at a time, with failures as data.

    python examples/fan_out.py [--backend userns] [--sessions 50] [--at-once 8]

Each job has its own session, so no job sees the files of another. Three of the fifty fail on
purpose; the list of outcomes has their failures next to the results of the others. On a terminal a
line shows the progress.

Prints::

    50 sessions, at most 8 at once
    47 results, the largest is 49*49 = 2401
    3 failures
      13  exit code 1: ValueError: 13 is unlucky
      26  ended by the sandbox: timeout
      39  ended by a signal: exit code 137
    every session saw only its own file
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass

from union import sandbox as sb

WORK = """\
import os, signal, sys, time

number = int(open("number.txt").read())
assert [name for name in os.listdir() if not name.startswith(".")] == ["number.txt"]
if number == 13:
    raise ValueError(f"{number} is unlucky")
if number == 26:
    time.sleep(600)
if number == 39:
    os.kill(os.getpid(), signal.SIGKILL)
print(number * number)
"""
TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one job: a result, or the reason why there is none."""

    number: int
    result: int | None = None
    failure: str = ""


async def work(number: int, backend: str) -> Outcome:
    """Run one job in its own session. Failures are returned, not raised."""
    try:
        # One command per session, so no further sandbox needs to be prepared.
        async with sb.on_device.session(backend=backend, warm=0) as sbx:
            await sbx.put_bytes("number.txt", str(number).encode())
            result = await sbx.exec(WORK, script_type="python", timeout_s=TIMEOUT_S)
    except sb.SandboxError as exc:
        return Outcome(number, failure=f"could not be run: {exc}")
    if result.ok:
        return Outcome(number, result=int(result.stdout))
    if result.termination_reason == "signal":
        return Outcome(number, failure=f"ended by a signal: exit code {result.returncode}")
    if result.termination_reason:
        return Outcome(number, failure=f"ended by the sandbox: {result.termination_reason}")
    last = result.stderr.strip().splitlines()[-1:]
    return Outcome(number, failure=f"exit code {result.returncode}: {''.join(last)}")


class Progress:
    """A progress line, on a terminal only."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown = sys.stderr.isatty()

    def show(self, done: int, failed: int) -> None:
        """Redraw the bar."""
        if self._shown:
            bar = "#" * (30 * done // self._total)
            line = f"\r[{bar:<30}] {done} of {self._total}, {failed} failed "
            print(line, end="\n" if done == self._total else "", file=sys.stderr, flush=True)


async def fan_out(sessions: int, at_once: int, backend: str) -> list[Outcome]:
    """Run all jobs, ``at_once`` at a time; return the outcomes in the order of their numbers."""
    gate = asyncio.Semaphore(at_once)
    progress = Progress(sessions)
    outcomes: list[Outcome] = []

    async def in_turn(number: int) -> None:
        async with gate:
            outcomes.append(await work(number, backend))
        progress.show(len(outcomes), sum(bool(outcome.failure) for outcome in outcomes))

    # The group waits for all its tasks, so after Ctrl-C every session is closed first.
    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(in_turn(number))
    return sorted(outcomes, key=lambda outcome: outcome.number)


async def main(sessions: int, at_once: int, backend: str) -> None:
    """Run all jobs and print a summary."""
    print(f"{sessions} sessions, at most {at_once} at once")
    outcomes = await fan_out(sessions, at_once, backend)
    results = {o.number: o.result for o in outcomes if o.result is not None}
    failures = [outcome for outcome in outcomes if outcome.failure]
    most = max(results)
    print(f"{len(results)} results, the largest is {most}*{most} = {results[most]}")
    print(f"{len(failures)} failures")
    for outcome in failures:
        print(f"  {outcome.number}  {outcome.failure}")
    if not any("AssertionError" in outcome.failure for outcome in failures):
        print("every session saw only its own file")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Many sessions in parallel.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    parser.add_argument("--sessions", type=int, default=50, help="how many (default: 50)")
    parser.add_argument("--at-once", type=int, default=8, help="how many at a time (default: 8)")
    args = parser.parse_args()
    asyncio.run(main(args.sessions, args.at_once, args.backend))
