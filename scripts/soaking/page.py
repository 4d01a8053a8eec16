"""docs/reference/soak.md, made from the summary of a soak."""

from __future__ import annotations

from typing import Any

__all__ = ["render"]

TEXT = """\
# The soak

`make soak MINUTES=...` puts one process under mixed load: sessions opened and closed on this
machine (both isolating backends) and on a server of its own, shell and Python commands, time-outs,
large outputs, standard input, terminals, files, an allow-list to a service on loopback,
cancellations. Meanwhile launchers, sandboxes, waiting processes, the server and whole host programs
are killed at random moments. After every round all sessions are closed, and what the process holds
is compared with what it held before.

A call may end in an error because of a kill: one of the codes that such a kill can cause, in a
session whose processes it hit ([which](../../scripts/soaking/excuses.py)). Any other error, a wrong
result, an invented exit code, something left behind, or growth fails the soak.

Memory is judged after a warm-up: a third of the rounds, at most five minutes. From then on it may
grow by less than {kib_per_1000_runs:g} KiB per 1,000 commands, by least squares over all rounds:
one object kept of each command is more. Growth of less than {steps_kib} KiB in all is not judged,
since allocators take memory in steps. Everything else must not grow at all.

This page is written by `make soak`, from its own summary; no figure is typed by hand.

## Result of {date}

{verdict}, on {cores} {machine} cores, Linux {kernel}, Python {python}, as {user}; seed {seed}.

| | |
|---|---:|
| duration | {minutes:.0f} minutes, {rounds} rounds, {warm_rounds} of them warm-up |
| commands run, in one process | {runs:,} |
| sessions opened and closed | {sessions:,} |
| processes killed | {kills:,} |
| of these, in sandboxes half made, so that any session here may be hit | {unknown} |
| wrong results | {wrong} |
| left behind at the end | {left} |

### What the process held

| | after warm-up | at the end | growth per 1,000 runs |
|---|---:|---:|---:|
{levels}

### Jobs done

| job | times |
|---|---:|
{jobs}

### Killed

| what | times |
|---|---:|
{killed}

### Errors that callers saw because of that

| error | times |
|---|---:|
{errors}
"""
NAMES = {
    "resident_kib": "memory, KiB",
    "descriptors": "descriptors",
    "threads": "threads",
    "processes": "processes of sandboxes",
    "mounts": "mounts",
    "groups": "control groups",
    "dirs": "work dirs",
}


def render(told: dict[str, Any]) -> str:
    """The page."""
    levels = [
        f"| {name} | {told['before'][key]:,} | {told['after'][key]:,} "
        f"| {told['growth_per_1000_runs'][key]:.2f} |"
        for key, name in NAMES.items()
    ]
    return TEXT.format(
        **told["machine"]
        | told["bounds"]
        | {k: told[k] for k in ("date", "seed", "rounds", "runs", "sessions")},
        verdict="Passed" if told["ok"] else "Failed",
        user="root" if told["machine"]["root"] else "an ordinary user",
        minutes=told["seconds"] / 60,
        kills=told["kills"],
        unknown=told["unknown"],
        wrong=len(told["wrong"]),
        left=len(told["left"]),
        levels="\n".join(levels),
        jobs=_rows(told["jobs"]),
        killed=_rows(told["killed"]),
        errors=_rows(told["errors"]),
    )


def _rows(counts: dict[str, int]) -> str:
    return (
        "\n".join(f"| {name} | {number:,} |" for name, number in counts.items()) or "| none | 0 |"
    )
