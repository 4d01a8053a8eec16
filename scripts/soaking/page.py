"""Generate docs/reference/soak.md from the summary of a soak test."""

from __future__ import annotations

from typing import Any

__all__ = ["render"]

TEXT = """\
# Soak test

`make soak MINUTES=...` puts one process under mixed load: it opens and closes sessions on this
machine (both isolating backends) and on its own server, with shell and Python commands, timeouts,
large outputs, standard input, terminals, files, an allow-list to a service on loopback, and
cancellations. Meanwhile it kills launchers, sandboxes, waiting processes, the server and whole host
programs at random moments. After every round it closes all sessions and compares the resources of
the process with those before the round.

A kill may cause errors: the [expected codes](../../scripts/soaking/excuses.py), in sessions whose
processes were hit. Any other error, a wrong result, an invented exit code, a leftover or growth
fails the test.

Memory is measured after a warm-up: a third of the rounds, at most five minutes. From then on it may
grow by less than {kib_per_1000_runs:g} KiB per 1,000 commands, by least squares over all rounds;
one leaked object per command would exceed that. Total growth of less than {steps_kib} KiB is
ignored, because allocators reserve memory in steps. No other resource may grow.

`make soak` generates this page from its own summary.

## Result on {date}

{verdict}, on {cores} {machine} cores, Linux {kernel}, Python {python}, as {user}; seed {seed}.

| | |
|---|---:|
| duration | {minutes:.0f} minutes, {rounds} rounds, {warm_rounds} of them warm-up |
| commands run, in one process | {runs:,} |
| sessions opened and closed | {sessions:,} |
| processes killed | {kills:,} |
| of these, in incomplete sandboxes of an unknown session | {unknown} |
| wrong results | {wrong} |
| leftovers at the end | {left} |

### Resources of the process

| | after warm-up | at the end | growth per 1,000 runs |
|---|---:|---:|---:|
{levels}

### Jobs

| job | count |
|---|---:|
{jobs}

### Kills

| target | count |
|---|---:|
{killed}

### Resulting errors

| error | count |
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


def render(summary: dict[str, Any]) -> str:
    """Return the page for a summary."""
    levels = [
        f"| {name} | {summary['before'][key]:,} | {summary['after'][key]:,} "
        f"| {summary['growth_per_1000_runs'][key]:.2f} |"
        for key, name in NAMES.items()
    ]
    return TEXT.format(
        **summary["machine"]
        | summary["bounds"]
        | {k: summary[k] for k in ("date", "seed", "rounds", "runs", "sessions")},
        verdict="Passed" if summary["ok"] else "Failed",
        user="root" if summary["machine"]["root"] else "an ordinary user",
        minutes=summary["seconds"] / 60,
        kills=summary["kills"],
        unknown=summary["unknown"],
        wrong=len(summary["wrong"]),
        left=len(summary["left"]),
        levels="\n".join(levels),
        jobs=_rows(summary["jobs"]),
        killed=_rows(summary["killed"]),
        errors=_rows(summary["errors"]),
    )


def _rows(counts: dict[str, int]) -> str:
    return (
        "\n".join(f"| {name} | {number:,} |" for name, number in counts.items()) or "| none | 0 |"
    )
